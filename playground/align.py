"""Several runs token under token: alignment of their output ids, and the value of the compare view. Pure Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from decoder.trace import Run, Source, Verdict

_TEAR = 3
"""A match of n tokens may open a gap of at most this times n columns: a comma in common is no reason to tear two texts
apart, and where they have nothing in common, token stands against token."""

Column = list[int | None]
"""One place of the alignment: per run the index of its token there, or None."""


def align(sequences: Sequence[Sequence[int]], reference: int = 0) -> list[Column]:
    """Align token ids of n runs against ``sequences[reference]``.

    Each column holds, for every run, the index of its token or None. Every index of every run appears exactly once and
    in order. Tokens that the reference lacks get columns of their own, in front of the reference token they precede;
    runs share such a column whatever they wrote there. Where the texts part for good, token stands against token.
    """
    if not sequences:
        return []
    base = sequences[reference]
    # gaps[i] holds, per run, the tokens in front of reference token i; hits[i] the token against it.
    gaps: list[list[list[int]]] = [[[] for _ in sequences] for _ in range(len(base) + 1)]
    hits: list[Column] = [[None] * len(sequences) for _ in base]
    for position, sequence in enumerate(sequences):
        if position == reference:
            for index in range(len(base)):
                hits[index][position] = index
            continue
        for start, stop, low, high in _blocks(base, sequence):
            paired = min(stop - start, high - low)
            for offset in range(paired):
                hits[start + offset][position] = low + offset
            gaps[start + paired][position].extend(range(low + paired, high))
    columns: list[Column] = []
    for index in range(len(base) + 1):
        extra = gaps[index]
        for offset in range(max((len(run) for run in extra), default=0)):
            columns.append([run[offset] if offset < len(run) else None for run in extra])
        if index < len(base):
            columns.append(hits[index])
    return columns


def _blocks(base: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Spans of ``base`` and ``other`` that belong together. The common start and end are taken off first: two greedy
    runs of one prompt are mostly equal, and difflib is slow on long equal texts."""
    start = 0
    limit = min(len(base), len(other))
    while start < limit and base[start] == other[start]:
        start += 1
    end = 0
    while end < limit - start and base[-1 - end] == other[-1 - end]:
        end += 1
    if abs(len(base) - len(other)) > _TEAR * end:
        end = 0
    middle = SequenceMatcher(None, base[start : len(base) - end], other[start : len(other) - end], autojunk=False)
    matches = [(start + m.a, start + m.b, m.size) for m in middle.get_matching_blocks() if m.size]
    blocks = [(0, start, 0, start)] if start else []
    a, b = start, start
    for at, against, size in [*matches, (len(base) - end, len(other) - end, end)]:
        last = at == len(base) - end
        if not last and abs((at - a) - (against - b)) > _TEAR * size:
            continue
        blocks += [(a, at, b, against), (at, at + size, against, against + size)]
        a, b = at + size, against + size
    return blocks


def compare_value(runs: Sequence[Run], labels: Sequence[str] | None = None, reference: int = 0) -> str:
    """JSON for the compare view: each run's tokens with their marks, and the alignment.

    ``rejected`` maps the index of an output token to the drafts that were discarded just before it.
    """
    names = list(labels) if labels is not None else [run.id for run in runs]
    value: dict[str, Any] = {
        "runs": [_run(run, name) for run, name in zip(runs, names, strict=True)],
        "alignment": align([run.output_ids for run in runs], reference) if runs else [],
    }
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _run(run: Run, label: str) -> dict[str, Any]:
    tokens: list[dict[str, Any]] = []
    rejected: dict[str, list[dict[str, str]]] = {}
    for step in run.steps:
        discarded = [{"text": d.text, "verdict": d.verdict.value} for d in step.drafts if d.verdict != Verdict.ACCEPTED]
        for token in step.emitted:
            if token.source is not Source.ACCEPTED and discarded:
                rejected[str(len(tokens))] = discarded
            tokens.append({"id": token.id, "text": token.text, "source": token.source.value, "step": step.index})
    return {"id": run.id, "label": label, "tokens": tokens, "rejected": rejected}
