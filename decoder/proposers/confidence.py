"""The rule of ``draft_length="confidence"``, in one place for every proposer with probabilities.

A row stops drafting before a token is drawn where the likeliest token of the distribution that it would be drawn from
(after temperature, top-k and all other processors; when greedy, the softmax) has less than the request's
``confidence``. The decision looks at the distribution, never at the token: dropping a token after seeing it would bias
the output towards drafts that the rule likes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.proposers.base import Row
from decoder.transfer import upload

NEVER = 2.0
"""In the place of a probability: the row did not stop by confidence."""


class Confidence:
    """Follows B rows through the drafting of one round.

    Where some row asks for it, the host waits for the device at every draft token, to spare the passes that nobody
    needs; where none does, ``asked`` is False and nothing is computed.
    """

    def __init__(self, rows: Sequence[Row], ks: Sequence[int], device: str | torch.device) -> None:
        limits = [row.request.confidence if row.request.draft_length == "confidence" else 0.0 for row in rows]
        self.asked = any(limit > 0 and k > 0 for limit, k in zip(limits, ks, strict=True))
        if self.asked:
            self._limits = upload(limits, device, torch.float32)
            self._ks = upload(list(ks), device)
            self._going = torch.ones(len(rows), dtype=torch.bool, device=device)
            self._stopped = torch.full((len(rows),), NEVER, device=device)
            self._count = torch.zeros(len(rows), dtype=torch.long, device=device)

    def go_on(self, i: int, q: Tensor) -> bool:
        """Whether any row drafts token ``i``, given the distributions [B, V] that it would be drawn from."""
        if not self.asked:
            return True
        best = q.amax(-1)
        unsure = self._going & (best < self._limits)
        self._stopped = torch.where(unsure & (i < self._ks), best.to(self._stopped), self._stopped)
        self._going = self._going & ~unsure & (i < self._ks)
        self._count += self._going
        return bool(self._going.any())

    def cut(self, counts: Tensor) -> Tensor:
        """``counts`` [B] of drafts, less those at which a row had stopped."""
        return torch.minimum(counts, self._count) if self.asked else counts

    @property
    def stopped(self) -> Tensor | None:
        """[B]: the probability at which a row stopped, ``NEVER`` where it did not; None where no row asked."""
        return self._stopped if self.asked else None
