"""The stage in Chromium, without Gradio: the same scripts and styles around empty containers, fed with made-up runs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from decoder.trace import Run, Source, Verdict
from playground import feed
from playground.align import compare_value
from playground.components import head_html
from tests.playground import visual_runs as vr

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
VIEWS = ("answer", "numbers", "scrubber", "ladder", "why", "race")
ORIGIN = "http://redline.test"
PAGE = f"""<!doctype html><html><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">{head_html()}
<style>body {{ margin: 0; padding: 10px; background: var(--rl-paper) }}</style></head><body>
{"".join(f'<section class="rl-panel rl-{name}" data-rl="{name}"></section>' for name in VIEWS)}
<section class="rl-panel rl-compare" id="compare"></section>
<script>document.querySelectorAll("[data-rl]").forEach((root) => Redline.mount(root));</script></body></html>"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield chromium
        chromium.close()


class Stage:
    """A page with the stage, and what went wrong on it."""

    def __init__(self, browser: Browser, query: str = "", **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.route("**/*", self._serve)
        self.page.goto(f"{ORIGIN}/{query}")

    def _serve(self, route: Route) -> None:
        if route.request.url.startswith(ORIGIN) and route.request.resource_type == "document":
            route.fulfill(body=PAGE, content_type="text/html")
        else:
            if "favicon" not in route.request.url:
                self.problems.append(f"request to {route.request.url}")
            route.abort()

    def show(self, run: Run, baseline: Run | None = None, meta: dict[str, str] | None = None, seq: int = 1) -> None:
        self.page.evaluate("text => Redline.feed(text)", feed.whole(run, meta, baseline, seq))

    def query(self) -> str:
        self.page.wait_for_timeout(250)
        return str(self.page.evaluate("location.search"))

    def js(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)


@pytest.fixture
def stage(browser: Browser) -> Iterator[Stage]:
    made = Stage(browser)
    yield made
    made.context.close()
    assert made.problems == []


def open_stage(browser: Browser, query: str = "", **context: Any) -> Stage:
    return Stage(browser, query, **context)


def test_every_token_carries_its_mark_in_text_and_ladder(stage: Stage) -> None:
    run = vr.make_run()
    stage.show(run)
    wanted: dict[str, int] = {}
    for step in run.steps:
        for draft in step.drafts:
            wanted[draft.verdict.value] = wanted.get(draft.verdict.value, 0) + 1
        for token in step.emitted:
            if token.source is not Source.ACCEPTED:
                wanted[token.source.value] = wanted.get(token.source.value, 0) + 1
    for mark, number in wanted.items():
        assert stage.page.locator(f".rl-flow [data-mark={mark}]").count() == number
        sample = stage.page.locator(f".rl-ladder [data-mark={mark}]").first
        if mark != "untested":
            assert mark in (sample.get_attribute("aria-label") or "")
        assert sample.get_attribute("title")


def test_the_text_without_what_was_discarded_is_the_answer(stage: Stage) -> None:
    run = vr.make_run()
    stage.show(run)
    stage.page.get_by_role("button", name="rejected", exact=True).click()
    stage.page.get_by_role("button", name="never tested", exact=True).click()
    assert stage.page.locator(".rl-flow").inner_text().strip() == run.text
    assert stage.page.locator(".rl-flow [data-mark=rejected]").first.is_visible() is False


def test_chosen_in_the_text_is_chosen_everywhere(stage: Stage) -> None:
    run = vr.make_run()
    stage.show(run, vr.baseline_of(run), {"state": "done"})
    step = next(s for s in run.steps if any(d.verdict is Verdict.REJECTED for d in s.drafts))
    token = next(i for i, d in enumerate(step.drafts) if d.verdict is Verdict.REJECTED)
    draft = step.drafts[token]
    stage.page.locator(f".rl-flow [data-s='{step.index}'][data-t='{token}']").click()
    chip = stage.page.locator(f".rl-ladder [data-s='{step.index}'][data-t='{token}']")
    expect(chip).to_have_class(re.compile("rl-sel"))
    expect(chip).to_have_attribute("aria-pressed", "true")
    why = stage.page.locator("[data-rl=why]").inner_text()
    assert f"Why {draft.text.replace(' ', '␣')} went" in why.replace("\n", "")
    assert "rejected" in why
    assert "From what was left over" in why
    assert "max(0, p − q), normalised" in why
    assert stage.query() == f"?run={run.id}&step={step.index}&token={token}"
    stage.page.keyboard.press("ArrowRight")
    at = stage.js("Redline.store.state.selection")
    assert (at["step"], at["token"]) != (step.index, token)
    assert f"&step={at['step']}&token={at['token']}" in stage.query()
    assert stage.js("document.activeElement.dataset.t") == str(at["token"])


def test_the_address_is_honoured_and_other_parameters_stay(browser: Browser) -> None:
    run = vr.make_run()
    for query, position in ((f"?x=1&run={run.id}&step=3", 3), (f"?run={run.id}&step=3&token=1", len(run.steps) - 1)):
        stage = open_stage(browser, query)
        stage.show(run, None, {"state": "done"})
        assert stage.js("Redline.store.state.position") == position
        assert stage.js("Redline.store.state.selection.step") == 3
        assert stage.query() == query
        stage.context.close()
    stage = open_stage(browser, "?run=another&step=2&token=0")
    stage.show(run)
    assert stage.query() == "?run=another&step=2&token=0"
    stage.context.close()


def test_senseless_steps_in_the_address_are_ignored(browser: Browser) -> None:
    run = vr.make_run()
    for query in ("?step=999999", "?step=-1", "?step=1&token=99", "?step=<script>", "?token=2"):
        stage = open_stage(browser, query)
        stage.show(run)
        assert stage.page.locator(".rl-row").count() > 5
        assert stage.problems == []
        stage.context.close()


def test_replay_shows_the_state_after_the_step(stage: Stage) -> None:
    run = vr.make_run()
    stage.show(run)
    last = len(run.steps) - 1
    position = stage.page.locator(".rl-position")
    expect(position).to_have_text(f"step {last} of {last}")
    stage.page.get_by_role("button", name="First step").click()
    expect(position).to_have_text(f"step 0 of {last}")
    stage.page.get_by_role("button", name="Next step").click()
    stage.page.keyboard.press("ArrowRight")
    expect(position).to_have_text(f"step 2 of {last}")
    shown = "".join(e.text for s in run.steps[:3] for e in s.emitted)
    visible = stage.js(
        "[...document.querySelectorAll('.rl-flow .rl-tok')].filter(e => getComputedStyle(e).visibility === 'visible' &&"
        " !['rejected','untested'].includes(e.dataset.mark)).map(e => e.textContent).join('')"
    )
    assert visible == shown
    rows = stage.js(
        "[...document.querySelectorAll('.rl-row')].filter(e => getComputedStyle(e).visibility === 'visible')"
        ".map(e => Number(e.dataset.step))"
    )
    assert sorted(rows) == [0, 1, 2]
    assert "step=2" in stage.query()
    stage.page.get_by_role("slider", name="Step of the run").focus()
    stage.page.keyboard.press("End")
    expect(position).to_have_text(f"step {last} of {last}")


def test_playing_goes_on_by_itself_and_stops_at_the_end(stage: Stage) -> None:
    run = vr.make_run(vr.pieces_of("The sky is blue today."))
    stage.show(run)
    stage.page.get_by_label("Speed of the replay").select_option("0")
    stage.page.get_by_role("button", name="Play", exact=True).click()
    last = len(run.steps) - 1
    expect(stage.page.locator(".rl-position")).to_have_text(f"step {last} of {last}")
    expect(stage.page.get_by_role("button", name="Play", exact=True)).to_be_visible()


def test_keyboard_alone_reaches_tokens_and_explanations(stage: Stage) -> None:
    stage.show(vr.make_run())
    for _ in range(12):
        stage.page.keyboard.press("Tab")
        if stage.js("document.activeElement.matches('.rl-tok')"):
            break
    assert stage.js("document.activeElement.matches('.rl-tok')")
    before = stage.js("Redline.store.state.selection")
    stage.page.keyboard.press("ArrowDown")
    after = stage.js("Redline.store.state.selection")
    assert after != before
    assert stage.js("document.querySelectorAll('.rl-flow [tabindex=\"0\"]').length") == 1
    stage.page.keyboard.press("Home")
    assert stage.js("Redline.store.state.position") == 0


def test_hostile_text_is_text(browser: Browser) -> None:
    for width in (1280, 400):
        stage = open_stage(browser, viewport={"width": width, "height": 800})
        run = vr.hostile_run()
        stage.show(run, None, {"name": "<img src=x onerror=window.HACKED=9>"})
        stage.page.get_by_role("button", name="Tokens", exact=True).click()
        stage.page.get_by_role("button", name="Text", exact=True).click()
        stage.page.get_by_role("button", name="spaces").click()
        for step in run.steps:
            for token in range(len(step.drafts) + 1):
                stage.js("at => Redline.store.choose(at)", {"step": step.index, "token": token})
        text = stage.page.locator(".rl-flow").inner_text()
        for part in ("<script>window.HACKED=1</script>", "${window.HACKED=2}", "{{constructor}}", "{%", "\\u0041"):
            assert part.replace(" ", "") in text.replace("·", "").replace(" ", "")
        assert "NUL" in text
        assert "RLO" in text
        assert "\u202e" not in stage.page.locator("body").inner_text()
        assert stage.js("window.HACKED") is None
        assert stage.js("document.documentElement.scrollWidth <= innerWidth")
        assert stage.js("document.querySelectorAll('.rl-panel script, .rl-panel img').length") == 0
        assert stage.problems == []
        stage.context.close()


def test_nothing_moves_while_tokens_arrive_and_nothing_is_drawn_twice(stage: Stage) -> None:
    run = vr.make_run()
    parts = [feed.begin_line(run.replace(finish_reason=None), None, True, 4), *map(feed.step_line, run.steps)]
    stage.js(
        "() => { window.shifts = 0; new PerformanceObserver((l) => l.getEntries().forEach((e) => {"
        " window.shifts += e.value; })).observe({ type: 'layout-shift', buffered: false }); }"
    )
    text = parts[0]
    stage.js("text => Redline.feed(text)", text)
    stage.page.wait_for_timeout(150)
    stage.js("window.shifts = 0")
    first = None
    for part in parts[1:]:
        text += part
        stage.js(
            "text => { Redline.feed(text); window.first = window.first || document.querySelector('.rl-tok'); }", text
        )
        stage.page.wait_for_timeout(25)
        same = stage.js("window.first === document.querySelector('.rl-tok')")
        first = same if first is None else first and same
    assert first is True
    assert stage.page.locator("[data-rl=scrubber]").inner_text().count("so far") == 1
    assert stage.js("window.shifts") < 0.02
    stage.js("text => Redline.feed(text)", text + feed.end_line(run))
    assert stage.page.locator(".rl-flow .rl-tok").count() == sum(len(s.drafts) + 1 for s in run.steps) - int(
        all(e.source is Source.ACCEPTED for e in run.steps[-1].emitted)
    )


def test_a_long_live_run_may_be_handed_over_in_parts_and_whole_at_the_end(stage: Stage) -> None:
    run = vr.long_run(400)
    text = feed.begin_line(run.replace(finish_reason=None), None, True, 6)
    for number, step in enumerate(run.steps):
        text += feed.step_line(step)
        if number % 3 == 0 and not 60 < number < 90:  # updates may be skipped, even many
            stage.js("text => Redline.feed(text)", feed.tail(text, limit=20_000))
    stage.js("() => { window.first = document.querySelector('.rl-tok'); }")
    stage.js("text => Redline.feed(text)", text + feed.end_line(run))
    assert stage.js("window.first === document.querySelector('.rl-tok')")
    assert stage.js("Redline.store.state.rows.map((row) => row.index)") == list(range(len(run.steps)))
    assert stage.js("Redline.store.totals.tokens") == len(run.output_ids)


def test_the_first_token_is_timed_as_soon_as_it_is_there(stage: Stage) -> None:
    run = vr.make_run()
    text = feed.begin_line(run.replace(finish_reason=None, prefill_ms=0.0, ttft_ms=0.0), None, True, 8)
    stage.js("text => Redline.feed(text)", text)
    first = stage.page.locator(".rl-figure[data-key=first] .rl-figure-value")
    assert first.inner_text() == "…"
    text += feed.step_line(run.steps[0], (run.prefill_ms, run.ttft_ms))
    stage.js("text => Redline.feed(text)", text)
    assert first.inner_text().replace("\u00a0", " ") == "71 ms"
    facts = stage.page.locator("[data-rl=numbers] dl").inner_text().replace("\u00a0", " ")
    assert re.search(r"Prefill\s+61 ms", facts)


def test_a_later_end_line_brings_the_baseline(stage: Stage) -> None:
    run = vr.make_run()
    text = feed.whole(run, None, None, 2, "the baseline is being measured")
    stage.js("text => Redline.feed(text)", text)
    assert "the baseline is being measured" in stage.page.locator("[data-rl=numbers]").inner_text()
    stage.js("text => Redline.feed(text)", text + feed.end_line(run, vr.baseline_of(run)))
    numbers = stage.page.locator("[data-rl=numbers]").inner_text()
    assert "no baseline" not in numbers
    assert "Pays." in numbers
    assert "baseline 23.8 ms" in numbers.replace("\u00a0", " ")


def test_characters_over_several_tokens_are_whole_in_text_and_named_in_tokens(stage: Stage) -> None:
    run = vr.emoji_run()
    stage.show(run)
    text = stage.page.locator(".rl-flow").inner_text()
    assert "🙂" in text
    assert "🎂" in text
    assert "\ufffd" not in text
    stage.page.get_by_role("button", name="Tokens", exact=True).click()
    tokens = stage.page.locator(".rl-flow").inner_text()
    assert "part 1 of 3" in tokens
    assert "part 3 of 3" in tokens
    assert "1/3" in stage.page.get_by_role("region", name="Step ladder").inner_text()


def test_a_space_and_the_beginning_of_a_character_may_share_a_token(stage: Stage) -> None:
    run = vr.make_run(["So", " \\xF0\\x9F", "\\x8E", "x", "!"], accept=1.0)
    texts = iter([" ", "", "🎂", "!"])
    emitted = tuple(dataclasses.replace(e, text=next(texts)) for e in run.steps[1].emitted)
    steps = (run.steps[0], dataclasses.replace(run.steps[1], emitted=emitted), *run.steps[2:])
    stage.show(run.replace(steps=steps, text="So 🎂!"))
    assert stage.page.locator(".rl-flow").inner_text() == "So 🎂!"
    stage.page.get_by_role("button", name="Tokens", exact=True).click()
    assert [f"part {n} of 3" in stage.page.locator(".rl-flow").inner_text() for n in (1, 2, 3)] == [True] * 3


def test_what_was_not_measured_is_said_in_words(stage: Stage) -> None:
    stage.show(vr.make_run(not_speculating="the draft's vocabulary does not fit"))
    numbers = stage.page.locator("[data-rl=numbers]").inner_text()
    assert "Not speculating: the draft's vocabulary does not fit." in numbers
    assert "no baseline" in numbers
    assert "nothing drafted" in numbers
    assert "0 %" not in numbers.split("draft 0")[0]
    stage.show(vr.make_run(error="the target gave NaN", finish=None).replace(finish_reason="error"), seq=2)
    assert "the target gave NaN" in stage.page.locator("[data-rl=answer]").inner_text()


def test_a_step_says_why_it_drafted_as_much_as_it_did(stage: Stage) -> None:
    drafted, quiet = vr.make_run(), vr.make_run(not_speculating="nothing pays")
    because = "drafts do not pay: <b>plain</b> decoding takes 9.1 ms per token"
    first = dataclasses.replace(drafted.steps[1], k_reason="2.6 accepted on average, so 4 of up to 8 are drafted")
    second = dataclasses.replace(quiet.steps[1], k=0, k_reason=because)
    stage.show(drafted.replace(steps=(drafted.steps[0], first, *drafted.steps[2:])))
    title = stage.page.locator(".rl-row[data-step='1'] .rl-row-count").get_attribute("title")
    assert title is not None
    assert title.endswith("draft tokens kept (k = 4: 2.6 accepted on average, so 4 of up to 8 are drafted)")
    stage.show(quiet.replace(steps=(quiet.steps[0], second, *quiet.steps[2:])), seq=2)
    row = stage.page.locator(".rl-row[data-step='1']")
    assert row.locator(".rl-nodraft").get_attribute("title") == because
    assert "nothing drafted: drafts do not pay: <b>plain" in row.inner_text()
    row.locator(".rl-chip").click()
    sentence = stage.page.locator("[data-rl=why] .rl-sentence").inner_text()
    assert sentence.startswith(f"Nothing was drafted ({because}), so the target wrote ")


def test_a_run_that_does_not_pay_names_the_term_to_blame(stage: Stage) -> None:
    run = vr.make_run(temperature=0.0, accept=0.5, slow=3.0)
    stage.show(run, vr.baseline_of(run))
    numbers = stage.page.locator("[data-rl=numbers]").inner_text()
    assert "Does not pay." in numbers
    assert "Drafting costs" in numbers
    assert "draft" in stage.page.locator(".rl-blame").inner_text()


def test_the_verdict_is_said_from_its_fields_not_from_its_sentence(stage: Stage) -> None:
    run = vr.make_run(temperature=0.0, accept=0.5, slow=3.0)
    *lines, end = feed.whole(run, None, vr.baseline_of(run), 1).splitlines(keepends=True)
    entry = json.loads(end)
    entry["break_even"] |= {"sentence": "Worded otherwise.", "blame": "verify"}
    stage.page.evaluate("text => Redline.feed(text)", "".join(lines) + json.dumps(entry) + "\n")
    numbers = stage.page.locator("[data-rl=numbers]").inner_text()
    assert "Verifying a step costs" in numbers
    assert "Worded otherwise" not in numbers
    assert "verify" in stage.page.locator(".rl-blame").inner_text()


def test_each_headline_number_defines_itself_on_focus(stage: Stage) -> None:
    run = vr.make_run()
    stage.show(run, vr.baseline_of(run))
    for figure in stage.page.locator(".rl-figure").all():
        figure.focus()
        expect(figure.get_by_role("tooltip")).to_be_visible()
        assert figure.get_attribute("aria-describedby")
    stage.page.locator(".rl-figure[data-key=rate]").focus()
    assert "accepted ÷ drafted" in stage.page.locator(".rl-figure[data-key=rate] .rl-tip").inner_text()


def test_greedy_lookup_and_tree_sentences(stage: Stage) -> None:
    def sentence(run: Run, mark: str, seq: int) -> str:
        stage.show(run, seq=seq)
        stage.page.locator(f".rl-ladder [data-mark={mark}]").first.click()
        return str(stage.page.locator(".rl-sentence").inner_text()).replace("\u00a0", " ")

    greedy = vr.make_run(temperature=0.0)
    assert "first choice" in sentence(greedy, "accepted", 2)
    assert "Greedy keeps only the first choice: rejected" in sentence(greedy, "rejected", 3)
    lookup = vr.make_run(proposer="ngram")
    assert sentence(lookup, "accepted", 4).startswith("Prompt lookup proposed")
    assert "q = 1" in stage.page.locator("[data-rl=why]").inner_text()
    assert "found nothing to copy" in sentence(lookup, "target", 5) or "first token" in sentence(lookup, "target", 5)
    assert "never tested" in sentence(lookup, "untested", 6)
    assert "came for free" in sentence(vr.make_run(), "bonus", 7)
    assert "in place of" in sentence(vr.make_run(), "corrected", 8)
    tree = vr.tree_run()
    assert "first choice is ␣because" in sentence(tree, "rejected", 9)
    stage.page.locator(".rl-ladder [data-s='1'][data-t='1']").click()
    assert "first choice is ␣sky" in stage.page.locator(".rl-sentence").inner_text()


def test_a_tree_shows_what_was_kept_and_what_else_was_drafted_in_each_place(stage: Stage) -> None:
    run = vr.tree_run()
    stage.show(run)
    step = run.steps[1]
    boxes = stage.js(
        "() => Object.fromEntries([...document.querySelectorAll('.rl-ladder .rl-tree [data-s=\"1\"]')]"
        ".map((e) => [e.dataset.t, (({ x, y }) => [x, y])(e.getBoundingClientRect())]))"
    )
    assert len(boxes) == len(step.drafts) + 1  # every draft and the target's own token, once
    x = {int(token): round(place[0]) for token, place in boxes.items()}
    y = {int(token): round(place[1]) for token, place in boxes.items()}
    own = len(step.drafts)
    kept = [i for i, draft in enumerate(step.drafts) if draft.verdict is Verdict.ACCEPTED]
    # What was kept and what the target put behind it stand on one line, from left to right; nothing else does.
    assert {i for i in y if abs(y[i] - y[own]) < 6} == {*kept, own}
    assert sorted([*kept, own], key=lambda i: x[i]) == [*kept, own]
    # Drafts for one place stand in one column, branches below what was kept.
    depth = {}
    for i, draft in enumerate(step.drafts):
        depth[i] = 0 if draft.parent is None else depth[draft.parent] + 1
        if i not in kept:
            assert y[i] > y[own] + 6
    for i in depth:
        for j in depth:
            assert (x[i] == x[j]) == (depth[i] == depth[j])
    # A branch goes on in its own line.
    for i, draft in enumerate(step.drafts):
        if draft.verdict is Verdict.UNTESTED:
            assert y[i] == y[draft.parent]
    expect(stage.page.locator(".rl-tree-hint")).to_be_visible()
    elbows = stage.page.locator(".rl-tree .rl-elbow")
    assert elbows.count() == 3
    assert "also drafted in the place of ␣brightly" in (elbows.nth(1).get_attribute("title") or "")
    # The text keeps only the refusal that the target corrected; the ladder has them all.
    flow = stage.page.locator(".rl-flow [data-s='1']")
    assert flow.evaluate_all("all => all.map((e) => Number(e.dataset.t))") == [0, 2, 4, own]
    stage.page.get_by_role("button", name="Tokens", exact=True).click()
    assert stage.page.locator(".rl-flow [data-s='1']").count() == own + 1
    stage.show(vr.make_run(), seq=2)
    expect(stage.page.locator(".rl-tree-hint")).to_be_hidden()


def test_a_tree_of_which_nothing_was_kept_and_one_with_many_branches(stage: Stage) -> None:
    run = vr.tree_run()
    step = run.steps[1]
    refused = tuple(dataclasses.replace(step.drafts[1], parent=None, id=100 + n, text=f" no{n}") for n in range(40))
    emitted = (dataclasses.replace(step.emitted[-1], text=" yes"),)
    stage.show(run.replace(steps=(run.steps[0], dataclasses.replace(step, drafts=refused, emitted=emitted))))
    row = stage.page.locator(".rl-row[data-step='1']")
    expect(row.locator(".rl-kept")).to_have_count(1)
    expect(row.locator(".rl-kept")).to_contain_text("→␣yes")
    expect(row).to_contain_text("and 17 branches more (17 tokens), none kept")
    assert row.locator(".rl-chip").count() == 24
    below = stage.page.locator(".rl-row[data-step='1']").bounding_box()
    last = row.locator(".rl-chip").last.bounding_box()
    assert below
    assert last
    assert last["y"] + last["height"] < below["y"] + below["height"]


def test_long_runs_stay_quick_and_small(stage: Stage) -> None:
    run = vr.long_run()
    text = feed.whole(run, None, None, 1)
    drawn = stage.js("text => { const t = performance.now(); Redline.feed(text); return performance.now() - t; }", text)
    scrubbed = stage.js(
        "() => { const t = performance.now(); for (let i = 0; i < 60; i += 1)"
        " { Redline.store.moveTo((i * 37) % 600, { select: true }); document.body.offsetHeight; }"
        " return (performance.now() - t) / 60; }"
    )
    assert drawn < 4000
    assert scrubbed < 120
    assert stage.page.locator(".rl-row").count() < 80


def test_the_race_stands_still_for_those_who_prefer_it(browser: Browser) -> None:
    run = vr.make_run()
    stage = open_stage(browser, reduced_motion="reduce")
    stage.show(run, vr.baseline_of(run))
    race = stage.page.locator("[data-rl=race]")
    race.get_by_role("button", name="Back to the start").click()
    assert "0 of 68 tokens" in race.inner_text()
    race.get_by_role("button", name="Play the race").click()
    assert "68 of 68 tokens" in race.inner_text()
    assert "before its baseline" in race.inner_text()
    stage.context.close()
    assert stage.problems == []


def test_on_a_phone_the_sentence_comes_to_the_finger(browser: Browser) -> None:
    stage = open_stage(browser, viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    stage.show(vr.make_run())
    assert stage.page.locator(".rl-peek").is_visible() is False
    stage.page.locator(".rl-ladder .rl-chip[data-mark=rejected]").first.tap()
    expect(stage.page.locator(".rl-peek")).to_be_visible()
    assert "rejected" in stage.page.locator(".rl-peek").inner_text()
    stage.page.get_by_role("button", name="Close the explanation").tap()
    expect(stage.page.locator(".rl-peek")).to_be_hidden()
    assert stage.js("document.documentElement.scrollWidth <= innerWidth")
    stage.context.close()
    assert stage.problems == []


def test_compare_lines_up_tokens_and_names_the_difference(stage: Stage) -> None:
    run = vr.make_run()
    other = vr.make_run([*vr.pieces_of(vr.ANSWER)[:10], " scattering", *vr.pieces_of(vr.ANSWER)[11:]], seed=3)
    value = compare_value([run, other], ["<b>k 4</b>", "k 8"])
    stage.js("value => Redline.compare.draw(document.getElementById('compare'), value)", value)
    box = stage.page.locator("#compare")
    assert "<b>k 4</b>" in box.inner_text()
    assert re.search(r"places differ; the first is place 11", box.inner_text())
    assert box.locator(".rl-cmp-diff").count() >= 1
    box.locator(".rl-cmp-diff").first.hover()
    assert "Place 11." in box.locator(".rl-cmp-detail").inner_text()
    stage.js("Redline.compare.draw(document.getElementById('compare'), '')")
    assert "Choose two or more runs" in box.inner_text()
