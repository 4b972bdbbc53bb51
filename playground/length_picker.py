"""How long a draft is and what shape it has: one sentence on each choice, and what excludes what. No Gradio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from decoder.heads.layout import HEADS
from decoder.request import DRAFT_LENGTHS, TREES, WITHOUT_PROBABILITIES

LENGTHS: dict[str, tuple[str, str]] = {
    "fixed": ("Fixed: k tokens", "Every step drafts k tokens."),
    "confidence": (
        "By confidence",
        "A draft ends before a token that the draft itself is not sure enough of; at most k.",
    ),
    "moving-average": ("By moving average", "Longer while drafts are kept, shorter after refusals; at most k."),
    "auto": (
        "By measured time",
        "The length that takes the least time per token here, at most k; none at all where drafting does not pay.",
    ),
}
SHAPES: dict[str, tuple[str, str]] = {
    "chain": ("Chain", "One token behind the other: the first refusal ends it."),
    "static": ("Static tree", "Several tokens for each place, in the same shape at every step; one path is kept."),
    "dynamic": ("Dynamic tree", "A tree that grows where the head is sure; one path is kept."),
}


def why_no_length(length: str, proposer: Any, tree: Any) -> str:
    """Why ``length`` cannot be used, or ""."""
    if length != "confidence":
        return ""
    if proposer in WITHOUT_PROBABILITIES:
        return "This proposer looks its drafts up: there is nothing that it could be unsure of."
    if proposer in HEADS and tree != "chain":
        return "Only for chains: a dynamic tree already grows where its head is sure."
    return ""


def settle_length(length: Any, proposer: Any, tree: Any) -> str:
    """The length's rule, or "fixed" where it cannot be used."""
    known = length if length in DRAFT_LENGTHS else "fixed"
    return "fixed" if why_no_length(known, proposer, tree) else known


def length_value(proposer: Any, tree: Any) -> str:
    """What the length's picker offers."""
    return _json([_entry(name, LENGTHS[name], why_no_length(name, proposer, tree)) for name in DRAFT_LENGTHS])


def shape_value() -> str:
    """What the shape's picker offers."""
    return _json([_entry(name, SHAPES[name], "") for name in TREES])


def _entry(value: str, words: tuple[str, str], reason: str) -> dict[str, str]:
    title, text = words
    state = "no" if reason else "ready"
    return {"value": value, "title": title, "text": text, "needs": "", "state": state, "reason": reason}


def _json(entries: Sequence[dict[str, str]]) -> str:
    return json.dumps({"groups": [{"title": "", "entries": entries}], "own": None}).replace("<", "\\u003c")


def length_words(request: Any) -> str:
    """Length and shape of a stored request's drafts: ``k = 4``, ``k ≤ 8 by measured time, dynamic tree``.

    A stored request may hold anything.
    """
    k = request.get("k")
    rule = {
        "confidence": f" by confidence {request.get('confidence', 0):g}"
        if isinstance(request.get("confidence"), int | float)
        else " by confidence",
        "moving-average": " by moving average",
        "auto": " by measured time",
    }.get(str(request.get("draft_length")))
    shape = {"static": ", static tree", "dynamic": ", dynamic tree"}.get(str(request.get("tree")), "")
    return (f"k = {k}" if rule is None else f"k ≤ {k}{rule}") + shape
