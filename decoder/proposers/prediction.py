"""Predicted outputs: the caller supplies the text that it expects, as the hosted APIs' ``prediction`` does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from torch import Tensor

from decoder.proposers.base import Context, Proposal, Proposer

_LONGEST = 8
"""Tokens compared, at most, to find the place again after a difference."""
_NEAR = 32
"""A single equal token is taken as the place only this close behind the last known one."""


class Follower:
    """Follows ``expected`` along an output and finds its place again after a difference."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        self._at: int | None = 0
        self._last_good = 0
        self._seen: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] | None = None

    def extend(self, tokens: Sequence[int], start: int = 0) -> None:
        """Take over new output tokens; the whole output is ``tokens[start:]``."""
        for token in tokens[start + len(self._seen) :]:
            self._seen.append(token)
            if self._at is not None and self._at < len(self.expected) and self.expected[self._at] == token:
                self._at += 1
                self._last_good = self._at
            else:
                self._at = None
        if self._at is None:
            self._at = self._find()
            if self._at is not None:
                self._last_good = self._at

    def ahead(self, k: int) -> list[int]:
        """The next ``k`` expected tokens, or none while the place is lost or the text is used up."""
        return [] if self._at is None else self.expected[self._at : self._at + k]

    def _find(self) -> int | None:
        """The place behind the longest piece that ends the output: ahead of the last known place, else before it."""
        if self._places is None:
            self._places = _places(self.expected)
        for size in range(min(_LONGEST, len(self._seen)), 0, -1):
            starts = self._places.get(tuple(self._seen[-size:]), ())
            next_ = bisect_left(starts, self._last_good - size + 1)
            if next_ < len(starts) and (size > 1 or starts[next_] < self._last_good + _NEAR):
                return starts[next_] + size
            if next_ > 0 and size > 2:
                return starts[next_ - 1] + size
        return None


def _places(expected: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Where each piece of up to ``_LONGEST`` tokens begins. Made once, when the place is first lost: a look through the
    whole text at every step would take the longer the longer it is."""
    found: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(expected)):
        for size in range(1, min(_LONGEST, len(expected) - start) + 1):
            found.setdefault(tuple(expected[start : start + size]), []).append(start)
    return found


class PredictionProposer(Proposer):
    """Drafts from the request's ``prediction``; ``encode`` turns text into ids."""

    name = "prediction"

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode

    def begin(self, context: Context) -> None:
        self._context = context
        self._followers = [Follower(self._encode(row.request.prediction or "")) for row in context.rows]

    def select(self, rows: Sequence[int]) -> None:
        self._followers = [self._followers[b] for b in rows]

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts: list[list[int]] = []
        for row, follower, k in zip(self._context.rows, self._followers, ks, strict=True):
            follower.extend(row.tokens, row.prompt_length)
            drafts.append(follower.ahead(k) if k else [])
        reason = "the answer never met the predicted text"
        return Proposal.of_lists(drafts, self._context.device, [None if d else reason for d in drafts])
