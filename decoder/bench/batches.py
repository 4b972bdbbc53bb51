"""Many requests at once: total tokens per second, and the speed-up of speculation, for B rows that decode together."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decoder.bench.measure import Case, Report, quiet_garbage, sentence, silent, turn_order
from decoder.bench.ours import OurVariant
from decoder.bench.summary import Spread, spread
from decoder.engine import SpeculativeDecoder
from decoder.errors import RequestError
from decoder.metrics import batch_timing


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One batch decoded to its end. ``tokens`` came after the prefill, in ``decode_ms`` on the engine's clock and
    ``wall_ms`` with the traces written; ``rows_alive`` is the mean number of rows that were still decoding."""

    variant: str
    batch: int
    repeat: int
    tokens: int
    decode_ms: float
    wall_ms: float
    rows_alive: float


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A variant at one B, pooled over repeats. ``speedup`` is over plain decoding of the same B."""

    variant: str
    batch: int
    tokens_per_second: float | None
    wall_tokens_per_second: float | None
    speedup: float | None
    spread: Spread | None
    """Of the speed-ups of single repeats."""
    rows_alive: float | None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)


def decode_batch(decoder: SpeculativeDecoder, variant: OurVariant, cases: Sequence[Case], repeat: int) -> BatchSample:
    """Decode ``cases`` together. RequestError when a row ends in an error."""
    stream = decoder.batch([variant.request(case) for case in cases])
    next(stream, None)
    begin = time.perf_counter()
    for _ in stream:
        pass
    wall_ms = 1000 * (time.perf_counter() - begin)
    runs = stream.runs
    broken = next((run.error for run in runs if run.error), None)
    if broken:
        raise RequestError(broken)
    t = batch_timing(runs)
    alive = t.rows_alive if t.rows_alive is not None else float(len(cases))
    return BatchSample(variant.name.key, len(cases), repeat, t.tokens, t.decode_ms, wall_ms, alive)


def measure_batches(
    pairs: Sequence[tuple[OurVariant, SpeculativeDecoder]],
    cases: Sequence[Case],
    sizes: Sequence[int],
    repeats: int,
    report: Report = silent,
) -> tuple[list[BatchSample], dict[tuple[str, int], str]]:
    """Every variant at every B, in turns. An error fills its cell of the table and nothing else."""
    samples: list[BatchSample] = []
    errors: dict[tuple[str, int], str] = {}
    with quiet_garbage():
        for number, size in enumerate(sizes):
            _one_size(
                pairs,
                [cases[i % len(cases)] for i in range(size)],
                repeats,
                number / len(sizes),
                report,
                samples,
                errors,
            )
    return samples, errors


def _one_size(
    pairs: Sequence[tuple[OurVariant, SpeculativeDecoder]],
    chosen: Sequence[Case],
    repeats: int,
    fraction: float,
    report: Report,
    samples: list[BatchSample],
    errors: dict[tuple[str, int], str],
) -> None:
    for repeat in range(-1, repeats):
        report(fraction, f"batches of {len(chosen)}")
        for index in turn_order(len(pairs), repeat + 1):
            variant, decoder = pairs[index]
            key = (variant.name.key, len(chosen))
            if key in errors:
                continue
            gc.collect()
            try:
                # The first turn is the warm-up: a few tokens that are not kept.
                now = chosen if repeat >= 0 else [case.shortened(2 * (variant.k + 2)) for case in chosen]
                sample = decode_batch(decoder, variant, now, repeat)
            except Exception as error:
                errors[key] = sentence(error)
                continue
            if repeat >= 0:
                samples.append(sample)


def batch_rows(
    samples: Sequence[BatchSample], errors: Mapping[tuple[str, int], str], plain: str = "redline/none"
) -> list[BatchRow]:
    """The table: by B, then by variant in the order measured."""
    keys = list(dict.fromkeys([(s.variant, s.batch) for s in samples] + list(errors)))
    found = []
    for variant, batch in sorted(keys, key=lambda key: (key[1], key[0] != plain)):
        own = {s.repeat: s for s in samples if (s.variant, s.batch) == (variant, batch)}
        base = {s.repeat: s for s in samples if (s.variant, s.batch) == (plain, batch)}
        ours, theirs = _speed(list(own.values())), _speed(list(base.values()))
        ratios = [
            a / b for r in own if r in base for a, b in [(_speed([own[r]]), _speed([base[r]]))] if a is not None and b
        ]
        wall = sum(s.wall_ms for s in own.values())
        found.append(
            BatchRow(
                variant,
                batch,
                ours,
                1000 * sum(s.tokens for s in own.values()) / wall if wall else None,
                ours / theirs if ours is not None and theirs else None,
                spread(ratios),
                sum(s.rows_alive for s in own.values()) / len(own) if own else None,
                errors.get((variant, batch)),
            )
        )
    return found


def _speed(samples: Sequence[BatchSample]) -> float | None:
    ms = sum(s.decode_ms for s in samples)
    return 1000 * sum(s.tokens for s in samples) / ms if ms > 0 else None
