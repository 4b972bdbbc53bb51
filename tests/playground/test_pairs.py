"""Which drafts fit: only what is here is read, only what is sure is remembered, and every refusal has its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder import catalog, compat
from decoder.catalog import ModelEntry
from decoder.errors import ModelError
from decoder.heads.layout import Layout
from playground import pairs, proposer_picker
from playground.pairs import DraftOption, Fit, standing

TARGET = "target"


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    for remembered in (pairs._verdict, pairs._own_layer, pairs._across):
        remembered.cache_clear()
    yield
    for remembered in (pairs._verdict, pairs._own_layer, pairs._across):
        remembered.cache_clear()


@pytest.fixture
def all_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "here", lambda name: name)


def entry(name: str, proposer: str = "draft-model", fits: str | None = TARGET, present: bool = True) -> ModelEntry:
    return ModelEntry(name, "draft", "llama", "Apache-2.0", 31, present, "", "", None, fits, proposer)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> list[ModelEntry]:
    """The drafts of the catalog, to be filled by a test."""
    found: list[ModelEntry] = []
    monkeypatch.setattr(catalog, "drafts", lambda: found)
    return found


# --- one pair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [ModelError("half a config.json"), OSError("half a file")])
@pytest.mark.usefixtures("all_here")
def test_what_could_not_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    answers: list[Exception | list[str]] = [trouble, []]

    def check(target: str, draft: str) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(compat, "check_pair", check)
    assert pairs.check(TARGET, "draft", "draft-model").fits is False
    assert pairs.check(TARGET, "draft", "draft-model") == Fit(True)


@pytest.mark.usefixtures("all_here")
def test_a_verdict_is_asked_for_once_and_gives_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(compat, "check_pair", lambda target, draft: asked.append(draft) or ["eos differs", "and bos"])
    for _ in range(3):
        assert pairs.check(TARGET, "draft", "draft-model") == Fit(False, "eos differs; and bos")
    assert asked == ["draft"]


@pytest.mark.usefixtures("all_here")
def test_a_head_is_no_draft_model_and_says_who_drafts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "head_layout", lambda draft: Layout("eagle3", "midlayer"))
    assert pairs.check(TARGET, "head", "draft-model") == Fit(
        False, "it is an EAGLE-3 head, no model of its own: choose the proposer eagle3"
    )


def test_what_is_not_here_is_neither_read_nor_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("read, or asked the network")

    monkeypatch.setattr(compat, "check_pair", refuse)
    monkeypatch.setattr(compat, "check_head", refuse)
    for proposer in pairs.WITH_DRAFT:
        fit = pairs.check("nobody/target", "nobody/draft", proposer)
        assert fit.fits is None
        assert "nobody/target is not here" in fit.reason
    assert pairs.own_layer("nobody/target").fits is None
    assert pairs.here("nobody/<script>") is None
    assert pairs.here("a\0b") is None


def test_what_lies_in_the_cache_of_the_hub_is_read_from_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    seen: list[tuple[str, str]] = []

    def check(target: str, draft: str) -> list[str]:
        seen.append((target, draft))
        return [f"{draft} is strange"]

    monkeypatch.setattr(compat, "check_pair", check)
    monkeypatch.setattr(compat, "head_layout", lambda draft: None)
    fit = pairs.check("some/target", "some/draft", "draft-model")
    assert seen == [(str(tmp_path), str(tmp_path))]
    assert str(tmp_path) not in fit.reason  # the reason speaks of what was chosen, not of the cache


# --- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_here")
def test_the_list_says_of_each_draft_whether_it_fits(monkeypatch: pytest.MonkeyPatch, shelf: list[ModelEntry]) -> None:
    shelf += [
        entry("wrong", fits="other"),
        entry("far", fits="other", present=False),
        entry("fits"),
        entry("to-fetch", present=False),
        entry("head", "eagle3"),
    ]
    monkeypatch.setattr(compat, "check_pair", lambda target, draft: [] if draft == "fits" else ["7 entries differ"])
    monkeypatch.setattr(compat, "head_layout", lambda draft: None)
    found = {o.name: (o.state, o.reason) for o in pairs.draft_options(TARGET, "draft-model", read=True)}
    assert list(found) == ["fits", "to-fetch", "wrong", "far"]
    assert found["fits"] == ("ready", "")
    assert found["to-fetch"][0] == "fetch"
    assert "31 MB" in found["to-fetch"][1]
    assert found["wrong"] == ("no", "7 entries differ")
    assert found["far"] == ("no", "made for other, and not here")


def test_without_reading_the_catalog_decides(monkeypatch: pytest.MonkeyPatch, shelf: list[ModelEntry]) -> None:
    monkeypatch.setattr(pairs, "check", lambda *_: pytest.fail("a file was read"))
    monkeypatch.setattr(pairs, "own_layer", lambda *_: pytest.fail("a file was read"))
    shelf += [entry("fits"), entry("wrong", fits="other")]
    assert [o.state for o in pairs.draft_options(TARGET, "draft-model", read=False)] == ["ready", "no"]
    assert pairs.standings(TARGET, read=False)["draft-model"].state == "ready"
    assert set(pairs.standings(TARGET, read=False)) == {e.name for e in catalog.proposers()}


def test_a_draft_for_a_target_that_is_not_here_is_offered_unchecked(shelf: list[ModelEntry]) -> None:
    shelf += [entry("made", fits="some/target"), entry("other", fits="another/target")]
    options = {o.name: o for o in pairs.draft_options("some/target", "draft-model", read=True)}
    assert options["made"].state == "ready"
    assert options["other"].state == "no"
    assert "made for another/target" in options["other"].reason


@pytest.mark.parametrize(
    ("options", "own", "state", "reason"),
    [
        ([DraftOption("a", 1, "ready"), DraftOption("b", 1, "no", "x")], None, "ready", ""),
        (
            [DraftOption("b", 1, "no", "x"), DraftOption("a", 1, "fetch", "made for T", False)],
            None,
            "fetch",
            "made for T",
        ),
        ([], None, "own", "no MTP layer for T is here"),
        ([DraftOption("far", 1, "no", "made for U, and not here", False)], None, "own", "no MTP layer for T is here"),
        ([DraftOption("b", 1, "no", "fc reads 9 values")], None, "own", "b: fc reads 9 values"),
        ([DraftOption("b", 1, "no", "x"), DraftOption("c", 1, "no", "y")], None, "own", "(1 more do not fit either)"),
        (
            [],
            Fit(False, "no MTP layer in the checkpoint of T"),
            "own",
            "in the checkpoint of T, and none that was trained",
        ),
        ([], Fit(None, "whether T has one"), "fetch", "whether T has one"),
        ([DraftOption("", 0, "ready")], Fit(True), "ready", ""),
    ],
)
def test_a_proposer_stands_as_its_best_draft_does(
    options: list[DraftOption], own: Fit | None, state: str, reason: str
) -> None:
    found = standing("mtp", "T", options, own)
    assert found.state == state
    assert reason in found.reason
    assert bool(found.reason) == (state != "ready")


def test_a_single_layer_cannot_be_left_early(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    found = pairs.standings(str(tmp_path), read=True)["early-exit"]
    assert found.state == "no"
    assert "a single layer" in found.reason


@pytest.mark.parametrize(
    ("name", "proposer"),
    [
        ("someone/Llama-EAGLE3-8B", "eagle3"),
        ("someone/EAGLE-llama2", "eagle"),
        ("FasterDecoding/medusa-1.0", "medusa"),
        ("someone/tiny-llama", "draft-model"),
        ("smollm2-draft", "draft-model"),
    ],
)
def test_who_drafts_with_a_name_that_was_typed(name: str, proposer: str) -> None:
    assert pairs.guess_proposer(name) == proposer


@pytest.mark.usefixtures("all_here")
def test_a_draft_with_another_vocabulary_is_offered_with_what_is_shared_and_why(
    monkeypatch: pytest.MonkeyPatch, shelf: list[ModelEntry]
) -> None:
    pairing = compat.Pairing(
        ("id 3 is 'a' in the target and 'b' in the draft",), "other vocabulary: 5 of 9 tokens shared"
    )
    monkeypatch.setattr(compat, "head_layout", lambda draft: None)
    monkeypatch.setattr(compat, "pairing", lambda target, draft: pairing if draft == "other" else compat.Pairing())
    shelf += [entry("other"), entry("same")]
    notes = {option.name: option.note for option in pairs.draft_options(TARGET, "draft-model", read=True)}
    said = "other vocabulary: 5 of 9 tokens shared; not token for token: id 3 is 'a' in the target and 'b' in the draft"
    assert notes == {"other": said, "same": ""}
    options = pairs.draft_options(TARGET, "draft-model", read=True)
    shown = json.loads(proposer_picker.draft_value(TARGET, "draft-model", "typed", options))["groups"][0]["entries"]
    texts = {entry["value"]: entry["text"] for entry in shown}
    assert texts == {"other": f"31 MB. Other{said[5:]}.", "same": "31 MB", "typed": ""}
    refused = compat.Pairing(("id 3 differs",), "", "only 1 of 9 tokens")
    monkeypatch.setattr(compat, "pairing", lambda target, draft: refused)
    fit = pairs.check(TARGET, "third", "draft-model")
    assert (fit.fits, fit.reason) == (False, "id 3 differs; across vocabularies: only 1 of 9 tokens")
    assert pairs.across(TARGET, "third") == ""
