"""Drafting a chain, token after token, from whatever scores the next one: a draft model, a head, a row of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoder.proposers.base import Proposal, Row
from decoder.proposers.confidence import Confidence
from decoder.sampling import draw, likeliest, probs_of_rows, process_rows
from decoder.threads import alone
from decoder.transfer import upload, upload_tensor

Next = Callable[[Tensor], Tensor]
"""The newest drafts [B, 1] -> logits [B, 1, V] of what follows them."""


def draft_chain(
    logits: Tensor, step: Next, rows: Sequence[Row], ks: Sequence[int], u: Tensor, vocab_size: int
) -> Proposal:
    """Draft max(ks) tokens: ``logits`` [B, 1, V] score the first of each row, ``step`` those behind it.

    Everything stays on the device: no token is read by the host before the target has verified it. Only where a row
    stops by confidence is the host asked whether any row goes on; ``step`` is then called less often.
    """
    device, width = logits.device, max(ks)
    samplers = [row.sampler for row in rows]
    sampled = [b for b, row in enumerate(rows) if not row.request.sampling.greedy]
    drawn = upload(sampled, device)
    confidence = Confidence(rows, ks, device)
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    # Where nothing is drawn by chance, probabilities are for the trace alone, which makes them off the clock.
    shown = not sampled and not confidence.asked
    q = torch.empty(len(rows), width, vocab_size, device=device)
    sound = torch.ones(len(rows), width, dtype=torch.bool, device=device)
    u = upload_tensor(u, device)
    for i in range(width):
        with alone(len(rows) * vocab_size):
            processed = process_rows(samplers, logits[:, :1], ids[:, :i], skip=i)
            best, own = likeliest(processed[:, 0])
            sound[:, i] = best.isfinite()
            if shown:
                q[:, i] = processed[:, 0]
            else:
                for b, probs in enumerate(probs_of_rows(samplers, processed)):
                    assert probs is not None
                    q[b, i] = probs[0]
                if not confidence.go_on(i, q[:, i]):
                    ids, q, sound = ids[:, :i], q[:, :i], sound[:, :i]
                    break
            if len(sampled) < len(rows):
                ids[:, i] = own
            if sampled:
                ids[drawn, i] = draw(q[drawn, i], u[drawn, i])
        if i + 1 < width:
            logits = step(ids[:, i : i + 1])
    # A draft that breaks down may only cost time: what it wrote from there on is dropped.
    whole = sound.long().cumprod(1).sum(1)
    counts = confidence.cut(torch.minimum(upload(list(ks), device), whole))
    if not shown:
        with alone(q.numel()):
            q.nan_to_num_(0.0)
    return Proposal(
        ids,
        counts,
        None if shown else q,
        q if shown else None,
        reasons=["the draft's logits are not numbers"] * len(rows),
        stopped=confidence.stopped,
        sound=sound.all(1),
    )
