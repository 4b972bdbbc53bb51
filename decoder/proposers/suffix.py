"""Suffix decoding (Oliaro et al., arXiv 2411.04975; vLLM's method ``suffix``): what followed most often decides.

Unlike prompt lookup, which copies what followed the latest occurrence, it counts: of all occurrences of the text's end,
how many went on with which token. Short matches draft little, long ones much, and a continuation is followed only while
it is likely enough. Optionally the outputs of earlier runs are counted too, in an automaton of their own; a prompt that
was asked before then looks magically fast, so a run records it. The drafts are one-hot: verification stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoder.proposers.base import Context, Proposal, Proposer, Row
from decoder.proposers.suffix_automaton import Place, SuffixAutomaton
from decoder.request import MAX_SUFFIX_DEPTH

MAX_EARLIER_TOKENS = 32_768
"""Most tokens of earlier runs that are kept, the first lists first: a few tens of MB."""


class _RowIndex:
    """One row's own text, and its place in the texts of earlier runs."""

    def __init__(self, row: Row, earlier: SuffixAutomaton | None, vocab_size: int) -> None:
        self.row = row
        self.vocab_size = vocab_size
        self.own = SuffixAutomaton(row.request.suffix_depth)
        self.earlier = earlier
        self.place = Place()

    def draft(self, k: int) -> list[int]:
        """Up to ``k`` tokens from whichever text promises more of them; the row's own where they promise the same."""
        fresh = self.row.tokens[self.own.size :]
        self.own.extend(fresh)
        request = self.row.request
        options = request.suffix_depth, request.suffix_factor, request.suffix_min_prob
        tokens, score = self.own.draft(self.own.end, k, *options)
        if self.earlier is not None:
            for token in fresh:
                self.earlier.advance(self.place, token)
            found, promised = self.earlier.draft(self.place, k, *options)
            if promised > score:
                # An id that the target does not have cannot be verified.
                known = next((i for i, token in enumerate(found) if token >= self.vocab_size), len(found))
                return found[:known]
        return tokens


class SuffixProposer(Proposer):
    """Drafts from counts; depth, factor and least probability come from each row's request."""

    name = "suffix"

    def __init__(self) -> None:
        self._earlier: SuffixAutomaton | None = None

    def remember(self, runs: Sequence[Sequence[int]]) -> str:
        """Also count these token lists, likeliest to be of use first; says what was kept of them.

        They are read here and not when a run begins: a server reads each run once, when it ends.
        """
        count, room = 0, MAX_EARLIER_TOKENS
        index = SuffixAutomaton(MAX_SUFFIX_DEPTH)
        for ids in runs:
            kept = list(ids[:room])
            if kept:
                index.extend(kept)
                index.separate()
                count, room = count + 1, room - len(kept)
        self._earlier = index if count else None
        return f"{count:,} run{'' if count == 1 else 's'}, {MAX_EARLIER_TOKENS - room:,} tokens"

    def begin(self, context: Context) -> None:
        self._context = context
        self._rows = [
            _RowIndex(row, self._earlier if row.request.suffix_earlier else None, context.vocab_size)
            for row in context.rows
        ]

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts = [index.draft(k) if k else [] for index, k in zip(self._rows, ks, strict=True)]
        reason = "the end of the text never occurred before at any step, or was never followed by anything likely"
        return Proposal.of_lists(drafts, self._context.device, [None if d else reason for d in drafts])

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
