"""The interface for programs, and signing in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, expect

from decoder.trace import Run
from playground.auth import password_line
from tests.browser.conftest import Server, free_port, start, stop

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server.url, verbose=False)


def test_run_show_list(client: Client) -> None:
    made = client.predict(
        prompt="Over the interface",
        proposer="ngram",
        k=2,
        max_new_tokens=20,
        options={"ngram_max": 3, "sampling": {"top_k": 5}},
        author="Ada",
        api_name="/run",
    )
    run = Run.from_json(made)
    assert run.request["ngram_max"] == 3
    assert run.request["sampling"]["top_k"] == 5
    assert run.baseline_id
    assert client.predict(run_id=run.id, api_name="/show_run") == json.loads(json.dumps(made))
    listed = client.predict(text="Over the interface", api_name="/list_runs")
    assert listed["total"] == 2
    assert {row["author"] for row in listed["runs"]} == {"Ada"}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"api_name": "/show_run", "run_id": "<b>"}, "is not a run's id"),
        ({"api_name": "/show_run", "run_id": "rnobody"}, "there is no run"),
        ({"api_name": "/run", "prompt": "  "}, "the prompt is empty"),
        ({"api_name": "/run", "prompt": "x", "k": 0}, "k (draft length)"),
        ({"api_name": "/run", "prompt": "x", "options": {"surprise": 1}}, "unknown field 'surprise'"),
        ({"api_name": "/run", "prompt": "x", "target": "missing"}, "neither a named target"),
        ({"api_name": "/run", "prompt": "x", "options": {"ngram_max": "3"}}, "n-gram maximum"),
        ({"api_name": "/run", "prompt": "x", "options": {"sampling": [1]}}, "sampling must be a JSON object"),
        ({"api_name": "/list_runs", "limit": 100000}, "limit must be"),
    ],
)
def test_mistakes_come_back_as_sentences(client: Client, call: dict[str, object], sentence: str) -> None:
    with pytest.raises(AppError) as caught:
        client.predict(**call)
    assert sentence in str(caught.value)


def test_only_three_endpoints_are_named(server: Server) -> None:
    named = httpx.get(f"{server.url}/gradio_api/info", trust_env=False).json()["named_endpoints"]
    assert set(named) == {"/list_runs", "/show_run", "/run"}
    assert "newest first" in json.dumps(named["/list_runs"])


def test_no_folder_is_served(server: Server) -> None:
    for path in ("file=/etc/passwd", f"file={server.db}", "file=app.py", "file=assets/js/shell.js"):
        assert httpx.get(f"{server.url}/gradio_api/{path}", trust_env=False).status_code in (403, 404)


def test_the_page_may_load_nothing_from_elsewhere(server: Server) -> None:
    answer = httpx.get(server.url, trust_env=False)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]


def test_an_import_takes_only_what_was_uploaded(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("[]")
    config = httpx.get(f"{server.url}/config", trust_env=False).json()
    upload = next(c["id"] for c in config["components"] if c["type"] == "uploadbutton")
    event = next(d for d in config["dependencies"] if upload in d["inputs"])
    values = {c["id"]: c["props"].get("value") for c in config["components"]}
    data = [values.get(i) for i in event["inputs"]]
    data[event["inputs"].index(upload)] = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    answer = httpx.post(
        f"{server.url}/gradio_api/run/predict",
        json={"data": data, "fn_index": event["id"], "session_hash": "stranger"},
        trust_env=False,
    )
    assert answer.status_code == 500
    assert secret.exists()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    users = folder / "users"
    users.write_text(password_line("ada", "right horse") + "\n")
    port, db = free_port(), folder / "runs.db"
    made = start(folder, ["-m", "tests.browser.fake_app", str(port), f"sqlite:///{db}", str(users)], port, db)
    yield made
    stop(made)


def test_without_signing_in_nothing_is_given(guarded: Server) -> None:
    for path in ("/config", "/gradio_api/info", "/gradio_api/queue/data?session_hash=x"):
        assert httpx.get(guarded.url + path, trust_env=False).status_code == 401
    with pytest.raises(Exception, match=r"(?i)auth|401|login"):
        Client(guarded.url, verbose=False)
    with pytest.raises(Exception, match=r"(?i)auth|401|login|incorrect"):
        Client(guarded.url, auth=("ada", "wrong"), verbose=False)


def test_the_signed_in_name_is_the_author(guarded: Server, chromium: Browser, tmp_path: Path) -> None:
    client = Client(guarded.url, auth=("ada", "right horse"), verbose=False)
    client.predict(prompt="signed", proposer="ngram", max_new_tokens=8, author="mallory", api_name="/run")
    rows = client.predict(api_name="/list_runs")["runs"]
    assert {row["author"] for row in rows} == {"ada"}

    context = chromium.new_context()
    page = context.new_page()
    page.goto(guarded.url)
    page.get_by_label("username").fill("ada")
    page.get_by_label("password").fill("right horse")
    page.get_by_role("button", name="Login").click()
    expect(page.locator("#rl-who")).to_contain_text("ada", timeout=30_000)
    expect(page.locator("#rl-name")).to_have_count(0)
    context.close()
