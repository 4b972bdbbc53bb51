"""How often what followed what: an online suffix automaton over token ids, with counts of short pieces.

Appending a token costs amortised constant time and at most ``depth`` counters; a text of n tokens has at most 2 n
states (Blumer et al. 1985). Every piece of at most ``depth`` tokens has its exact number of occurrences. That is what
SuffixDecoding (arXiv 2411.04975) keeps in a suffix tree; an automaton merges the tree's pieces that always occur
together, and needs no edge labels. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Place:
    """A piece of text in an automaton: a state, and how long the piece is that was read to get there."""

    state: int = 0
    length: int = 0


class SuffixAutomaton:
    """All pieces of a growing text. ``depth``: pieces up to this length are counted, longer ones are not."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.size = 0
        """Tokens read."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        """The longest piece of each state; the shortest is one longer than its link's longest."""
        self._count = [0]
        self._latest = [0]
        """Where a state's pieces ended last."""
        self._last = 0
        self._end = Place()
        """The last ``depth`` tokens, or all of them."""
        self._separator = 0

    @property
    def states(self) -> int:
        """States held: the measure of its memory."""
        return len(self._next)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens (ids from 0)."""
        for token in tokens:
            self._append(token)

    def separate(self) -> None:
        """End one text and begin another: no piece reaches across."""
        self._separator -= 1
        self._append(self._separator)

    def count(self, piece: Sequence[int]) -> int:
        """Occurrences of ``piece`` (at most ``depth`` tokens)."""
        state = 0
        for token in piece:
            if token not in self._next[state]:
                return 0
            state = self._next[state][token]
        return self._count[state]

    @property
    def end(self) -> Place:
        """The place of the text's own end."""
        return Place(self._end.state, self._end.length)

    def advance(self, place: Place, token: int) -> None:
        """Move ``place`` to the longest piece (of at most ``depth`` tokens) that ends a foreign text's next token."""
        while place.state and token not in self._next[place.state]:
            place.state = self._link[place.state]
            place.length = self._length[place.state]
        if token in self._next[place.state]:
            place.state = self._next[place.state][token]
            place.length += 1
            self._shorten(place, self.depth)

    def draft(self, place: Place, k: int, depth: int, factor: float, min_prob: float) -> tuple[list[int], float]:
        """The best continuation of ``place`` and how many of its tokens are expected to be right.

        Every piece that ends at ``place`` is tried. Behind a piece of m tokens the likeliest continuation is followed
        while its probability (product of the shares of occurrences that went on so) is at least ``min_prob``, for at
        most k, ``factor`` * m and ``depth`` - m tokens (``depth`` at most the automaton's own); the sum of those
        probabilities decides between pieces, the longer piece where they are equal.
        """
        best: tuple[list[int], float] = [], 0.0
        state, length = place.state, place.length
        while state > 0:
            shortest = self._length[self._link[state]] + 1
            room = _room(shortest, length, k, depth, factor)
            if room > best[1]:
                found = self._follow(state, room, min_prob)
                if found[1] > best[1]:
                    best = found
            state, length = self._link[state], shortest - 1
        return best

    def _follow(self, state: int, room: int, min_prob: float) -> tuple[list[int], float]:
        tokens: list[int] = []
        prob, score = 1.0, 0.0
        while len(tokens) < room:
            children = self._next[state]
            total = best = latest = 0
            chosen = -1
            for token, child in children.items():
                count = self._count[child]
                total += count
                if token >= 0 and (count > best or (count == best and self._latest[child] > latest)):
                    best, latest, chosen = count, self._latest[child], token
            if chosen < 0:
                break
            prob *= best / total
            if prob < min_prob:
                break
            tokens.append(chosen)
            score += prob
            state = children[chosen]
        return tokens, score

    def _append(self, token: int) -> None:
        state = self._new(self._length[self._last] + 1, {}, 0, 0, 0)
        at = self._last
        while at != -1 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at != -1:
            other = self._next[at][token]
            if self._length[at] + 1 == self._length[other]:
                self._link[state] = other
            else:
                self._link[state] = self._split(at, token, other)
        self._last = state
        self._count_end(token)

    def _split(self, at: int, token: int, other: int) -> int:
        """Shorter pieces of state ``other`` now also occur where the longer ones do not: they get their own state."""
        clone = self._new(
            self._length[at] + 1,
            dict(self._next[other]),
            self._link[other],
            self._count[other],
            self._latest[other],
        )
        while at != -1 and self._next[at].get(token) == other:
            self._next[at][token] = clone
            at = self._link[at]
        self._link[other] = clone
        return clone

    def _count_end(self, token: int) -> None:
        """Count one more occurrence of every piece of at most ``depth`` tokens that ends here."""
        end = self._end
        self._shorten(end, end.length)  # a split may have taken the piece out of its state
        end.state = self._next[end.state][token]
        end.length += 1
        self._shorten(end, self.depth)
        self.size += 1
        state = end.state
        while state > 0:
            self._count[state] += 1
            self._latest[state] = self.size
            state = self._link[state]

    def _shorten(self, place: Place, length: int) -> None:
        """Cut ``place`` to its last ``length`` tokens, and put it into the state where a piece so short belongs."""
        place.length = min(place.length, length)
        while place.state and self._length[self._link[place.state]] >= place.length:
            place.state = self._link[place.state]

    def _new(self, length: int, following: dict[int, int], link: int, count: int, latest: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._next) - 1


def _room(shortest: int, longest: int, k: int, depth: int, factor: float) -> int:
    """Most tokens that may be drafted behind a piece whose length is chosen between ``shortest`` and ``longest``: a
    longer one allows more by ``factor`` and leaves less of ``depth``."""
    even = int(depth / (1 + factor))
    lengths = {min(max(m, shortest), longest) for m in (even, even + 1)}
    return max(min(k, int(m * factor + 1e-6), depth - m) for m in lengths)
