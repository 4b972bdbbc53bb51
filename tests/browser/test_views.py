"""The address follows the tab on show, replay on the real page, and names that try to break History and Compare."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from storage import open_store
from tests.browser.conftest import Server, Visitor, visit
from tests.browser.test_pages import RUNS, choose, done, open_history, run, run_id

pytestmark = pytest.mark.browser

FITS = "document.documentElement.scrollWidth <= window.innerWidth + 1"
HOSTILE = "\u202egnp.exe `${window.HACKED=1}` %{customdata} {{x}} <img src=x onerror=window.HACKED=2>"
LONG = "W" * 10_000


def settled(page: Page) -> None:
    """Leave time for what must not happen; what must happen is waited for instead: a busy page may take longer."""
    page.wait_for_timeout(400)


# --- addresses ----------------------------------------------------------------------------------------------------


def test_the_address_is_that_of_the_tab_on_show(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "slow, addressed", tokens=12, wait=False)
    expect(page.locator("#rl-note")).to_contain_text("tokens", timeout=20_000)
    open_history(visitor)
    expect(page).to_have_url(f"{visitor.url}/?tab=history")
    visitor.tab("Compare")
    done_in_background(page)
    expect(page).to_have_url(f"{visitor.url}/?tab=compare")
    page.reload()
    expect(page.locator("#rl-run-lengths")).to_be_visible()
    visitor.tab("Playground")
    expect(page).not_to_have_url(re.compile("tab="))


def done_in_background(page: Page) -> None:
    """Wait for the end of a run, and of its baseline, whose tab is not on show."""
    page.wait_for_function("(window.Redline.store.state.end || {}).baseline", timeout=60_000)


@pytest.mark.parametrize("width", [1280, 200])
def test_a_tab_that_is_chosen_while_the_page_opens_is_named(visitor: Visitor, width: int) -> None:
    """A choice between the moment when the page shows its address's tab and the one when it hears that it is open."""
    page = visitor.page
    page.set_viewport_size({"width": width, "height": 800})
    page.add_init_script(
        """
        window.RedlineShell = {};
        let late;
        Object.defineProperty(window.RedlineShell, "opened", {
          configurable: true,
          set: (open) => { late = open; },
          get: () => (id) => { window.openLate = () => late(id); },
        });
        """
    )
    page.goto(f"{visitor.url}/?tab=compare")
    expect(page.locator("#rl-run-lengths")).to_be_visible()
    page.wait_for_function("Boolean(window.openLate)")
    assert not page.evaluate("RedlineShell.isOpen()")
    to_tab(page, "History")
    expect(page.locator("#rl-search")).to_be_visible()
    settled(page)
    assert "tab=compare" in page.url
    page.evaluate("openLate()")
    expect(page).to_have_url(f"{visitor.url}/?tab=history")
    for name, query in (("Playground", ""), ("Compare", "?tab=compare"), ("History", "?tab=history")):
        to_tab(page, name)
        expect(page).to_have_url(f"{visitor.url}/{query}")


def to_tab(page: Page, name: str) -> None:
    """Choose a tab, where a narrow page hides it behind "More tabs"."""
    shown = page.get_by_role("tab", name=name)
    if not shown.is_visible():
        page.get_by_label("More tabs").click()
        shown = page.locator("#rl-tabs > .tab-wrapper .overflow-dropdown button", has_text=name)
    shown.click()


def test_coming_back_to_a_run_names_it_again(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Named again")
    identifier = run_id(page)
    open_history(visitor)
    expect(page).to_have_url(f"{visitor.url}/?tab=history")
    page.reload()
    expect(page.locator(RUNS).first).to_be_visible()
    page.locator(f'tr[data-id="{identifier}"] .rl-open').click()
    page.wait_for_url(re.compile(rf"/\?run={identifier}$"))
    page.reload()
    expect(page.locator("#rl-caption")).to_contain_text(identifier)


def test_after_an_unknown_address_another_run_is_named(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "To be opened later")
    identifier = run_id(page)
    page = visitor.open("/?run=rnobody")
    open_history(visitor)
    page.locator(f'tr[data-id="{identifier}"] .rl-open').click()
    page.wait_for_url(re.compile(rf"/\?run={identifier}$"))


def test_a_run_that_is_not_stored_is_not_named(visitor: Visitor) -> None:
    page = visitor.open()
    begin = '{"type":"begin","seq":1,"live":true,"run":{"id":"rlost","metrics":{}},"meta":{"author":"x","name":""}}\n'
    page.evaluate("text => window.Redline.feed(text)", begin)
    settled(page)
    assert "rlost" not in page.url
    page.evaluate("window.RedlineShell.keepRun('rlost')")
    page.wait_for_url(re.compile(r"run=rlost"))
    page.evaluate("window.RedlineShell.keepRun('')")
    expect(page).not_to_have_url(re.compile("rlost"))


# --- replay -------------------------------------------------------------------------------------------------------


def test_replay_plays_pauses_and_steps(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Replayed on the page")
    position = "window.Redline.store.state.position"
    scrubber = page.locator("[data-rl=scrubber]")
    scrubber.get_by_role("button", name=re.compile("^play", re.I)).click()
    page.wait_for_function(f"{position} >= 1 && window.Redline.store.state.playing")
    scrubber.get_by_role("button", name=re.compile("^pause", re.I)).click()
    at = page.evaluate(position)
    page.wait_for_timeout(1500)
    assert page.evaluate(position) == at
    page.locator("#rl-ladder .rl-sel, #rl-answer .rl-sel").first.focus()
    before = page.evaluate("window.Redline.store.state.selection")
    page.keyboard.press("ArrowRight")
    after = page.evaluate("window.Redline.store.state.selection")
    assert after != before
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("window.Redline.store.state.selection") == before
    page.wait_for_url(re.compile(rf"step={before['step']}&token={before['token']}"))


# --- History and Compare ------------------------------------------------------------------------------------------


def test_an_archived_run_is_brought_back(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Archived and back")
    identifier = run_id(page)
    open_history(visitor)
    page.fill("#rl-search textarea, #rl-search input", "Archived and back")
    expect(page.locator(RUNS)).to_have_count(2)
    row = page.locator(f'tr[data-id="{identifier}"]')
    row.locator("input").check()
    page.click("#rl-do-archive")
    expect(row).to_have_count(0)
    choose(page, "#rl-kept", "archived")
    row.locator("input").check()
    page.click("#rl-do-restore")
    expect(page.locator("#rl-history-note")).to_contain_text("1 run brought back")
    expect(row).to_have_count(0)
    choose(page, "#rl-kept", "active")
    expect(row).to_be_visible()
    expect(row).not_to_contain_text("archived")


def test_run_again_keeps_the_missing_baseline(visitor: Visitor) -> None:
    page = visitor.open()
    page.locator("#rl-baseline input").uncheck()
    run(page, "Again without a baseline", tokens=9)
    first = run_id(page)
    page.locator("#rl-baseline input").check()
    open_history(visitor)
    page.locator(f'tr[data-id="{first}"] input').check()
    page.click("#rl-do-again")
    expect(page.locator("#rl-prompt textarea")).to_have_value("Again without a baseline")
    expect(page.locator("#rl-baseline input")).not_to_be_checked()
    page.wait_for_function(f"!location.search.includes({first!r}) && location.search.includes('run=')")
    done(page)


def test_a_late_list_does_not_replace_a_newer_one(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Listed at first")
    held: list[Route] = []

    def first_list_waits(route: Route) -> None:
        if not held and '"active"' in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    page.route("**/gradio_api/run/predict*", first_list_waits)
    visitor.tab("History")
    page.fill("#rl-search textarea, #rl-search input", "What no run is called")
    settled(page)
    held[0].continue_()
    expect(page.locator(".rl-empty")).to_contain_text("No run matches")
    settled(page)
    expect(page.locator(RUNS)).to_have_count(0)


def test_a_date_that_is_none_is_answered(visitor: Visitor) -> None:
    page = visitor.open("/?tab=history")
    box = page.locator("#rl-until input, #rl-until textarea")
    box.fill("9999-12-31")
    box.press("Enter")
    expect(page.locator(RUNS).first).to_be_visible()
    box.fill("2025-02-30")
    box.press("Enter")
    expect(page.locator("#rl-history-note .rl-note-error")).to_contain_text("write it like")


def test_a_run_that_has_gone_is_named_in_the_comparison(visitor: Visitor, server: Server) -> None:
    page = visitor.open()
    run(page, "Compared, then gone")
    open_history(visitor)
    page.fill("#rl-search textarea, #rl-search input", "Compared, then gone")
    expect(page.locator(RUNS)).to_have_count(2)
    page.locator(".rl-all").check()
    page.click("#rl-do-compare")
    only = page.locator("#rl-only-differences input")
    expect(page.locator("#rl-compare-config")).to_contain_text("proposer")
    only.uncheck()
    expect(page.locator("#rl-compare-config")).to_contain_text("temperature")
    page.click("#rl-compare-show")
    settled(page)
    expect(page.locator("#rl-compare-config")).to_contain_text("temperature")
    expect(only).not_to_be_checked()
    page.wait_for_url(re.compile(r"compare=\w+"))
    gone = re.search(r"compare=(\w+)", page.url)
    assert gone
    with open_store(f"sqlite:///{server.db}") as store:
        store.delete([gone[1]])
    only.check()
    expect(page.locator("#rl-compare-progress .rl-note-error")).to_contain_text(gone[1])


@pytest.fixture(scope="module")
def hostile(chromium: Browser, server: Server) -> list[str]:
    """Two runs whose every word that a person may choose is meant to break something."""
    visitors = visit(chromium, server.url)
    visitor = next(visitors)
    page = visitor.open()
    run(page, f"hostile {LONG}")
    found = run_id(page)
    with open_store(f"sqlite:///{server.db}") as store:
        base = store.get_run(found).run.baseline_id
        assert base
        for number, run_id_ in enumerate((found, base)):
            store.rename(run_id_, HOSTILE if number else "%{customdata}" + LONG[:180])
            store.set_tags(run_id_, [HOSTILE, LONG[:100], "`", "%{x}"])
            store.set_note(run_id_, HOSTILE + LONG)
    for _ in visitors:
        pass
    return [found, base]


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_words_break_neither_history_nor_compare(
    chromium: Browser, server: Server, hostile: list[str], width: int
) -> None:
    visitors = visit(chromium, server.url, viewport={"width": width, "height": 900})
    visitor = next(visitors)
    page = visitor.open("/?tab=history")
    for identifier in hostile:
        expect(page.locator(f'tr[data-id="{identifier}"]')).to_be_visible()
    expect(page.locator(f'tr[data-id="{hostile[1]}"]')).to_contain_text("%{customdata} {{x}} <img")
    assert page.evaluate(FITS)
    page.locator(f'tr[data-id="{hostile[0]}"] input').check()
    expect(page.locator("#rl-edit-name input, #rl-edit-name textarea")).to_have_value(re.compile(r"^%\{customdata\}W"))
    assert page.evaluate(FITS)
    page.locator(f'tr[data-id="{hostile[0]}"] .rl-open').click()
    expect(page.locator("#rl-caption")).to_contain_text("%{customdata}")
    assert page.evaluate(FITS)
    visitor.open("/?compare=" + ",".join(hostile))
    expect(page.locator("#rl-compare-numbers")).to_contain_text("{{x}} <img src=x")
    expect(page.locator("#rl-compare-charts .js-plotly-plot").first).to_be_visible()
    assert page.evaluate(FITS)
    templates = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].flatMap((p) => p.data.map((d) => d.hovertemplate || ''))"
    )
    assert templates
    assert not any(re.search(r"<extra>.*%\{", text) for text in templates)
    assert page.evaluate("window.HACKED") is None
    for _ in visitors:
        pass


def test_words_with_a_nul_are_refused_beside_the_run(visitor: Visitor, hostile: list[str]) -> None:
    page = visitor.open("/?tab=history")
    page.locator(f'tr[data-id="{hostile[0]}"] input').check()
    name = page.locator("#rl-edit-name input, #rl-edit-name textarea")
    expect(name).to_have_value(re.compile("customdata"))
    name.fill("a\0b")
    page.click("#rl-do-save")
    expect(page.locator("#rl-history-note .rl-note-line, #rl-history-note .rl-note-error")).to_be_visible()


def test_the_footer_is_words(visitor: Visitor) -> None:
    page = visitor.open()
    footer = page.locator("footer")
    expect(footer).to_contain_text("API")
    for picture in footer.locator("img").all():
        expect(picture).to_be_hidden()
