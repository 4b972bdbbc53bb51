"""Drafting a chain, token after token, from whatever scores the next one: a draft model, a head, a row of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoder.proposers.base import Proposal, Row
from decoder.sampling import draw
from decoder.transfer import upload, upload_tensor

Next = Callable[[Tensor], Tensor]
"""The newest drafts [B, 1] -> logits [B, 1, V] of what follows them."""


def draft_chain(
    logits: Tensor, step: Next, rows: Sequence[Row], ks: Sequence[int], u: Tensor, vocab_size: int
) -> Proposal:
    """Draft max(ks) tokens: ``logits`` [B, 1, V] score the first of each row, ``step`` those behind it.

    Everything stays on the device: no token is read by the host before the target has verified it.
    """
    device, width = logits.device, max(ks)
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    q = torch.empty(len(rows), width, vocab_size, device=device)
    sound = torch.ones(len(rows), width, dtype=torch.bool, device=device)
    u = upload_tensor(u, device)
    for i in range(width):
        for b, row in enumerate(rows):
            processed = row.sampler.logits(logits[b], ids[b, :i], skip=i)
            sound[b, i] = processed.amax().isfinite()
            q[b, i] = row.sampler.probs(processed)[0]
            ids[b, i] = processed[0].argmax() if row.request.sampling.greedy else draw(q[b, i], u[b, i])
        if i + 1 < width:
            logits = step(ids[:, i : i + 1])
    # A draft that breaks down may only cost time: what it wrote from there on is dropped.
    counts = torch.minimum(upload(list(ks), device), sound.long().cumprod(1).sum(1))
    return Proposal(ids, counts, q.nan_to_num_(0.0), reasons=["the draft's logits are not numbers"] * len(rows))
