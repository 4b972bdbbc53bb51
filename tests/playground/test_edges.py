"""What strangers send: addresses, names, selections, password files, filters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from decoder.errors import RedlineError
from playground import auth, history_actions
from playground.app_factory import MAX_UPLOAD
from playground.authors import author_of, clean_author
from playground.deeplinks import parse_view, read_ids
from playground.history_actions import comparable, read_selection
from playground.history_list import START, RunList
from playground.history_view import clamp_offset, export_name, page_line, read_filter, read_order, read_tags, zone
from playground.notes import note, people_before, sentence
from storage import open_store
from storage.transfer import MAX_BYTES
from tests.playground.visual_runs import make_run

TABS = ("playground", "compare", "history")


def test_addresses() -> None:
    assert parse_view({}, TABS).tab == "playground"
    assert parse_view({"run": "r1", "step": "3"}, TABS).run_id == "r1"
    assert parse_view({"compare": "r1, r2,r1"}, TABS).compare == ("r1", "r2")
    assert parse_view({"tab": "history"}, TABS).tab == "history"


@pytest.mark.parametrize(
    "params",
    [
        {"run": "<script>alert(1)</script>"},
        {"run": "../../etc/passwd"},
        {"run": "r" * 65},
        {"compare": "r1,${1+1}"},
        {"compare": ",".join(f"r{n}" for n in range(20))},
        {"tab": "settings`"},
    ],
)
def test_hostile_addresses_become_a_sentence(params: dict[str, str]) -> None:
    view = parse_view(params, TABS)
    assert view.problem
    assert view.run_id is None
    assert not view.compare
    assert "<script" not in note(view.problem, "error")


def test_selections_are_checked() -> None:
    assert read_ids(["r1", "r2", "r1"]) == ("r1", "r2")
    assert read_selection('["r1"]') == ("r1",)
    for payload in (None, "r1", {"a": 1}, ["r1", 2], ["<b>"], [None], ["r"] * 10_001):
        with pytest.raises(RedlineError):
            read_ids(payload)
    for text in (None, "{", "[1]", '"r1"', "x" * 2_000_001):
        with pytest.raises(RedlineError):
            read_selection(text)
    with pytest.raises(RedlineError, match="1 run is selected"):
        comparable(["r1"])


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("  Ada   Lovelace ", "Ada Lovelace"),
        ("", "anonymous"),
        (None, "anonymous"),
        (7, "anonymous"),
        ("\u202eevil\u202c", "evil"),
        ("a\x00b\nc", "ab c"),
        ("x" * 500, "x" * 64),
        ("<b>Bo</b>", "<b>Bo</b>"),
        ("林", "林"),
    ],
)
def test_authors(typed: Any, shown: str) -> None:
    assert clean_author(typed) == shown


def test_a_signed_in_name_cannot_be_overridden() -> None:
    assert author_of("ada", "root") == "ada"
    assert author_of(None, "Bo") == "Bo"


def test_password_file(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text(f"# team\n\n{auth.password_line('ada', 'secret')}\n", encoding="utf-8")
    verify = auth.verifier(auth.read_password_file(file))
    assert verify("ada", "secret")
    assert not verify("ada", "wrong")
    assert not verify("bob", "secret")
    assert not verify("bob", "nobody has this password")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ada", "not of the form name:hash"),
        ("ada:secret", "not an argon2 hash"),
        (":$argon2id$v=19$m=8,t=1,p=1$YWFhYWFhYWE$YWFhYWFhYWE", "the name is empty"),
        ("a\u200bb:x", "invisible character"),
    ],
)
def test_bad_password_lines_are_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "users"
    file.write_text(f"{auth.password_line('ok', 'x')}\n{line}\n", encoding="utf-8")
    with pytest.raises(auth.AuthError, match="line 2") as caught:
        auth.read_password_file(file)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_password_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(auth.AuthError, match="cannot be read"):
        auth.read_password_file(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(auth.AuthError, match="names nobody"):
        auth.read_password_file(tmp_path / "empty")
    twice = auth.password_line("ada", "x")
    (tmp_path / "twice").write_text(f"{twice}\n{twice}\n")
    with pytest.raises(auth.AuthError, match="given before"):
        auth.read_password_file(tmp_path / "twice")


def test_filters() -> None:
    found = read_filter({"text": " sky ", "k": "4", "since": "2025-01-02", "until": "2025-01-02", "archived": "all"})
    assert found.text == "sky"
    assert found.k == 4
    assert found.since == datetime(2025, 1, 2).astimezone()
    assert found.until == datetime(2025, 1, 3).astimezone()
    assert found.archived is None
    assert read_filter({"target": "", "k": "x", "archived": "<b>"}).archived is False
    with pytest.raises(RedlineError, match="not one"):
        read_filter({"since": "yesterday"})
    with pytest.raises(RedlineError, match="wrong way round"):
        read_filter({"since": "2025-02-01", "until": "2025-01-01"})


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("berlin")
def test_days_are_those_of_the_server() -> None:
    day = read_filter({"since": "2025-03-30", "until": "2025-03-30"})
    assert day.since == datetime(2025, 3, 29, 23, tzinfo=UTC)
    assert day.until == datetime(2025, 3, 30, 22, tzinfo=UTC)  # clocks went on: a day of 23 hours
    assert zone(datetime(2025, 1, 2, tzinfo=UTC)) == "UTC+01:00"
    assert zone(datetime(2025, 7, 2, tzinfo=UTC)) == "UTC+02:00"


@pytest.mark.parametrize(
    "day", ["9999-12-31", "0001-01-01", "2025-02-30", "٢٠٢٥-٠١-٠١", "\0", "2025-01-01T25", "x" * 50]
)
@pytest.mark.parametrize("box", ["since", "until"])
def test_no_date_makes_the_list_fail(tmp_path: Path, day: str, box: str) -> None:
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as store:
        values = ["", "", "", "", "", "", day if box == "since" else "", day if box == "until" else "", "active"]
        listed = RunList(store).listing(dict(START), values)
    assert "No run" in str(listed[1]) or "write it like" in str(listed[-1])


def test_the_last_day_of_all_ends_nowhere() -> None:
    assert read_filter({"until": "9999-12-31"}).until is None


def test_exports_are_small_enough_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert history_actions.MAX_EXPORT_BYTES < MAX_BYTES == MAX_UPLOAD
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as store:
        run = make_run(run_id="r1")
        store.start_run(run.replace(steps=(), output_ids=(), text="", finish_reason=None, decode_ms=0.0)).finish(run)
        _, text = history_actions.export(store, ["r1"], "json")
        monkeypatch.setattr(history_actions, "MAX_EXPORT_BYTES", len(text) - 10)
        with pytest.raises(RedlineError, match="python -m storage export"):
            history_actions.export(store, ["r1"], "json")


def test_pages_and_orders() -> None:
    assert page_line(50, 50, 10_000) == "51–100 of 10,000 runs"
    assert page_line(0, 1, 1) == "1–1 of 1 run"
    assert clamp_offset(100, 60) == 50
    assert clamp_offset(-5, 60) == 0
    assert clamp_offset(70, 0) == 0
    assert read_order({"key": "speedup"}) == "speedup"
    for payload in (None, {"key": "steps; drop table"}, "speedup"):
        with pytest.raises(RedlineError):
            read_order(payload)


def test_names_of_files_and_tags() -> None:
    now = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert export_name(["r1"], "json", now) == "redline-r1-20250102-030405.json"
    assert export_name(["../..\\x"], "csv", now) == "redline-x-20250102-030405.csv"
    assert export_name(["a", "b"], "csv", now) == "redline-2-runs-20250102-030405.csv"
    assert read_tags(" a,b ,, a , c  d") == ("a", "b", "c d")


def test_notes_are_escaped_and_speak() -> None:
    assert "<script" not in note("<script>", "error")
    assert 'role="alert"' in note("x", "error")
    assert note("") == ""
    assert sentence("the prompt is empty") == "The prompt is empty."
    assert sentence("k must be 1") == "K must be 1."
    assert sentence("smollm2-135m could not be loaded") == "smollm2-135m could not be loaded."
    assert people_before(0) == "Your run is next."
    assert people_before(1) == "1 person before you."
    assert people_before(2) == "2 people before you."
