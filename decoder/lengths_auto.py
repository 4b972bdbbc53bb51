"""``auto``: the draft length of least measured time per committed token, from running estimates; 0 when nothing pays.

expected time per token at k = (draft(k) + verify(k + 1) + overhead) / (1 + sum over j <= k of the chance that the
first j drafts are kept), which is the break-even of ``metrics`` with measured terms in the place of constants. In a
batch the time of a round is shared and the tokens of all rows count.

The text does not depend on it: timings move k, and k moves only where rounds begin and end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SLOWER, _FASTER = 0.25, 0.5
"""Weight of a newest observation above and below the estimate: something may disturb a pass, nothing speeds it up."""
_OUTLIER = 3.0
"""An observation counts at most this many times the estimate: a pause of the machine is not a trend."""

CANDIDATES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Lengths that are weighed; weighing every one would take longer than it gains."""


class Estimate:
    """A running mean that forgets, and forgives a pause or a cold start."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take in an observation."""
        self.count += 1
        if self.count == 1:
            self.value = value
        elif value < self.value:
            self.value += (1.0 if self.count == 2 else _FASTER) * (value - self.value)
        else:
            self.value += _SLOWER * (min(value, _OUTLIER * self.value) - self.value)


class Costs:
    """Milliseconds of a round's parts: drafting by length, verifying by width, and the overhead."""

    def __init__(self) -> None:
        self.draft: dict[int, Estimate] = {}
        self.verify: dict[int, Estimate] = {}
        self.overhead = Estimate()
        self.widths: dict[int, int] = {}
        """Tokens of a verifying pass by draft length; k + 1 unless drafts are trees."""
        self._rows = 0

    def observe(
        self, rows: int, k: int, width: int, times: tuple[float, float, float], *, draft_counts: bool = True
    ) -> None:
        """A round of ``rows`` rows with drafts of ``k`` tokens; without ``draft_counts``, drafting had to catch up."""
        draft, verify, overhead = times
        if self._rows not in (0, rows):
            self._rescale(width, verify)
        self._rows = rows
        if k and width > 1:
            self.widths[k] = width
        if k and draft_counts:
            self.draft.setdefault(k, Estimate()).add(draft)
        self.verify.setdefault(width, Estimate()).add(verify)
        self.overhead.add(overhead)

    def _rescale(self, width: int, verify: float) -> None:
        """Rows have left: every pass has become cheaper, about as much as this one."""
        known = self.verify_ms(width)
        if not self.verify or known <= 0 or verify <= 0:
            return
        for estimate in (*self.verify.values(), *self.draft.values()):
            estimate.value *= min(1.0, verify / known)

    def draft_ms(self, k: int) -> float:
        """Drafting k tokens: measured, or a line through what was measured and nothing."""
        return _line({0: 0.0, **{n: e.value for n, e in self.draft.items()}}, k)

    def verify_ms(self, width: int) -> float:
        """A pass of ``width`` tokens: measured, or a line through what was measured."""
        return _line({n: e.value for n, e in self.verify.items()}, width)

    def round_ms(self, k: int, empty: float) -> float:
        """A round with drafts of k tokens, of which the share ``empty`` finds nothing to draft."""
        plain = self.verify_ms(1)
        verify = empty * plain + (1 - empty) * self.verify_ms(self.widths.get(k, k + 1)) if k else plain
        return (self.draft_ms(k) if k else 0.0) + verify + self.overhead.value


def _line(known: Mapping[int, float], at: int) -> float:
    """Piecewise linear through ``known``, constant slope (never falling) behind the last point, constant before the
    first; 0 where nothing is known."""
    if not known:
        return 0.0
    points = sorted(known)
    below = max((n for n in points if n <= at), default=points[0])
    above = min((n for n in points if n >= at), default=None)
    if above is None:
        first = points[0]
        slope = (known[below] - known[first]) / (below - first) if below > first else 0.0
        return known[below] + max(0.0, slope) * (at - below)
    if above == below or at < below:
        return known[below]
    return known[below] + (known[above] - known[below]) * (at - below) / (above - below)


class Acceptance:
    """What becomes of one row's drafts: how often there are any, and how often the one at each position is kept, given
    that those before it were. Old rounds count less."""

    DECAY, PRIOR, TRUST = 0.97, 0.7, 4.0
    """Weight of a round that is one round older; chance of the first draft before anything is known; rounds that the
    position before (or PRIOR) counts for."""

    def __init__(self) -> None:
        self._rounds = self._empty = 0.0
        self._tries: list[float] = []
        self._hits: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """A round that asked for drafts, got ``drafted`` and kept ``accepted``."""
        self._rounds = self.DECAY * self._rounds + 1
        self._empty = self.DECAY * self._empty + (drafted == 0)
        # Positions that were not tested fade as well: what is known of the ones before them then takes over.
        self._tries = [self.DECAY * n for n in self._tries]
        self._hits = [self.DECAY * n for n in self._hits]
        for position in range(min(accepted + 1, drafted)):
            if position == len(self._tries):
                self._tries.append(0.0)
                self._hits.append(0.0)
            self._tries[position] += 1
            self._hits[position] += position < accepted

    @property
    def empty(self) -> float:
        """Share of rounds that asked for drafts and got none."""
        return self._empty / self._rounds if self._rounds else 0.0

    def expected(self, most: int) -> list[float]:
        """Expected tokens of a round by draft length 0..``most``, the target's own included. The chance of a position
        is measured, leaning on the position before it, and taken from it where nothing was measured."""
        found, alive = [1.0], 1.0 - self.empty
        chance = self.PRIOR
        for i in range(most):
            if i < len(self._tries):
                chance = (self._hits[i] + self.TRUST * chance) / (self._tries[i] + self.TRUST)
            alive *= chance
            found.append(found[-1] + alive)
        return found


_PLAIN = "a round without drafts, to know its time"


class Auto:
    """Chooses one length for all rows that go by time."""

    FIRST, MARGIN, AGAIN, LOOK, PATIENCE = 4, 0.02, 8, 32, 128
    """First length to try; improvement that is worth a change; rounds until another length is looked at, doubled each
    time: at most LOOK of them while drafting, and PATIENCE while decoding plainly."""

    def __init__(self, most: Mapping[int, int], costs: Costs) -> None:
        self._most = dict(most)
        self.costs = costs
        self.rows = {index: Acceptance() for index in most}
        first = min(self.FIRST, max(most.values()))
        self._tries: list[tuple[int, str]] = [(first, f"a first try of {first}")] * 3 + [(0, _PLAIN)] * 2
        self._best = first
        self._since = 0
        self._wait = self.AGAIN
        self._look = self.AGAIN
        self._looks = 0
        self._drafted_before = self._warm = False

    def choose(self, rooms: Mapping[int, int]) -> tuple[int, str] | None:
        """The next length and why, for the rows in ``rooms`` (the most that each may draft now)."""
        if not rooms:
            return None
        most = max(min(self._most[index], room) for index, room in rooms.items())
        if not self._tries:
            self._plan(most, rooms)
        return self._tries.pop(0)

    def _plan(self, most: int, rooms: Iterable[int]) -> None:
        """Queue the next round, or a few when something is to be tried out."""
        per_token = self.per_token(most, rooms)
        least = min(per_token, key=lambda k: per_token[k])
        previous, current = self._best, per_token.get(self._best, per_token[least])
        if per_token[least] < (1 - self.MARGIN) * current:
            self._best = least
        if self._best not in per_token:
            self._best = least
        self._since += 1
        best, plain = per_token[self._best], per_token[0]
        if self._best:
            self._wait = self.AGAIN
            if self._since < self._look:
                words = f"{self._best} should take {best:.1f} ms per token, plain decoding {plain:.1f}"
                self._tries = [(self._best, words)]
                return
            self._since, self._look = 0, min(2 * self._look, self.LOOK)
            # In turns a shorter and a longer look: what plain decoding takes, and whether longer drafts would be kept.
            self._looks += 1
            longer = min(2 * self._best, most)
            look = longer if self._looks % 2 and longer > self._best else 0
            self._tries = [(look, f"a look at {look}, as it has been a while" if look else _PLAIN)]
            return
        if previous:
            self._since = 0
        if self._since < self._wait or most == 0:
            trial = min((k for k in per_token if k), key=lambda k: per_token[k], default=0)
            beside = f", the best draft length {trial} should take {per_token[trial]:.1f}" if trial else ""
            self._tries = [(0, f"drafts do not pay: plain decoding takes {plain:.1f} ms per token{beside}")]
            return
        self._since, self._wait = 0, min(2 * self._wait, self.PATIENCE)
        trial = min((k for k in per_token if k), key=lambda k: per_token[k])
        self._tries = [(trial, f"another try of {trial}, as it has been a while")] * 2

    def per_token(self, most: int, rows: Iterable[int]) -> dict[int, float]:
        """Expected ms per committed token by draft length up to ``most``, for these rows together."""
        chances = [self.rows[index] for index in rows]
        expected = [chance.expected(most) for chance in chances]
        empty = 1.0
        for chance in chances:
            empty *= chance.empty
        lengths = [k for k in CANDIDATES if k < most] + [most]
        return {k: self.costs.round_ms(k, empty) / sum(e[k] for e in expected) for k in lengths}

    def observe(
        self, done: Mapping[int, tuple[int, int]], asked: int, width: int, times: tuple[float, float, float]
    ) -> None:
        """A round of all rows in ``done`` (drafted and accepted by row): ``asked`` is the longest draft asked for."""
        if self._warm:
            # The first draft after a pause also takes in what was written meanwhile.
            self.costs.observe(len(done), asked, width, times, draft_counts=self._drafted_before)
        # The first round of a run takes in the prompt, and finds everything cold: its times say nothing.
        self._warm = True
        self._drafted_before = asked > 0
        for index, (drafted, accepted) in done.items():
            if index in self.rows and asked:
                self.rows[index].observe(drafted, accepted)
