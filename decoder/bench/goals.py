"""What the engine is meant to reach, beside what a bench measured. Only ratios within one run; nothing is asserted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoder.bench.measure import Sample
from decoder.bench.summary import ALL, OUR_PLAIN, THEIR_PLAIN, RowSummary, ratio

if TYPE_CHECKING:
    from decoder.bench.result import BenchResult


@dataclass(frozen=True, slots=True)
class Goal:
    """``reached`` and ``met`` (at least) say whether the measured value is as good as each mark."""

    what: str
    measured: float
    goal: float
    least: float
    higher_is_better: bool

    @property
    def verdict(self) -> str:
        """goal, at least, or missed."""
        for mark, word in ((self.goal, "goal"), (self.least, "at least")):
            if (self.measured >= mark) if self.higher_is_better else (self.measured <= mark):
                return word
        return "missed"


def goals(result: BenchResult) -> list[Goal]:
    """The goals that this bench measured."""
    found: list[Goal] = []

    def add(what: str, measured: float | None, goal: float, least: float, higher: bool = True) -> None:
        if measured is not None:
            found.append(Goal(what, measured, goal, least, higher))

    def of(variant: str, suite: str | None = None) -> list[Sample]:
        return [s for s in result.samples if s.variant == variant and suite in (None, s.suite)]

    def over(variant: str, base: str, suite: str | None = None) -> float | None:
        r = ratio(of(variant, suite), of(base, suite))
        return r.pooled if r else None

    k = result.plan.their_k
    last = {
        row.variant: row for row in result.rows() if row.suite == (ALL if len(result.plan.suites) > 1 else row.suite)
    }
    plain = last.get(OUR_PLAIN)
    add("our plain / transformers plain", over(OUR_PLAIN, THEIR_PLAIN), 3.5, 2.0)
    add("our plain ms per token / floor", plain.floor_times if plain else None, 1.3, 2.0, higher=False)
    five = next((w for w in result.widths if w.width == 5), None)
    add("verify 5 tokens / decode 1 token", five.ratio if five else None, 1.1, 1.3, higher=False)
    for variant in (OUR_PLAIN, f"redline/draft-model/{k}", f"redline/ngram/{k}"):
        add(f"overhead share of a step, {variant}", _share(last.get(variant)), 0.03, 0.06, higher=False)
    lookup = f"transformers/prompt lookup/{k}"
    add("our n-gram / transformers prompt lookup, edit", over(f"redline/ngram/{k}", lookup, "edit"), 2.5, 1.7)
    add(
        f"our draft-model / transformers assisted, k = {k}",
        over(f"redline/draft-model/{k}", f"transformers/assisted/{k}"),
        3.0,
        2.0,
    )
    add(
        "our early exit / transformers early exit",
        over(f"redline/early-exit/{k}", f"transformers/early exit/{k}"),
        5.0,
        3.0,
    )
    if result.memory:
        add(f"memory after {result.memory.runs} runs / after 5", result.memory.ratio, 1.0, 1.03, higher=False)
    return found


def _share(row: RowSummary | None) -> float | None:
    return row.overhead_share if row else None
