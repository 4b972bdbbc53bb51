"""Who decides the draft's length, and its shape: what is offered, and that no choice stays that cannot be used."""

from __future__ import annotations

import json

import pytest

from decoder.errors import RequestError
from decoder.request import DRAFT_LENGTHS, PROPOSERS, TREES, GenerationRequest
from playground.controls import excluded, from_request, to_request
from playground.length_picker import LENGTHS, SHAPES, length_value, length_words, settle_length, shape_value


def test_every_choice_has_its_sentence() -> None:
    assert set(LENGTHS) == set(DRAFT_LENGTHS)
    assert set(SHAPES) == set(TREES)
    for text in (length_value("eagle3", "chain"), shape_value()):
        for entry in json.loads(text)["groups"][0]["entries"]:
            assert entry["title"]
            assert entry["text"].endswith(".")


@pytest.mark.parametrize("proposer", [p for p in PROPOSERS if p != "none"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("length", DRAFT_LENGTHS)
def test_what_settles_can_be_run_and_what_is_refused_could_not(proposer: str, tree: str, length: str) -> None:
    held = from_request(GenerationRequest(prompt="x", proposer=proposer, prediction="y")) | {"tree": tree}
    settled = settle_length(length, proposer, tree)
    to_request({**held, "draft_length": settled})
    offered = {e["value"]: e["state"] for e in json.loads(length_value(proposer, tree))["groups"][0]["entries"]}
    assert (offered[length] == "no") == (settled != length)
    if settled != length:
        with pytest.raises(RequestError):
            to_request({**held, "draft_length": length})


def test_only_what_is_used_is_shown() -> None:
    reasons = excluded({"proposer": "eagle3", "draft_length": "fixed", "tree": "chain"})
    assert reasons["tree"] is None
    assert reasons["tree_nodes"]
    assert reasons["confidence"]
    reasons = excluded({"proposer": "eagle3", "draft_length": "confidence", "tree": "static"})
    assert not any(reasons[name] for name in ("tree", "tree_nodes", "tree_width", "confidence", "draft_length"))
    assert excluded({"proposer": "draft-model", "tree": "static"})["tree"]
    assert excluded({"proposer": "none", "draft_length": "confidence"})["draft_length"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"k": 4}, "k = 4"),
        ({"k": 4, "draft_length": "fixed", "tree": "chain"}, "k = 4"),
        ({"k": 8, "draft_length": "auto"}, "k ≤ 8 by measured time"),
        ({"k": 8, "draft_length": "confidence", "confidence": 0.6}, "k ≤ 8 by confidence 0.6"),
        ({"k": 8, "draft_length": "moving-average", "tree": "dynamic"}, "k ≤ 8 by moving average, dynamic tree"),
        ({"k": 5, "tree": "static"}, "k = 5, static tree"),
    ],
)
def test_in_a_few_words(request_: dict[str, object], words: str) -> None:
    assert length_words(request_) == words
