"""The loop of the bench: every variant warmed up, then all of them in turn on each prompt.

A machine drifts (heat, other programs, memory). Variants that are compared therefore take turns within one process,
prompt by prompt, and who begins moves on by one each time, so that drift and order hit all alike.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from decoder.errors import RedlineError
from decoder.request import GenerationRequest

if TYPE_CHECKING:
    from decoder.bench.round_times import Round

Report = Callable[[float, str], None]


def part(report: Report, low: float, high: float) -> Report:
    """A report whose 0 to 1 is ``low`` to ``high`` of ``report``."""
    return lambda fraction, message: report(low + (high - low) * fraction, message)


def silent(fraction: float, message: str) -> None:
    """A progress callback that shows nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a suite as a request with the proposer off; ``ids`` are its tokens."""

    suite: str
    id: str
    request: GenerationRequest
    ids: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Most tokens to write."""
        return self.request.max_new_tokens

    def shortened(self, tokens: int) -> Case:
        """The same prompt with at most ``tokens`` tokens of answer."""
        return replace(self, request=self.request.replace(max_new_tokens=min(self.tokens, tokens)))


@dataclass(frozen=True, slots=True)
class VariantName:
    """Who is measured. ``group``: redline, transformers, or the name of a peer."""

    group: str
    proposer: str
    k: int = 0

    @property
    def key(self) -> str:
        """One string for it."""
        return f"{self.group}/{self.proposer}" + (f"/{self.k}" if self.k else "")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run. Times in ms. ``tokens`` are those that came after the first emission (which the prefill gives)
    and ``decode_ms`` is the time they took; ``wall_ms`` is the same span on the wall clock, trace writing included.
    What an engine does not tell is None."""

    variant: str
    suite: str
    prompt: str
    repeat: int
    tokens: int
    decode_ms: float
    wall_ms: float
    ttft_ms: float
    rounds: int | None = None
    """Decode steps that those tokens took."""
    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None
    spec_steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    path: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict; ``Sample(**it)`` reads it back."""
        return asdict(self)


class Variant(ABC):
    """Something that answers prompts and can be timed."""

    def __init__(self, name: VariantName, note: str = "") -> None:
        self.name = name
        self.note = note
        self.rounds: list[Round] = []
        """Every decode step of what was measured, warming up left out."""

    def start(self, report: Report) -> None:  # noqa: B027 (most have nothing to start)
        """Load what is needed. Raises what it likes: the row then says why it is empty."""

    def takes(self, case: Case) -> bool:
        """Whether this variant can answer ``case`` at all."""
        return True

    @abstractmethod
    def measure(self, case: Case, repeat: int) -> Sample:
        """Answer ``case`` once."""

    def warm_up(self, case: Case) -> None:
        """Answer a few tokens, so that no measured run pays for a first time."""
        self.measure(case.shortened(2 * (self.name.k + 2)), -1)

    def stop(self) -> None:  # noqa: B027
        """Give back what ``start`` took. Safe to call twice."""


def sentence(error: BaseException) -> str:
    """Any error as one sentence for a table."""
    if isinstance(error, RedlineError):
        return " ".join(str(error).split())
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@contextmanager
def quiet_garbage() -> Iterator[None]:
    """Set everything that lives now aside from garbage collection, so that collecting between runs is quick."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def turn_order(count: int, turn: int) -> list[int]:
    """Indices 0 .. count - 1, beginning with ``turn``."""
    return [(turn + i) % count for i in range(count)]


def interleave(
    variants: Sequence[Variant], cases: Sequence[Case], repeats: int, report: Report = silent
) -> tuple[list[Sample], dict[str, str]]:
    """Measure every variant on every case, in turns. Returns the samples and, by key, why a variant has none (or no
    more): an error ends that variant only. Whatever was started is stopped, also when the loop is interrupted."""
    samples: list[Sample] = []
    errors: dict[str, str] = {}
    alive: list[Variant] = []
    try:
        for index, variant in enumerate(variants):
            report(0.15 * index / max(1, len(variants)), f"warming up {variant.name.key}")
            try:
                variant.start(report)
                first = next((case for case in cases if variant.takes(case)), None)
                if first is None:
                    errors[variant.name.key] = "no prompt of these suites suits it"
                    continue
                variant.warm_up(first)
                alive.append(variant)
            except Exception as error:
                errors[variant.name.key] = sentence(error)
                variant.stop()
        with quiet_garbage():
            _take_turns(alive, cases, repeats, report, samples, errors)
    finally:
        for variant in variants:
            variant.stop()
    return samples, errors


def _take_turns(
    alive: Sequence[Variant],
    cases: Sequence[Case],
    repeats: int,
    report: Report,
    samples: list[Sample],
    errors: dict[str, str],
) -> None:
    work, done = max(1, repeats * len(cases) * len(alive)), 0
    for repeat in range(repeats):
        for number, case in enumerate(cases):
            for index in turn_order(len(alive), repeat * len(cases) + number):
                variant = alive[index]
                done += 1
                if variant.name.key in errors or not variant.takes(case):
                    continue
                report(0.15 + 0.85 * done / work, f"{case.suite} {case.id}: {variant.name.key}")
                # The garbage of one variant must not be collected on another's clock.
                gc.collect()
                try:
                    samples.append(variant.measure(case, repeat))
                except Exception as error:
                    errors[variant.name.key] = sentence(error)
