"""JSON from strangers: every way in which it can be broken or hostile ends in ImportRefused with line and column."""

from __future__ import annotations

import json
import re
from typing import Any

from storage.errors import ImportRefused, one_line

MAX_DIGITS = 400
"""Longer numbers are refused before they are computed: no field of ours needs them, and they cost quadratic time."""

_OUTSIDE_STRINGS = re.compile(rf'"(?:[^"\\]++|\\.)*+"|(-?Infinity|NaN)|(-?\d{{{MAX_DIGITS + 1},}})', re.DOTALL)


class _BadToken(Exception):
    """A literal that Python's reader would take but that is not JSON for us."""


def parse(data: str | bytes, *, max_bytes: int) -> Any:
    """The value of ``data``. Raises ImportRefused; size is looked at before anything is read."""
    if len(data) > max_bytes:  # of a str: characters, which are at most as many as its bytes
        raise ImportRefused(f"the file is larger than {max_bytes / 1e6:g} MB: split it, or raise the limit")
    text = _decode(data) if isinstance(data, bytes | bytearray) else data.removeprefix("\ufeff")
    if not text.strip():
        raise ImportRefused("the file is empty: it should hold runs as JSON")
    try:
        return json.loads(text, parse_constant=_constant, parse_int=_int, parse_float=_float, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        raise ImportRefused(
            f"this is not JSON: {one_line(error.msg, 100)} at line {error.lineno}, column {error.colno}"
        ) from None
    except _BadToken as error:
        raise ImportRefused(f"{error}{_where(text)}") from None
    except RecursionError:
        raise ImportRefused("this JSON is nested too deeply to be a run") from None
    except MemoryError:
        raise ImportRefused("this JSON is too large for the memory of this machine: split it") from None


def _decode(data: bytes | bytearray) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise ImportRefused(f"the file is not UTF-8: bad byte at line {line}, column {column}") from None


def _constant(name: str) -> Any:
    raise _BadToken(f"{name} is not JSON")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _BadToken(f"a number of {len(digits):,} digits is too large")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > 10 * MAX_DIGITS:
        raise _BadToken(f"a number of {len(digits):,} characters is too long")
    return float(digits)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _BadToken(f"the field {one_line(twice, 60)!r} stands twice in one object")
    return made


def _where(text: str) -> str:
    """Where the first literal that we refuse stands; Python's reader does not tell."""
    for found in _OUTSIDE_STRINGS.finditer(text):
        if found.group(1) or found.group(2):
            start = found.start()
            line = text.count("\n", 0, start) + 1
            return f" (line {line}, column {start - (text.rfind(chr(10), 0, start) + 1) + 1})"
    return ""
