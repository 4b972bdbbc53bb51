"""How many tokens to draft in a round: fixed, until the draft is unsure, by what was accepted lately, or by time.

A round's length is chosen before its random numbers are drawn, from earlier rounds only; so whatever is chosen, greedy
text is the target's and sampled text keeps the target's distribution (decided afterwards, from what was drawn, it would
not). ``confidence`` is the exception that is none: it stops within a round, but before a token is drawn, by the
distribution that it would be drawn from (``decoder/proposers/confidence.py``). No torch in here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decoder.lengths_auto import Auto, Costs
from decoder.request import GenerationRequest

TIERS = (1, 2, 4, 8, 16, 32)
"""Lengths that the moving average moves between."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft length, and why it is not simply the k of the request (None when it is)."""

    k: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What a round came to for one row. ``k`` was asked for, ``drafted`` is the depth of what was drafted."""

    k: int
    drafted: int
    accepted: int


class RowLength(ABC):
    """The draft length of one row, decided by itself."""

    @abstractmethod
    def choose(self) -> Choice:
        """The next round's length."""

    def observe(self, done: Round) -> None:  # noqa: B027 (a fixed length learns nothing)
        """Learn from a round."""


class Fixed(RowLength):
    """Always k; also for ``confidence``, which stops by itself before k."""

    def __init__(self, k: int) -> None:
        self._choice = Choice(k)

    def choose(self) -> Choice:
        return self._choice


class MovingAverage(RowLength):
    """A tier of lengths that follows the moving average of accepted tokens.

    One tier up when ``UP`` of the tier's drafts are kept, one down when less than ``DOWN`` are; between the two it
    stays, and after each change for ``SETTLE`` rounds, so that it does not swing. Rounds that found nothing to draft
    say nothing. The idea is SGLang's adaptive speculation (candidate steps, an average with weight 0.2, hysteresis).
    """

    WEIGHT, UP, DOWN, SETTLE = 0.2, 0.7, 0.3, 5

    def __init__(self, k: int) -> None:
        self.tiers = sorted({*(t for t in TIERS if t < k), k})
        self._tier = min(2, len(self.tiers) - 1)
        self._average = 0.5 * (self.UP + self.DOWN) * self.tiers[self._tier]
        self._since = 0

    @property
    def average(self) -> float:
        """Accepted tokens per round."""
        return self._average

    def choose(self) -> Choice:
        k = self.tiers[self._tier]
        return Choice(k, f"{self._average:.1f} accepted on average, so {k} of up to {self.tiers[-1]} are drafted")

    def observe(self, done: Round) -> None:
        if not done.drafted:
            return
        self._average += self.WEIGHT * (done.accepted - self._average)
        self._since += 1
        tier = self.tiers[self._tier]
        # A round that was cut short by the length limit cannot show more than it drafted.
        if self._since < self.SETTLE or done.k < tier:
            return
        if self._average >= self.UP * tier and self._tier + 1 < len(self.tiers):
            self._move(1)
        elif self._average < self.DOWN * tier and self._tier > 0:
            self._move(-1)

    def _move(self, by: int) -> None:
        self._tier += by
        self._since = 0


class Lengths:
    """The draft lengths of all rows of a batch."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._rows: list[RowLength | None] = [_row_length(request) for request in requests]
        self._most = [request.k for request in requests]
        autos = {index: request.k for index, request in enumerate(requests) if request.draft_length == "auto"}
        # What a round costs is shared: rows that go by time decide together.
        self._auto = Auto(autos, Costs()) if autos else None

    def choose(self, left: Mapping[int, int]) -> dict[int, Choice]:
        """Lengths by row for the rows in ``left``: how many tokens each may still emit, at least 1."""
        rooms = {index: max(0, room - 1) for index, room in left.items()}
        together = self._auto.choose({i: rooms[i] for i in rooms if self._rows[i] is None}) if self._auto else None
        found = {}
        for index, room in rooms.items():
            row = self._rows[index]
            choice = row.choose() if row is not None else Choice(*together) if together else Choice(0)
            if choice.k > self._most[index]:
                choice = Choice(self._most[index])
            if choice.k > room:
                # Drafts behind the limit could never be kept; the target's own token takes the last place.
                choice = Choice(room, f"only {room + 1} more token{'s' if room else ''} may be written")
            found[index] = choice
        return found

    def observe(self, done: Mapping[int, Round], asked: int, width: int, times: tuple[float, float, float]) -> None:
        """Learn from a round: what it came to by row, the longest draft asked for, the tokens per row of the verifying
        pass, and its draft, verify and overhead time in ms."""
        for index, row_round in done.items():
            row = self._rows[index]
            if row is not None:
                row.observe(row_round)
        if self._auto is not None:
            self._auto.observe({i: (r.drafted, r.accepted) for i, r in done.items()}, asked, width, times)


def _row_length(request: GenerationRequest) -> RowLength | None:
    """None where the batch decides."""
    if request.draft_length == "auto":
        return None
    if request.draft_length == "moving-average":
        return MovingAverage(request.k)
    return Fixed(request.k)
