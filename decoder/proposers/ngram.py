"""Prompt lookup: what followed the last few tokens the last time they occurred (Saxena 2023; also in vLLM)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoder.proposers.base import Context, Proposal, Proposer


class NgramIndex:
    """Latest occurrence of every n-gram of a growing text, for n in ``smallest``..``largest``."""

    def __init__(self, smallest: int, largest: int) -> None:
        self.sizes = range(smallest, largest + 1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take over what was added to the text; ``tokens`` is the whole text."""
        self._tokens.extend(tokens[len(self._tokens) :])

    def lookup(self, k: int) -> list[int]:
        """Up to ``k`` tokens that followed the longest, then latest, earlier occurrence of the text's end."""
        length = len(self._tokens)
        # Only n-grams that something follows are indexed, so the text's own end never matches itself.
        for end in range(self._indexed + 1, length):
            for size in self.sizes:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size : end])] = end
        self._indexed = max(self._indexed, length - 1)
        for size in reversed(self.sizes):
            if size >= length:
                continue
            found = self._ends.get(tuple(self._tokens[length - size :]))
            if found is not None:
                return self._tokens[found : found + k]
        return []


class NgramProposer(Proposer):
    """Drafts by looking up; sizes come from each row's request (``ngram_min``, ``ngram_max``)."""

    name = "ngram"

    def begin(self, context: Context) -> None:
        self._context = context
        self._indexes = [NgramIndex(row.request.ngram_min, row.request.ngram_max) for row in context.rows]

    def select(self, rows: Sequence[int]) -> None:
        self._indexes = [self._indexes[b] for b in rows]

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts: list[list[int]] = []
        reasons: list[str | None] = []
        for row, index, k in zip(self._context.rows, self._indexes, ks, strict=True):
            index.extend(row.tokens)
            found = index.lookup(k) if k else []
            sizes = row.request
            drafts.append(found)
            reasons.append(
                None
                if found
                else f"the last {sizes.ngram_min} to {sizes.ngram_max} tokens never occurred before at any step"
            )
        return Proposal.of_lists(drafts, self._context.device, reasons)
