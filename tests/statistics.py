"""Tests of distributions against exact expectations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from scipy.stats import chisquare

LIMIT = 1e-4
"""A right decoder fails a test this often; with fixed seeds, never twice."""


def fits(samples: Sequence[Hashable], expected: Mapping[Hashable, float]) -> float:
    """p-value of ``samples`` against ``expected`` probabilities. An impossible value gives 0."""
    counts = Counter(samples)
    if any(value not in expected or expected[value] <= 0 for value in counts):
        return 0.0
    cells = [value for value, p in expected.items() if p > 0]
    n = len(samples)
    observed = [counts[v] for v in cells]
    total = sum(expected[v] for v in cells)
    return float(chisquare(observed, [n * expected[v] / total for v in cells]).pvalue)
