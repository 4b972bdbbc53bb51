"""The pickers: grouped by family, with reasons; a choice that cannot be used never stays."""

from __future__ import annotations

import json

import pytest

from decoder import catalog
from playground import pairs
from playground.pairs import DraftOption, Fit, Standing
from playground.proposer_picker import FAMILIES, Choice, draft_value, proposer_value, settle

READY = {entry.name: Standing("ready") for entry in catalog.proposers()}
SHELF = {
    "draft-model": [DraftOption("small", 31, "ready"), DraftOption("alien", 9, "no", "7 entries differ")],
    "eagle3": [DraftOption("head", 12, "ready")],
    "medusa": [],
    "eagle": [],
    "mtp": [],
}


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "draft_options", lambda target, proposer, *, read: SHELF[proposer])

    def check(target: str, draft: str, proposer: str) -> Fit:
        if draft.startswith("own/"):
            return Fit(None, f"{draft} is not here, so it is checked when it runs")
        return Fit(draft in ("/mine", "small", "head"), "its hidden size is 9")

    monkeypatch.setattr(pairs, "check", check)


def test_every_proposer_stands_under_its_family_with_its_reason() -> None:
    standings = {**READY, "mtp": Standing("own", "no MTP layer in the checkpoint of <b>")}
    text = proposer_value("<b>", standings)
    assert "<" not in text
    groups = json.loads(text)["groups"]
    assert [group["title"] for group in groups] == list(FAMILIES.values())
    entries = {entry["value"]: entry for group in groups for entry in group["entries"]}
    assert set(entries) == {entry.name for entry in catalog.proposers()}
    assert all(entry["text"] for entry in entries.values())
    assert entries["mtp"]["state"] == "own"
    assert entries["mtp"]["reason"] == "No MTP layer in the checkpoint of <b>."
    assert [e["value"] for g in groups for e in g["entries"] if g["title"].startswith("A head")] == [
        "eagle3", "eagle", "mtp", "medusa",
    ]  # fmt: skip


def test_drafts_that_do_not_fit_are_shown_with_the_reason() -> None:
    groups = json.loads(draft_value("T", "draft-model", "small", SHELF["draft-model"]))["groups"]
    assert [(g["title"], [e["value"] for e in g["entries"]]) for g in groups] == [
        ("For T", ["small"]),
        ("Not for T", ["alien"]),
    ]
    assert groups[1]["entries"][0]["reason"] == "7 entries differ."
    assert groups[1]["entries"][0]["state"] == "no"


def test_a_draft_of_ones_own_is_in_the_list_and_marked_while_nobody_knows() -> None:
    groups = json.loads(draft_value("T", "draft-model", "own/draft", SHELF["draft-model"]))["groups"]
    mine = groups[0]["entries"][-1]
    assert (mine["value"], mine["state"]) == ("own/draft", "fetch")
    assert "checked when it runs" in mine["reason"]


def test_the_targets_own_layer_can_be_chosen() -> None:
    groups = json.loads(draft_value("T", "mtp", "", [DraftOption("", 0, "ready")]))["groups"]
    assert groups[0]["entries"][0]["value"] == ""
    assert "own MTP layer" in groups[0]["entries"][0]["title"]


@pytest.mark.parametrize(
    ("proposer", "draft", "standings", "expected"),
    [
        ("draft-model", "small", {}, Choice("draft-model", "small")),
        ("draft-model", "", {}, Choice("draft-model", "small")),
        ("eagle3", "", {}, Choice("eagle3", "head")),
        # another proposer's draft, of the catalog: the right one is taken without a word
        ("eagle3", "smollm2-draft", {}, Choice("eagle3", "head")),
        ("draft-model", "/mine", {}, Choice("draft-model", "/mine")),
        ("draft-model", "own/draft", {}, Choice("draft-model", "own/draft")),
        ("medusa", "own/heads", {"medusa": Standing("own", "none here")}, Choice("medusa", "own/heads")),
        ("ngram", "small", {}, Choice("ngram", "small")),
        ("oracle", "small", {}, Choice("oracle", "small")),
    ],
)
def test_what_can_be_used_stays(proposer: str, draft: str, standings: dict[str, Standing], expected: Choice) -> None:
    assert settle("T", proposer, draft, standings={**READY, **standings}) == expected


@pytest.mark.parametrize("draft", ["alien", "/strange"])
def test_a_draft_that_does_not_fit_is_replaced_with_the_reason(draft: str) -> None:
    choice = settle("T", "draft-model", draft, standings=READY)
    assert (choice.proposer, choice.draft) == ("draft-model", "small")
    assert choice.lost.startswith(f"{draft} is no longer chosen: ")
    assert ("7 entries differ" if draft == "alien" else "hidden size") in choice.lost


@pytest.mark.parametrize("draft", ["", "/strange"])
def test_a_proposer_that_cannot_draft_is_replaced_with_the_reason(draft: str) -> None:
    standings = {**READY, "medusa": Standing("own", "no Medusa head for T is here")}
    choice = settle("T", "medusa", draft, standings=standings)
    assert (choice.proposer, choice.draft) == ("draft-model", "small")
    assert choice.lost == "Medusa is no longer chosen: no Medusa head for T is here"
    without = {**standings, "draft-model": Standing("own", "none")}
    assert settle("T", "medusa", draft, standings=without).proposer == "ngram"
    early = {**READY, "early-exit": Standing("no", "T has a single layer")}
    assert settle("T", "early-exit", "", standings=early).lost == "Early exit is no longer chosen: T has a single layer"


def test_what_settled_stays_settled() -> None:
    standings = {**READY, "medusa": Standing("own", "none"), "eagle": Standing("own", "none")}
    for proposer in READY:
        for draft in ("", "alien", "small", "head", "/mine", "own/x"):
            once = settle("T", proposer, draft, standings=standings)
            again = settle("T", once.proposer, once.draft, standings=standings)
            assert (again.proposer, again.draft, again.lost) == (once.proposer, once.draft, "")
