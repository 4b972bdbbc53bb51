"""The whole page in Chromium, with an engine that needs no model: what a person does, and what strangers try."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from playground import example_runs
from tests.browser.conftest import Server, Visitor, visit

pytestmark = pytest.mark.browser

RUNS = ".rl-table tbody tr"


def run(page: Page, prompt: str, *, tokens: int = 40, wait: bool = True) -> None:
    """Write a prompt and run it."""
    page.fill("#rl-prompt textarea", prompt)
    page.fill("#rl-max-tokens input", str(tokens))
    page.locator("#rl-max-tokens input").blur()
    before = page.evaluate("Redline.store.state.run?.id")
    page.click("#rl-run")
    if wait:
        # The sentence on the run before this one may still be there.
        page.wait_for_function(
            "(id) => Redline.store.state.run?.id !== id || document.querySelector('#rl-note .rl-note-error')",
            arg=before,
        )
        done(page)


def done(page: Page) -> None:
    """Wait for the end of a run with its baseline."""
    expect(page.locator("#rl-note .rl-note-good, #rl-note .rl-note-warning, #rl-note .rl-note-error")).to_be_visible(
        timeout=60_000
    )


def choose(page: Page, field: str, label: str) -> None:
    """Choose an option of a dropdown."""
    page.click(f"{field} input")
    page.get_by_role("option", name=label).first.click()


def propose(page: Page, title: str) -> None:
    """Choose a proposer."""
    page.click("#rl-proposer .rl-pick-button")
    page.locator("#rl-proposer").get_by_role("option", name=title).first.click()


def run_id(page: Page) -> str:
    """The run that the address names."""
    page.wait_for_url(re.compile(r"[?&]run=r"))
    found = re.search(r"[?&]run=([A-Za-z0-9_-]+)", page.url)
    assert found
    return found[1]


def open_history(visitor: Visitor) -> Page:
    """The History tab with its list drawn."""
    visitor.tab("History")
    expect(visitor.page.locator(".rl-table, .rl-empty").first).to_be_visible()
    return visitor.page


# --- opening and running ------------------------------------------------------------------------------------------


def test_first_open_shows_a_page_and_a_model(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#rl-prompt textarea")).to_be_visible()
    expect(page.locator("#rl-status")).to_contain_text("smollm2-135m", timeout=30_000)
    expect(page.locator("#rl-run")).to_be_enabled()
    expect(page.locator("#rl-stop")).to_be_disabled()
    # Nothing was run yet, and still there is a run to step through: the recorded example, with its baseline.
    example = example_runs.first()
    assert example is not None
    assert example[1] is not None
    expect(page.locator("#rl-caption")).to_contain_text("A recorded example")
    assert page.evaluate("Redline.store.state.rows.length") == len(example[0].steps)
    expect(page.locator("#rl-ladder .rl-row").nth(1)).to_be_visible()
    expect(page.locator("#rl-answer [data-mark=rejected]").first).to_be_visible()
    why = page.locator("#rl-why .rl-sentence").first
    expect(why).to_contain_text(re.compile(r"\w+ \w+"))
    expect(why).not_to_contain_text("choose")  # it says why, not how to ask
    expect(page.locator("#rl-why .rl-bar-row").first).to_be_visible()
    expect(page.locator("#rl-numbers")).to_contain_text("against its measured baseline")


def test_a_run_grows_ends_and_is_in_the_address(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Why is the sky blue? One")
    expect(page.locator("#rl-answer")).to_contain_text("sky")
    expect(page.locator("#rl-note")).to_contain_text("Done")
    expect(page.locator("#rl-numbers")).to_contain_text("ms per token")
    expect(page.locator("#rl-run-charts .js-plotly-plot")).to_have_count(3)
    assert run_id(page).startswith("rfake")
    expect(page.locator("#rl-run")).to_be_enabled()


@pytest.mark.parametrize("proposer", ["No drafting", "N-gram", "Predicted output", "Early exit"])
def test_every_proposer_runs(visitor: Visitor, proposer: str) -> None:
    page = visitor.open()
    propose(page, proposer)
    if proposer == "Predicted output":
        expect(page.locator("#rl-prediction textarea")).to_be_visible()
        page.fill("#rl-prediction textarea", "The sky is blue")
    if proposer == "No drafting":
        expect(page.locator("#rl-baseline input")).to_be_disabled()
        expect(page.locator("#rl-baseline")).to_contain_text("this run is the baseline")
    run(page, f"Why is the sky blue, asked {proposer}?")
    expect(page.locator("#rl-answer")).to_contain_text("sky")


def test_stop_keeps_what_there_is(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "slow, please", wait=False)
    expect(page.locator("#rl-note")).to_contain_text("tokens", timeout=20_000)
    page.click("#rl-stop")
    expect(page.locator("#rl-note")).to_contain_text("they are kept", timeout=20_000)
    expect(page.locator("#rl-run")).to_be_enabled()
    page = open_history(visitor)
    expect(page.locator(RUNS).first).to_contain_text("stopped")


def test_a_live_run_is_not_pushed_off_the_stage(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "slow and alone", wait=False)
    expect(page.locator("#rl-note")).to_contain_text("tokens", timeout=20_000)
    open_history(visitor)
    expect(page.locator(RUNS).first).to_contain_text("running")
    page.locator(RUNS).nth(1).locator(".rl-open").click()
    expect(page.locator("#rl-history-note .rl-note-error")).to_contain_text("is going on")
    visitor.tab("Playground")
    page.click("#rl-stop")
    expect(page.locator("#rl-run")).to_be_enabled(timeout=20_000)


def test_bad_input_is_answered_beside_the_controls(visitor: Visitor) -> None:
    page = visitor.open()
    page.fill("#rl-prompt textarea", "   ")
    page.click("#rl-run")
    expect(page.locator("#rl-note .rl-note-error")).to_contain_text("The prompt is empty")
    run(page, "too long")
    expect(page.locator("#rl-note .rl-note-error")).to_contain_text("shorten it by 809 tokens")


def test_an_unknown_model_is_named(visitor: Visitor) -> None:
    page = visitor.open()
    box = page.locator("#rl-target input")
    box.fill("missing/model")
    box.press("Enter")
    box.blur()
    run(page, "hello")
    expect(page.locator("#rl-note .rl-note-error")).to_contain_text("missing/model is neither a named target")


def test_a_second_visitor_waits_and_reading_does_not(visitor: Visitor, chromium: Browser, server: Server) -> None:
    page = visitor.open()
    run(page, "slow, the first", wait=False)
    expect(page.locator("#rl-note")).to_contain_text("tokens", timeout=20_000)
    others = visit(chromium, server.url)
    other = next(others)
    second = other.open()
    run(second, "the second", wait=False)
    expect(second.locator("#rl-note")).to_contain_text("1 person before you", timeout=20_000)
    open_history(other)
    expect(second.locator(RUNS).first).to_contain_text("slow, the first")
    page.click("#rl-stop")
    other.tab("Playground")
    done(second)
    for _ in others:
        pass


# --- replay and addresses -----------------------------------------------------------------------------------------


def test_replay_with_the_keyboard_and_come_back(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Why is the sky blue? Replay")
    identifier = run_id(page)
    page.goto(f"{visitor.url}/?run={identifier}&step=2&token=0")
    expect(page.locator("#rl-caption")).to_contain_text(identifier)
    expect(page.locator("#rl-why")).to_contain_text("step 2")
    expect(page.locator("#rl-prompt textarea")).not_to_be_focused()
    page.locator("#rl-ladder .rl-sel, #rl-answer .rl-sel").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile(r"token=1|step=3"))
    assert f"run={identifier}" in page.url


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("/?run=rnobody", "there is no run"),
        ("/?run=<script>window.HACKED=1</script>", "is not a run's id"),
        ("/?run=${window.HACKED=1}", "is not a run's id"),
        ("/?tab=`{{x}}`", "There is no tab"),
    ],
)
def test_unknown_and_hostile_addresses_get_a_sentence(visitor: Visitor, address: str, sentence: str) -> None:
    page = visitor.open(address)
    expect(page.locator("#rl-note .rl-note-error")).to_contain_text(re.compile(sentence, re.I))
    assert page.evaluate("window.HACKED") is None


def test_unknown_runs_in_a_comparison_get_a_sentence(visitor: Visitor) -> None:
    page = visitor.open("/?compare=rno,rbody")
    expect(page.locator("#rl-compare-progress .rl-note-error")).to_contain_text("no run 'rno'")
    page.goto(visitor.url + "/?compare=<b>,x")
    expect(page.locator("#rl-compare-progress .rl-note-error")).to_contain_text("“<b>”")


# --- history ------------------------------------------------------------------------------------------------------


def test_history_finds_renames_exports_deletes_and_imports(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.open()
    page.fill("#rl-name input, #rl-name textarea", "Ada <i>L</i>")
    page.locator("#rl-name input, #rl-name textarea").blur()
    run(page, "A needle in the haystack")
    identifier = run_id(page)
    open_history(visitor)
    page.fill("#rl-search textarea, #rl-search input", "needle")
    expect(page.locator(RUNS)).to_have_count(2)
    choose(page, "#rl-by-proposer", "ngram" if page.locator(RUNS, has_text="ngram").count() else "draft-model")
    expect(page.locator(RUNS)).to_have_count(1)
    row = page.locator(RUNS).first
    expect(row).to_contain_text("Ada <i>L</i>")
    row.locator("input").check()
    expect(page.locator("#rl-chosen")).to_contain_text("1 selected")
    page.fill("#rl-edit-name textarea, #rl-edit-name input", "<b>bold</b> ${1+1} {{x}}")
    page.fill("#rl-edit-tags textarea, #rl-edit-tags input", "edit, '><script>")
    page.fill("#rl-edit-note textarea", "a note")
    page.click("#rl-do-save")
    expect(page.locator("#rl-history-note")).to_contain_text("Saved: name, tags, note")
    expect(row).to_contain_text("<b>bold</b> ${1+1} {{x}}")
    expect(row).to_contain_text("'><script>")

    with page.expect_download() as download:
        page.click("#rl-do-json")
    exported = tmp_path / download.value.suggested_filename
    download.value.save_as(exported)
    assert identifier in exported.name
    with page.expect_download() as download:
        page.click("#rl-do-csv")
    table = tmp_path / "runs.csv"
    download.value.save_as(table)
    assert identifier in table.read_text(encoding="utf-8")

    page.click("#rl-do-delete")
    expect(page.locator("#rl-confirm")).to_contain_text("Delete 1 run")
    page.click("#rl-do-delete-no")
    expect(row).to_be_visible()
    page.click("#rl-do-delete")
    page.click("#rl-do-delete-yes")
    expect(page.locator("#rl-history-note")).to_contain_text("1 run deleted")
    expect(page.locator(".rl-empty")).to_contain_text("No run matches")

    page.set_input_files("#rl-do-import input[type=file], input[type=file]", str(exported))
    expect(page.locator("#rl-history-note")).to_contain_text("Imported 1 run")
    expect(page.locator(RUNS).first).to_contain_text("<b>bold</b>")
    page.locator(RUNS).first.locator(".rl-open").click()
    expect(page.locator("#rl-caption")).to_contain_text("<b>bold</b> ${1+1} {{x}}")
    assert run_id(page) == identifier


def test_archive_and_bring_back(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "To be archived")
    open_history(visitor)
    page.fill("#rl-search textarea, #rl-search input", "To be archived")
    expect(page.locator(RUNS)).to_have_count(2)
    page.locator(".rl-all").check()
    expect(page.locator("#rl-chosen")).to_contain_text("2 selected")
    page.click("#rl-do-archive")
    expect(page.locator("#rl-history-note")).to_contain_text("2 runs archived")
    expect(page.locator(".rl-empty")).to_be_visible()
    expect(page.locator("#rl-chosen")).not_to_contain_text("selected")


def test_sorting_keeps_the_selection(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Sorting")
    open_history(visitor)
    first = page.locator(RUNS).first
    identifier = first.get_attribute("data-id")
    first.locator("input").check()
    page.click(".rl-sort[data-key=created_at]")
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("When")
    expect(page.locator(f'tr[data-id="{identifier}"] input')).to_be_checked()
    expect(page.locator("#rl-chosen")).to_contain_text("1 selected")


@pytest.mark.parametrize(
    "content", ["not json", "{}", '{"schema": 9}', "[" * 5000, json.dumps({"schema": 1, "id": "<script>"})]
)
def test_a_bad_import_is_refused_whole(visitor: Visitor, tmp_path: Path, content: str) -> None:
    page = visitor.open("/?tab=history")
    file = tmp_path / "bad.json"
    file.write_text(content)
    page.set_input_files("input[type=file]", str(file))
    expect(page.locator("#rl-history-note .rl-note-error")).to_contain_text("Nothing was imported")


def test_a_run_opens_from_a_page_that_began_with_history(visitor: Visitor) -> None:
    page = visitor.open("/?tab=history")
    page.locator(RUNS).first.locator(".rl-open").click()
    expect(page.locator("#rl-caption")).to_contain_text("rfake")
    expect(page.locator("#rl-ladder")).to_contain_text("from the prompt")
    assert run_id(page)


def test_run_again_fills_the_controls_and_runs(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Run me twice", tokens=23)
    first = run_id(page)
    page.fill("#rl-prompt textarea", "something else")
    open_history(visitor)
    page.locator(f'tr[data-id="{first}"] input').check()
    page.click("#rl-do-again")
    expect(page.locator("#rl-prompt textarea")).to_have_value("Run me twice")
    expect(page.locator("#rl-max-tokens input")).to_have_value("23")
    done(page)
    page.wait_for_function(f"!location.search.includes({first!r}) && location.search.includes('run=')")


# --- comparing ----------------------------------------------------------------------------------------------------


def test_compare_two_runs(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Compare me")
    open_history(visitor)
    page.fill("#rl-search textarea, #rl-search input", "Compare me")
    expect(page.locator(RUNS)).to_have_count(2)
    page.locator(".rl-all").check()
    page.click("#rl-do-compare")
    expect(page.locator("#rl-compare-numbers")).to_contain_text("Tokens per second")
    expect(page.locator("#rl-compare")).to_contain_text("tokens are the same in every run")
    expect(page.locator("#rl-compare-config")).to_contain_text("proposer")
    expect(page.locator("#rl-compare-config")).not_to_contain_text("temperature")
    page.locator("#rl-only-differences input").uncheck()
    expect(page.locator("#rl-compare-config")).to_contain_text("temperature")
    page.wait_for_url(re.compile(r"\?compare=r\w+,r\w+"))
    page.reload()
    expect(page.locator("#rl-compare-numbers")).to_contain_text("Tokens per second")


def test_compare_draft_lengths(visitor: Visitor) -> None:
    page = visitor.open()
    page.fill("#rl-prompt textarea", "Which length?")
    visitor.tab("Compare")
    page.fill("#rl-lengths textarea, #rl-lengths input", "1, 3")
    page.click("#rl-run-lengths")
    expect(page.locator("#rl-compare-progress")).to_contain_text("Done: 3 runs", timeout=60_000)
    expect(page.locator("#rl-compare-numbers thead")).to_contain_text("baseline")
    expect(page.locator("#rl-compare-numbers thead")).to_contain_text("k = 3")
    expect(page.locator("#rl-compare-charts .js-plotly-plot")).to_have_count(2)
    page.fill("#rl-lengths textarea, #rl-lengths input", "1, 900")
    page.click("#rl-run-lengths")
    expect(page.locator("#rl-compare-progress .rl-note-error")).to_contain_text("from 1 to 64")


def test_a_comparison_can_be_cancelled(visitor: Visitor) -> None:
    page = visitor.open()
    page.fill("#rl-prompt textarea", "slow comparison")
    visitor.tab("Compare")
    page.click("#rl-run-lengths")
    expect(page.locator("#rl-compare-progress")).to_contain_text("1 of 5", timeout=20_000)
    page.click("#rl-compare-cancel")
    expect(page.locator("#rl-compare-progress")).to_contain_text("Stopped", timeout=20_000)
    expect(page.locator("#rl-run-lengths")).to_be_enabled()


# --- hostile text, small screens, keyboard ---------------------------------------------------------------------------


def test_hostile_tokens_are_text_everywhere(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "hostile <script>window.HACKED=9</script> ${window.HACKED=8} `{{x}}`", tokens=64)
    expect(page.locator("#rl-answer")).to_contain_text("<script>window.HACKED=1</script>")
    expect(page.locator("#rl-answer")).to_contain_text("${window.HACKED=2}")
    identifier = run_id(page)
    open_history(visitor)
    expect(page.locator(f'tr[data-id="{identifier}"]')).to_contain_text("<script>window.HACKED=9</script>")
    page.goto(f"{visitor.url}/?compare={identifier},{identifier}x")
    expect(page.locator("#rl-compare")).to_contain_text("<script>")
    expect(page.locator("#rl-compare-result")).to_be_visible()
    assert page.evaluate("window.HACKED") is None
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_400_pixels(chromium: Browser, server: Server, scheme: str) -> None:
    visitors = visit(chromium, server.url, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    visitor = next(visitors)
    page = visitor.open()
    run(page, "On a small screen")
    fits = "document.documentElement.scrollWidth <= window.innerWidth + 1"
    assert page.evaluate(fits)
    expect(page.locator("#rl-run")).to_be_in_viewport()
    open_history(visitor)
    expect(page.locator(RUNS).first).to_be_visible()
    assert page.evaluate(fits)
    visitor.tab("Compare")
    expect(page.locator("#rl-run-lengths")).to_be_visible()
    assert page.evaluate(fits)
    for _ in visitors:
        pass


def test_ctrl_enter_runs(visitor: Visitor) -> None:
    page = visitor.open()
    page.fill("#rl-prompt textarea", "By keyboard")
    page.locator("#rl-prompt textarea").press("Control+Enter")
    done(page)
    expect(page.locator("#rl-answer")).to_contain_text("sky")


def test_the_name_is_kept_in_the_browser(visitor: Visitor) -> None:
    page = visitor.open()
    name = page.locator("#rl-name input, #rl-name textarea")
    name.fill("Grace")
    name.blur()
    page.wait_for_timeout(500)
    visitor.open()
    expect(name).to_have_value("Grace")


def test_a_page_that_does_nothing_draws_nothing(visitor: Visitor) -> None:
    """Each picture takes time from an engine on the same machine. Callbacks are numbered one after the other."""
    page = visitor.open()
    count = """async () => {
        const ask = () => { const id = requestAnimationFrame(() => {}); cancelAnimationFrame(id); return id; };
        const first = ask();
        await new Promise((done) => setTimeout(done, 1000));
        return ask() - first - 1;
    }"""
    # The loading screen's animation ends some seconds later; its clock would go on for ever.
    assert any(page.evaluate(count) < 5 for _ in range(20))


def test_few_components_are_touched_while_a_run_streams(visitor: Visitor) -> None:
    """The page works through every output of an event at every frame; what shows progress is copied as a whole."""
    config = visitor.open().evaluate("window.gradio_config")
    streams = [d for d in config["dependencies"] if d["types"]["generator"] and d["api_visibility"] == "private"]
    assert len(streams) == 2  # a run, and a comparison
    assert max(len(d["outputs"]) for d in streams) <= 6
    private = [d for d in config["dependencies"] if d["api_visibility"] == "private" and d["outputs"]]
    assert [d for d in private if d["show_progress_on"] != []] == []
