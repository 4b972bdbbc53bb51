"""The proposer picker, the drafts that fit, and the model card of a draft, as a person uses them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from decoder import catalog
from tests.browser.conftest import Server, Visitor, visit
from tests.browser.test_pages import done, propose, run
from tests.playground.test_draft_cards import HOSTILE

pytestmark = pytest.mark.browser

OPTION = ".rl-pick-option"


def opened(page: Page, name: str) -> None:
    """Open a picker whose offers have been looked up."""
    expect(page.locator("#rl-proposer [data-value=eagle]")).to_contain_text("No EAGLE-1/2 head", timeout=60_000)
    page.click(f"#rl-{name} .rl-pick-button")
    expect(page.locator(f"#rl-{name} .rl-pick-panel")).to_be_visible()


def own(page: Page, name: str, typed: str) -> None:
    """Name a draft of one's own."""
    page.fill(f"#rl-{name} .rl-pick-own input", typed)
    page.locator(f"#rl-{name} .rl-pick-own button").click()


def draft_folder(folder: Path, readme: str, vocab_size: int = 49152) -> Path:
    """A draft model with the embedded target's tokenizer; its weights are never read here."""
    from safetensors.numpy import save_file

    shipped = next(entry.path for entry in catalog.drafts() if entry.path and entry.proposer == "draft-model")
    folder.mkdir()
    config = json.loads((shipped / "config.json").read_text()) | {"vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((shipped / name).read_bytes())
    import numpy as np

    save_file({"model.norm.weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    (folder / "README.md").write_text(readme)
    (folder / "curve.svg").write_text(
        "<svg xmlns='http://www.w3.org/2000/svg' width='90' height='30' onload='parent.HACKED=20'>"
        "<script>parent.HACKED=21</script><rect width='90' height='30'/></svg>"
    )
    return folder


def test_every_proposer_stands_in_its_family_and_says_what_it_needs(visitor: Visitor) -> None:
    page = visitor.open()
    opened(page, "proposer")
    groups = page.locator("#rl-proposer").get_by_role("group")
    expect(groups).to_have_count(5)
    expect(groups.nth(1)).to_contain_text("no model")
    expect(groups.nth(1).get_by_role("option")).to_have_count(3)
    expect(page.locator(f"#rl-proposer {OPTION}")).to_have_count(len(catalog.proposers()))
    expect(page.locator("#rl-proposer [data-value=prediction]")).to_contain_text("Needs the expected text.")
    expect(page.locator("#rl-proposer [aria-selected=true]")).to_have_count(1)


def test_a_proposer_that_cannot_draft_says_why_and_is_not_chosen(visitor: Visitor) -> None:
    page = visitor.open()
    opened(page, "proposer")
    eagle = page.locator("#rl-proposer [data-value=eagle]")
    expect(eagle).to_have_attribute("aria-disabled", "true")
    expect(eagle.locator(".rl-pick-reason")).to_have_text("No EAGLE-1/2 head for smollm2-135m is here.")
    before = page.locator("#rl-proposer .rl-pick-title").inner_text()
    eagle.click(force=True)
    expect(page.locator("#rl-proposer .rl-pick-panel")).to_be_visible()
    assert page.locator("#rl-proposer .rl-pick-title").inner_text() == before
    page.keyboard.press("Escape")
    expect(page.locator("#rl-proposer .rl-pick-panel")).to_be_hidden()
    expect(page.locator("#rl-proposer .rl-pick-button")).to_be_focused()


def test_by_keyboard(visitor: Visitor) -> None:
    page = visitor.open()
    page.locator("#rl-proposer .rl-pick-button").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#rl-proposer .rl-pick-list")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#rl-proposer .rl-pick-active")).to_have_attribute("data-value", "ngram")
    page.keyboard.press("Enter")
    expect(page.locator("#rl-proposer .rl-pick-title")).to_have_text("N-gram (prompt lookup)")
    expect(page.locator("#rl-proposer-line")).to_contain_text("Looks up what followed")
    expect(page.locator("#rl-draft")).to_be_hidden()
    page.keyboard.press("Tab")
    expect(page.locator("#rl-proposer .rl-pick-panel")).to_be_hidden()


def test_there_and_back_the_draft_is_still_chosen(visitor: Visitor) -> None:
    page = visitor.open()
    propose(page, "N-gram")
    expect(page.locator("#rl-draft")).to_be_hidden()
    propose(page, "Draft model")
    expect(page.locator("#rl-draft .rl-pick-title")).to_have_text("smollm2-draft")
    opened(page, "draft")
    expect(page.locator("#rl-draft [data-value=smollm2-draft]")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#rl-draft [aria-disabled]").first).to_contain_text("and not here")
    page.keyboard.press("Escape")
    run(page, "There and back")
    expect(page.locator("#rl-answer")).to_contain_text("sky")


def test_another_target_takes_the_choice_that_does_not_fit_away(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#rl-draft .rl-pick-title")).to_have_text("smollm2-draft")
    box = page.locator("#rl-target input")
    box.fill("nobody/tiny")
    box.press("Enter")
    box.blur()
    expect(page.locator("#rl-draft-note")).to_contain_text("Draft model is no longer chosen", timeout=60_000)
    expect(page.locator("#rl-draft-note")).to_contain_text("no draft model here fits nobody/tiny")
    expect(page.locator("#rl-proposer .rl-pick-title")).to_have_text("N-gram (prompt lookup)")
    page.click("#rl-proposer .rl-pick-button")
    expect(page.locator("#rl-proposer [data-value=draft-model]")).to_have_attribute("aria-disabled", "true")
    expect(page.locator("#rl-proposer [data-value=mtp]")).to_contain_text("can be told once it is here")


def test_a_draft_of_ones_own_is_checked_and_its_hostile_card_is_text(visitor: Visitor, tmp_path: Path) -> None:
    folder = draft_folder(tmp_path / "mine <b>", HOSTILE)
    page = visitor.open()
    opened(page, "proposer")
    own(page, "proposer", str(folder))
    expect(page.locator("#rl-draft-note")).to_contain_text("fits smollm2-135m", timeout=60_000)
    expect(page.locator("#rl-draft .rl-pick-title")).to_contain_text("mine <b>")
    card = page.locator("#rl-draft-card details")
    expect(card.locator("summary")).to_contain_text("mine <b>")
    card.locator("summary").click()
    expect(card).to_contain_text("<script>window.HACKED=4</script>")
    expect(card).to_contain_text("[remote]")
    expect(card.locator("img")).to_have_count(1)
    page.wait_for_function("document.querySelector('#rl-draft-card img').naturalWidth > 0")
    assert card.locator("script, iframe, object, style, form, [onclick], [onload], [onerror]").count() == 0
    links = card.locator("a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert [link.split("/")[2] for link in links] == ["example.org"]
    assert page.evaluate("window.HACKED") is None
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    # `visitor` fails at its end if anything was asked of another server.


def test_a_draft_of_ones_own_that_does_not_fit_is_refused_with_the_reason(visitor: Visitor, tmp_path: Path) -> None:
    folder = draft_folder(tmp_path / "narrow", "# narrow", vocab_size=300)
    page = visitor.open()
    opened(page, "draft")
    own(page, "draft", str(folder))
    error = page.locator("#rl-draft-note .rl-note-error")
    expect(error).to_contain_text("the draft's head has 300 rows, fewer than the 49,152 entries", timeout=60_000)
    expect(page.locator("#rl-draft .rl-pick-title")).to_have_text("smollm2-draft")
    opened(page, "draft")
    own(page, "draft", "nobody/<img src=x onerror=window.HACKED=1>")
    expect(page.locator("#rl-draft-note")).to_contain_text("<img src=x")
    assert page.evaluate("window.HACKED") is None


def test_a_head_on_the_hub_is_taken_for_what_its_name_says(visitor: Visitor) -> None:
    page = visitor.open()
    opened(page, "proposer")
    own(page, "proposer", "someone/Tiny-EAGLE3")
    expect(page.locator("#rl-proposer .rl-pick-title")).to_have_text("EAGLE-3", timeout=60_000)
    expect(page.locator("#rl-draft-note")).to_contain_text("is not here, so it is checked when it runs")
    expect(page.locator("#rl-draft .rl-pick-title")).to_have_text("someone/Tiny-EAGLE3")


def test_the_shipped_drafts_card(visitor: Visitor) -> None:
    page = visitor.open()
    card = page.locator("#rl-draft-card details")
    card.locator("summary").click()
    for words in ("Licence", "Held-out acceptance", "seed", "mean acceptance length"):
        expect(card).to_contain_text(words)
    page.wait_for_function("document.querySelector('#rl-draft-card img').naturalWidth > 0")
    propose(page, "N-gram")
    expect(card).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_small_screen(chromium: Browser, server: Server, scheme: str) -> None:
    visitors = visit(chromium, server.url, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    page = next(visitors).open()
    opened(page, "proposer")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    page.locator("#rl-proposer [data-value=suffix]").click()
    expect(page.locator("#rl-proposer .rl-pick-title")).to_have_text("Suffix decoding")
    page.click("#rl-run")
    done(page)
    page.wait_for_url(re.compile("run="))
    for _ in visitors:
        pass


def test_who_decides_the_length(visitor: Visitor) -> None:
    page = visitor.open()
    page.click("#rl-length .rl-pick-button")
    expect(page.locator(f"#rl-length {OPTION}")).to_have_count(4)
    page.locator("#rl-length [data-value=confidence]").click()
    expect(page.locator("#rl-confidence input")).to_be_visible()
    propose(page, "N-gram")  # it has no probabilities: the choice goes back to a fixed length
    expect(page.locator("#rl-length .rl-pick-title")).to_have_text("Fixed: k tokens")
    expect(page.locator("#rl-confidence")).to_be_hidden()
    page.click("#rl-length .rl-pick-button")
    expect(page.locator("#rl-length [data-value=confidence]")).to_have_attribute("aria-disabled", "true")
    expect(page.locator("#rl-length [data-value=confidence]")).to_contain_text("looks its drafts up")
    page.locator("#rl-length [data-value=auto]").click()
    expect(page.locator("#rl-tree")).to_be_hidden()
    run(page, "How long shall a draft be?")
    expect(page.locator("#rl-note .rl-note-error")).to_have_count(0)
    propose(page, "No drafting")
    expect(page.locator("#rl-length")).to_be_hidden()


def test_the_shape_of_a_heads_draft(visitor: Visitor) -> None:
    page = visitor.open()
    opened(page, "proposer")
    own(page, "proposer", "someone/Tiny-EAGLE3")
    expect(page.locator("#rl-tree .rl-pick-title")).to_have_text("Chain", timeout=60_000)
    page.click("#rl-tree .rl-pick-button")
    page.locator("#rl-tree [data-value=dynamic]").click()
    expect(page.get_by_label("Tokens in a tree, at most")).to_be_visible()
    page.click("#rl-length .rl-pick-button")
    expect(page.locator("#rl-length [data-value=confidence]")).to_contain_text("already grows where its head is sure")
    page.keyboard.press("Escape")
    run(page, "What shape has a draft?")
    expect(page.locator("#rl-note .rl-note-error")).to_have_count(0)


def test_proposers_and_drafts_are_compared_and_what_cannot_run_says_why(visitor: Visitor) -> None:
    page = visitor.open()
    page.fill("#rl-prompt textarea", "Who drafts best?")
    visitor.tab("Compare")
    left_out = page.locator("#rl-left-out details")
    expect(left_out).to_contain_text("cannot draft for smollm2-135m", timeout=60_000)
    left_out.locator("summary").click()
    expect(left_out).to_contain_text("EAGLE-1/2: no EAGLE-1/2 head for smollm2-135m is here.")
    for title in ("Draft model: smollm2-draft", "Predicted output"):
        page.locator("#rl-proposers").get_by_label(title).check()
    page.click("#rl-run-proposers")
    end = page.locator("#rl-compare-progress .rl-note-warning")
    expect(end).to_contain_text("Predicted output: prediction needs the text", timeout=60_000)
    heads = page.locator("#rl-compare-numbers thead")
    for words in (
        "baseline",
        "Draft model, smollm2-draft, k = 4",
        "N-gram (prompt lookup), k = 4",
        "Early exit, k = 4",
    ):
        expect(heads).to_contain_text(words)
    expect(heads.locator("th")).to_have_count(5)
