"""Reading the trace's JSON: every field is checked, and what is wrong is refused by its name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from decoder.errors import TraceError
from decoder.trace import RUN_FIELDS, SCHEMA, DraftToken, Emitted, FinishReason, Run, Source, Step, TopToken, Verdict

T = TypeVar("T")
_MAX_ID = 2**31 - 1
_TOP_LIMIT = 64


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


def read_step(data: Any, path: str) -> Step:
    """A step from its JSON; raises TraceError naming the field."""
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


def read_run(data: Any, path: str) -> Run:
    """A run from its JSON, its invariants not checked; raises TraceError naming the field."""
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
        steps=_list(read_step, raw["steps"], at("steps"), 10_000_000),
        prefill_ms=_float(raw["prefill_ms"], at("prefill_ms")),
        ttft_ms=_float(raw["ttft_ms"], at("ttft_ms")),
        decode_ms=_float(raw["decode_ms"], at("decode_ms")),
        baseline_id=None if raw["baseline_id"] is None else _text(raw["baseline_id"], at("baseline_id"), 64),
        metrics=_read_mapping(raw["metrics"], at("metrics")),
    )
