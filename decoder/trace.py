"""The trace: what happened in a run, step by step. Schema version 1; JSON keys are the field names.

A run is written here once and read everywhere: live view, replay, storage, compare, command line. Whoever replays a
stored run sees exactly what the live view showed. Terms and invariants: docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from decoder.errors import TraceError

SCHEMA = 1
TOP = 5
"""How many of the likeliest tokens a trace keeps."""


class Verdict(StrEnum):
    """What became of a draft token."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNTESTED = "untested"


class Source(StrEnum):
    """Why a token stands in the output."""

    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    BONUS = "bonus"
    TARGET = "target"


class FinishReason(StrEnum):
    """Why a run ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the likeliest tokens of a distribution; ``probability`` in [0, 1]."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token that the proposer wrote ahead.

    ``parent`` is the index of the draft it follows, None for a first token. ``p``, ``accept_prob`` and ``u`` are None
    where the token was never tested (``u`` also when greedy). ``q`` is 1 for a proposer without probabilities.
    """

    id: int
    text: str
    parent: int | None
    p: float | None
    q: float
    accept_prob: float | None
    u: float | None
    verdict: Verdict
    top_p: tuple[TopToken, ...] = ()
    top_q: tuple[TopToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that reached the output. ``p`` is the target's probability of it, given everything before it.

    ``text`` is what the token adds to the text: "" while a character that spans several tokens is incomplete.
    """

    id: int
    text: str
    source: Source
    p: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """One round: propose, verify, commit. ``k`` is the draft length asked for; times are milliseconds.

    ``residual_top`` holds the likeliest of norm(max(0, p - q)) and is empty unless a draft was rejected while
    sampling. ``k_reason`` says why ``k`` is not the request's, or why fewer were drafted: half a sentence or None (None
    also in files from before it was kept).
    """

    index: int
    k: int
    drafts: tuple[DraftToken, ...]
    emitted: tuple[Emitted, ...]
    residual_top: tuple[TopToken, ...]
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    k_reason: str | None = None

    @property
    def num_accepted(self) -> int:
        """Draft tokens of this step that reached the output."""
        return sum(d.verdict is Verdict.ACCEPTED for d in self.drafts)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return _plain(self)

    @classmethod
    def from_json(cls, data: Any, path: str = "step") -> Step:
        """Read one step; raises TraceError naming the field."""
        from decoder.trace_reader import read_step

        return read_step(data, path)


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. ``finish_reason`` is None while it is still running (or was interrupted).

    ``target`` and ``draft`` are names, ``versions`` says which implementation ran (libraries, model family and
    revision, path), ``fingerprint`` identifies the target's weights. ``ttft_ms`` is the time from the start of the
    request to the first token, ``prefill_ms`` the target's prompt pass, ``decode_ms`` all steps after it.
    """

    id: str
    request: Mapping[str, Any]
    target: str
    proposer: str
    draft: str | None
    k: int
    seed: int
    dtype: str
    device: str
    versions: Mapping[str, str]
    fingerprint: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    steps: tuple[Step, ...] = ()
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    baseline_id: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def replace(self, **changes: Any) -> Run:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict with exactly the keys of schema 1."""
        return {name: _plain(getattr(self, name)) for name in RUN_FIELDS}

    @classmethod
    def from_json(cls, data: Any, path: str = "") -> Run:
        """Read a run; raises TraceError naming the first field that is wrong.

        Everything is checked: types, ranges, unknown and missing keys, and the trace invariants. The derived
        ``metrics`` are taken as they are, never trusted: readers derive them from the steps.
        """
        from decoder.trace_reader import read_run

        run = read_run(data, path)
        problems = violations(run)
        if problems:
            raise TraceError(path, f"the trace contradicts itself: {problems[0]}")
        return run


RUN_FIELDS = (
    "schema",
    "id",
    "request",
    "target",
    "proposer",
    "draft",
    "k",
    "seed",
    "dtype",
    "device",
    "versions",
    "fingerprint",
    "prompt_ids",
    "output_ids",
    "text",
    "finish_reason",
    "error",
    "steps",
    "prefill_ms",
    "ttft_ms",
    "decode_ms",
    "baseline_id",
    "metrics",
)


def violations(run: Run) -> list[str]:
    """What in ``run`` breaks the trace's invariants; empty for a sound run. Written for partial runs too."""
    found: list[str] = []
    emitted = [e.id for s in run.steps for e in s.emitted]
    if tuple(emitted) != run.output_ids:
        found.append(f"the steps emit {len(emitted)} tokens that are not the {len(run.output_ids)} output ids")
    total = sum(s.draft_ms + s.verify_ms + s.overhead_ms for s in run.steps)
    if abs(total - run.decode_ms) > 0.01 + 1e-6 * abs(run.decode_ms):
        found.append(f"step times sum to {total:.3f} ms, decode_ms is {run.decode_ms:.3f}")
    for position, step in enumerate(run.steps):
        where = f"steps[{position}]"
        if step.index != position:
            found.append(f"{where}.index is {step.index}, expected {position}")
        last = position == len(run.steps) - 1
        found.extend(f"{where}: {problem}" for problem in _step_violations(step, stopped=last))
        if not step.emitted and not last:
            found.append(f"{where} emitted nothing")
    return found


def _step_violations(step: Step, *, stopped: bool) -> list[str]:
    found: list[str] = []
    for index, draft in enumerate(step.drafts):
        if draft.parent is not None and not 0 <= draft.parent < index:
            found.append(f"drafts[{index}].parent does not come before it")
            continue
        parent = step.drafts[draft.parent] if draft.parent is not None else None
        if draft.verdict is not Verdict.UNTESTED and parent and parent.verdict is not Verdict.ACCEPTED:
            found.append(f"drafts[{index}] was tested behind a draft that was not accepted")
    accepted = [d.id for d in step.drafts if d.verdict is Verdict.ACCEPTED]
    rejected = [d for d in step.drafts if d.verdict is Verdict.REJECTED]
    chain = all(d.parent == (i - 1 if i else None) for i, d in enumerate(step.drafts))
    if chain and len(rejected) > 1:
        found.append("a chain has at most one rejected draft")
    kept = [e.id for e in step.emitted if e.source is Source.ACCEPTED]
    own = [e for e in step.emitted if e.source is not Source.ACCEPTED]
    if kept != accepted:
        found.append("the accepted drafts are not the accepted tokens that were emitted")
    if any(e.source is Source.ACCEPTED for e in step.emitted[len(kept) :]):
        found.append("an accepted token stands behind the target's own")
    if len(own) > 1:
        found.append("more than one token of the target's own")
    if not own and not stopped and step.emitted:
        found.append("no token of the target's own, and the run went on")
    for token in own:
        if token.source is Source.TARGET and step.drafts:
            found.append("source is target although something was drafted")
        if token.source is not Source.TARGET and not step.drafts:
            found.append(f"source is {token.source} although nothing was drafted")
        if token.source is Source.CORRECTED and not rejected:
            found.append("a correction without a rejected draft")
        if token.source is Source.BONUS and chain and len(accepted) != len(step.drafts):
            found.append("a bonus although not every draft was accepted")
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
