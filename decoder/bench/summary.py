"""From samples to rows: pooled speeds, ratios with their spread, acceptance, time per step. Pure Python.

A pooled number is tokens over time, never a mean of means. A ratio is taken over the prompts that both sides
answered: pooled, and the median and quartiles of the ratios of single prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decoder.bench.measure import Sample, VariantName

OUR_PLAIN = VariantName("redline", "none").key
THEIR_PLAIN = VariantName("transformers", "generate").key
ALL = "all"
"""The row set over every suite."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of ``count`` values."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles (inclusive method), or None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the speed of a base: pooled over common prompts, and the spread over them."""

    pooled: float
    median: float
    low: float
    high: float
    prompts: int


def _pool(samples: Iterable[Sample]) -> tuple[int, float]:
    tokens, ms = 0, 0.0
    for sample in samples:
        tokens += sample.tokens
        ms += sample.decode_ms
    return tokens, ms


def _by_prompt(samples: Iterable[Sample]) -> dict[tuple[str, str], tuple[int, float]]:
    grouped: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        grouped.setdefault((sample.suite, sample.prompt), []).append(sample)
    pooled = {prompt: _pool(of_prompt) for prompt, of_prompt in grouped.items()}
    return {prompt: (tokens, ms) for prompt, (tokens, ms) in pooled.items() if tokens > 0 and ms > 0}


def ratio(samples: Iterable[Sample], base: Iterable[Sample]) -> Ratio | None:
    """Speed of ``samples`` over speed of ``base``, in tokens per time; None without a prompt that both decoded."""
    ours, theirs = _by_prompt(samples), _by_prompt(base)
    common = [prompt for prompt in ours if prompt in theirs]
    if not common:
        return None

    def speed(of: Mapping[tuple[str, str], tuple[int, float]]) -> float:
        return sum(of[p][0] for p in common) / sum(of[p][1] for p in common)

    single = spread([(ours[p][0] / ours[p][1]) / (theirs[p][0] / theirs[p][1]) for p in common])
    assert single is not None
    return Ratio(speed(ours) / speed(theirs), single.median, single.low, single.high, len(common))


@dataclass(frozen=True, slots=True)
class RowSummary:
    """One variant on one suite (or ``all``). Milliseconds; None where the engine does not tell, or nothing ran."""

    suite: str
    variant: str
    prompts: int
    tokens: int
    tokens_per_second: float | None
    wall_tokens_per_second: float | None
    """Writing the trace included."""
    ms_per_token: float | None
    vs_plain: Ratio | None
    vs_transformers: Ratio | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_step: float | None
    draft_ms: float | None
    """Per decode step, as are the next two."""
    verify_ms: float | None
    overhead_ms: float | None
    floor_times: float | None
    """ms per token over the time that reading the weights once takes."""
    path: str
    error: str | None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)

    @property
    def overhead_share(self) -> float | None:
        """Overhead over the whole of a step."""
        if self.draft_ms is None or self.verify_ms is None or self.overhead_ms is None:
            return None
        total = self.draft_ms + self.verify_ms + self.overhead_ms
        return self.overhead_ms / total if total > 0 else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if not known or any(v is None for v in known) else sum(v for v in known if v is not None)


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def row(
    suite: str,
    variant: str,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    transformers: Sequence[Sample],
    floor_ms: float | None,
    error: str | None = None,
) -> RowSummary:
    """Summarise the samples of one variant against the two bases of the same suite."""
    tokens, ms = _pool(samples)
    rounds = _sum(s.rounds for s in samples)
    drafted, accepted = _sum(s.drafted for s in samples), _sum(s.accepted for s in samples)
    spec_steps = _sum(s.spec_steps for s in samples)
    per_token = ms / tokens if tokens else None
    length = _over(accepted, spec_steps)
    return RowSummary(
        suite=suite,
        variant=variant,
        prompts=len({(s.suite, s.prompt) for s in samples}),
        tokens=tokens,
        tokens_per_second=_over(1000 * tokens, ms),
        wall_tokens_per_second=_over(1000 * tokens, sum(s.wall_ms for s in samples)),
        ms_per_token=per_token,
        vs_plain=ratio(samples, plain),
        vs_transformers=ratio(samples, transformers),
        draft_acceptance_rate=_over(accepted, drafted),
        mean_acceptance_length=None if length is None else 1 + length,
        tokens_per_step=_over(tokens, rounds),
        draft_ms=_over(_sum(s.draft_ms for s in samples), rounds),
        verify_ms=_over(_sum(s.verify_ms for s in samples), rounds),
        overhead_ms=_over(_sum(s.overhead_ms for s in samples), rounds),
        floor_times=_over(per_token, floor_ms),
        path=", ".join(sorted({s.path for s in samples if s.path})),
        error=error,
    )


def rows(
    samples: Sequence[Sample],
    variants: Sequence[str],
    errors: Mapping[str, str],
    suites: Sequence[str],
    floor_ms: float | None,
) -> list[RowSummary]:
    """Rows of every suite and, where there are several, of all of them together. A variant without samples has a row
    in the last table only, with the reason."""
    found = []
    tables = [*suites, *([ALL] if len(suites) > 1 else [])]
    for suite in tables:
        here = [s for s in samples if suite in (s.suite, ALL)]
        plain = [s for s in here if s.variant == OUR_PLAIN]
        theirs = [s for s in here if s.variant == THEIR_PLAIN]
        for variant in variants:
            own = [s for s in here if s.variant == variant]
            if own or (variant in errors and suite == tables[-1]):
                found.append(row(suite, variant, own, plain, theirs, floor_ms, errors.get(variant)))
    return found
