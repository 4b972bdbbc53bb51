"""The trace: what happened in a run, step by step. Schema version 1; JSON keys are the field names.

A run is written here once and read everywhere: live view, replay, storage, compare, command line. Whoever replays a
stored run sees exactly what the live view showed. Terms and invariants: docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

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
        return _read_step(data, path)


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
        run = _read_run(data, path)
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


# --- reading and writing JSON ---------------------------------------------------------------------------------

T = TypeVar("T")
_MAX_ID = 2**31 - 1
_TOP_LIMIT = 64


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


def _object(data: Any, path: str, keys: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise TraceError(path, f"expected an object, found {_kind(data)}")
    for key in data:
        if key not in keys:
            raise TraceError(_join(path, str(key)), "unknown field")
    for key in keys:
        if key not in data and key not in optional:
            raise TraceError(_join(path, key), "missing")
    return data


def _join(path: str, key: str) -> str:
    key = key if len(key) <= 60 else key[:60] + "…"
    return f"{path}.{key}" if path else key


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else "an object")


def _text(data: Any, path: str, limit: int = 10_000_000) -> str:
    if not isinstance(data, str):
        raise TraceError(path, f"expected a string, found {_kind(data)}")
    if len(data) > limit:
        raise TraceError(path, f"longer than {limit:,} characters")
    try:
        data.encode("utf-8")
    except UnicodeEncodeError:
        raise TraceError(path, "holds half of a surrogate pair, which no text can hold") from None
    return data


def _int(data: Any, path: str, low: int = 0, high: int = _MAX_ID) -> int:
    if isinstance(data, bool) or not isinstance(data, int):
        raise TraceError(path, f"expected a whole number, found {_kind(data)}")
    if not low <= data <= high:
        raise TraceError(path, f"{data} is not between {low} and {high}")
    return data


def _float(data: Any, path: str, low: float = 0.0, high: float = math.inf) -> float:
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise TraceError(path, f"expected a number, found {_kind(data)}")
    try:
        value = float(data)
    except OverflowError:
        raise TraceError(path, "is too large a number") from None
    if not math.isfinite(value):
        raise TraceError(path, "is not a finite number")
    if not low <= value <= high:
        raise TraceError(path, f"{value:g} is not between {low:g} and {high:g}")
    return value


def _probability(data: Any, path: str) -> float:
    # Sums of float32 probabilities may pass 1 by a rounding error.
    return _float(data, path, 0.0, 1.0 + 1e-4)


def _optional(read: Callable[[Any, str], T], data: Any, path: str) -> T | None:
    return None if data is None else read(data, path)


def _list(read: Callable[[Any, str], T], data: Any, path: str, limit: int) -> tuple[T, ...]:
    if not isinstance(data, list | tuple):
        raise TraceError(path, f"expected a list, found {_kind(data)}")
    if len(data) > limit:
        raise TraceError(path, f"more than {limit:,} entries")
    return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(data))


def _enum(kind: type[StrEnum], data: Any, path: str) -> Any:
    try:
        return kind(_text(data, path))
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        choices = ", ".join(member.value for member in kind)
        raise TraceError(path, f"{data[:40]!r} is not one of {choices}") from None


def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


def _read_top(data: Any, path: str) -> TopToken:
    raw = _object(data, path, _fields(TopToken))
    return TopToken(
        _int(raw["id"], _join(path, "id")),
        _text(raw["text"], _join(path, "text")),
        _probability(raw["probability"], _join(path, "probability")),
    )


def _read_draft(data: Any, path: str) -> DraftToken:
    raw = _object(data, path, _fields(DraftToken))
    return DraftToken(
        id=_int(raw["id"], _join(path, "id")),
        text=_text(raw["text"], _join(path, "text")),
        parent=_optional(_int, raw["parent"], _join(path, "parent")),
        p=_optional(_probability, raw["p"], _join(path, "p")),
        q=_probability(raw["q"], _join(path, "q")),
        accept_prob=_optional(_probability, raw["accept_prob"], _join(path, "accept_prob")),
        u=_optional(_probability, raw["u"], _join(path, "u")),
        verdict=_enum(Verdict, raw["verdict"], _join(path, "verdict")),
        top_p=_list(_read_top, raw["top_p"], _join(path, "top_p"), _TOP_LIMIT),
        top_q=_list(_read_top, raw["top_q"], _join(path, "top_q"), _TOP_LIMIT),
    )


def _read_emitted(data: Any, path: str) -> Emitted:
    raw = _object(data, path, _fields(Emitted))
    return Emitted(
        id=_int(raw["id"], _join(path, "id")),
        text=_text(raw["text"], _join(path, "text")),
        source=_enum(Source, raw["source"], _join(path, "source")),
        p=_optional(_probability, raw["p"], _join(path, "p")),
    )


def _read_step(data: Any, path: str) -> Step:
    raw = _object(data, path, _fields(Step), optional=("k_reason",))
    return Step(
        index=_int(raw["index"], _join(path, "index")),
        k=_int(raw["k"], _join(path, "k"), 0, 100_000),
        drafts=_list(_read_draft, raw["drafts"], _join(path, "drafts"), 100_000),
        emitted=_list(_read_emitted, raw["emitted"], _join(path, "emitted"), 100_000),
        residual_top=_list(_read_top, raw["residual_top"], _join(path, "residual_top"), _TOP_LIMIT),
        draft_ms=_float(raw["draft_ms"], _join(path, "draft_ms")),
        verify_ms=_float(raw["verify_ms"], _join(path, "verify_ms")),
        overhead_ms=_float(raw["overhead_ms"], _join(path, "overhead_ms")),
        k_reason=None if raw.get("k_reason") is None else _text(raw["k_reason"], _join(path, "k_reason"), 1000),
    )


def _read_token_id(data: Any, path: str) -> int:
    return _int(data, path)


def _read_json(data: Any, path: str, depth: int = 0) -> Any:
    """Any finite JSON value of sane depth, unchanged (for ``request`` and ``metrics``)."""
    if depth > 12:
        raise TraceError(path, "nested too deeply")
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, int):
        return _int(data, path, -(2**63), 2**63 - 1)
    if isinstance(data, float):
        return _float(data, path, -math.inf)
    if isinstance(data, str):
        return _text(data, path)
    if isinstance(data, list | tuple):
        return [_read_json(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(data)]
    if isinstance(data, Mapping):
        return {_text(key, path): _read_json(item, _join(path, str(key)), depth + 1) for key, item in data.items()}
    raise TraceError(path, f"{type(data).__name__} is not JSON")


def _read_mapping(data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise TraceError(path, f"expected an object, found {_kind(data)}")
    return _read_json(data, path)


def _read_run(data: Any, path: str) -> Run:
    if isinstance(data, Mapping) and (data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool | float)):
        found = data.get("schema", "none")
        raise TraceError(_join(path, "schema"), f"this program reads schema {SCHEMA}, found {str(found)[:40]}")
    raw = _object(data, path, RUN_FIELDS)

    def at(name: str) -> str:
        return _join(path, name)

    versions = _read_mapping(raw["versions"], at("versions"))
    for key, value in versions.items():
        _text(value, at(f"versions.{key}"), 1000)
    identifier = _text(raw["id"], at("id"), 64)
    if not identifier or not all(c.isascii() and (c.isalnum() or c in "-_") for c in identifier):
        raise TraceError(at("id"), "an id is made of letters, digits, - and _")
    return Run(
        schema=SCHEMA,
        id=identifier,
        request=_read_mapping(raw["request"], at("request")),
        target=_text(raw["target"], at("target"), 1000),
        proposer=_text(raw["proposer"], at("proposer"), 100),
        draft=None if raw["draft"] is None else _text(raw["draft"], at("draft"), 1000),
        k=_int(raw["k"], at("k"), 0, 100_000),
        seed=_int(raw["seed"], at("seed"), 0, 2**63 - 1),
        dtype=_text(raw["dtype"], at("dtype"), 100),
        device=_text(raw["device"], at("device"), 100),
        versions=versions,
        fingerprint=_text(raw["fingerprint"], at("fingerprint"), 1000),
        prompt_ids=_list(_read_token_id, raw["prompt_ids"], at("prompt_ids"), 10_000_000),
        output_ids=_list(_read_token_id, raw["output_ids"], at("output_ids"), 10_000_000),
        text=_text(raw["text"], at("text")),
        finish_reason=None
        if raw["finish_reason"] is None
        else _enum(FinishReason, raw["finish_reason"], at("finish_reason")),
        error=None if raw["error"] is None else _text(raw["error"], at("error"), 100_000),
        steps=_list(_read_step, raw["steps"], at("steps"), 10_000_000),
        prefill_ms=_float(raw["prefill_ms"], at("prefill_ms")),
        ttft_ms=_float(raw["ttft_ms"], at("ttft_ms")),
        decode_ms=_float(raw["decode_ms"], at("decode_ms")),
        baseline_id=None if raw["baseline_id"] is None else _text(raw["baseline_id"], at("baseline_id"), 64),
        metrics=_read_mapping(raw["metrics"], at("metrics")),
    )
