"""Medians over the rounds of one variant: what a decode step costs, and what of it is drafting and verification.

Totals (``summary``) say how fast a text was; medians say what a round usually takes, whatever happened once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from decoder.bench.summary import Spread, spread
from decoder.trace import Step


@dataclass(frozen=True, slots=True)
class Round:
    """One decode step: ms of it all and of its parts (None where an engine does not tell), tokens it committed."""

    tokens: int
    ms: float
    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """``rounds`` of a variant: median and quartiles of ms, medians of the parts, and the mean of ``tokens``."""

    variant: str
    rounds: int
    tokens: float
    ms: Spread
    draft_ms: float | None
    verify_ms: float | None
    overhead_ms: float | None

    @property
    def ms_per_token(self) -> float:
        """Median ms of a round over its mean tokens."""
        return self.ms.median / self.tokens

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoundTimes:
        """Read what ``to_json`` wrote."""
        return cls(**{**data, "ms": Spread(**data["ms"])})


def rounds_of(steps: Iterable[Step]) -> list[Round]:
    """The decode steps of a run; its first step is the prefill's and is none."""
    return [
        Round(len(s.emitted), s.draft_ms + s.verify_ms + s.overhead_ms, s.draft_ms, s.verify_ms, s.overhead_ms)
        for s in steps
        if s.index > 0
    ]


def rounds_between(arrivals: Sequence[tuple[float, int]]) -> list[Round]:
    """From (second, tokens) of every emission; the first is the prefill's."""
    return [Round(tokens, 1000 * (at - before)) for (before, _), (at, tokens) in pairwise(arrivals)]


def medians(variant: str, rounds: Sequence[Round]) -> RoundTimes | None:
    """None of nothing. Only rounds that emitted something count."""
    rounds = [r for r in rounds if r.tokens]
    ms = spread([r.ms for r in rounds])
    if ms is None:
        return None

    def median(part: str) -> float | None:
        values = [v for r in rounds if (v := getattr(r, part)) is not None]
        return statistics.median(values) if values else None

    tokens = statistics.fmean(r.tokens for r in rounds)
    return RoundTimes(variant, len(rounds), tokens, ms, median("draft_ms"), median("verify_ms"), median("overhead_ms"))
