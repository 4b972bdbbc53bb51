"""Distillation loss over a part of the vocabulary: exact for frequent tokens, sampled for the rest.

A softmax over 49,152 entries is most of the work of a small model. Each batch therefore sees the ``core`` (the most
frequent ids of the training rows), every rarer id that this batch has to foretell, and a random sample of the others,
each of which stands for as many as it was drawn from (importance weight, added to its logit as a logarithm).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Candidates:
    """``ids`` int64 [C]; ``log_weight`` float [C], 0 for ids that stand only for themselves; ``place`` int64 [V]: where
    an id is in ``ids``, or -1 (also for drawn ids, whose column stands for others too)."""

    ids: torch.Tensor
    log_weight: torch.Tensor
    place: torch.Tensor


class Vocabulary:
    """Splits the vocabulary into core and tail, and draws the candidates of each batch."""

    def __init__(self, counts: npt.NDArray[np.int64], core: int, sample: int) -> None:
        """The ``core`` most frequent ids are in every batch (0: all ids); ``sample`` others are drawn for each."""
        size = len(counts)
        core = size if core <= 0 else min(core, size)
        order = np.argsort(-counts, kind="stable")
        self.size = size
        self.core = torch.from_numpy(np.sort(order[:core]))
        self.tail = torch.from_numpy(np.sort(order[core:]))
        self.sample = min(sample, len(self.tail))
        self.in_core = torch.zeros(size, dtype=torch.bool)
        self.in_core[self.core] = True

    def candidates(self, wanted: torch.Tensor, generator: torch.Generator) -> Candidates:
        """The candidates of a batch whose ids to foretell are ``wanted`` (any shape)."""
        needed = torch.unique(wanted)
        needed = needed[~self.in_core[needed]]
        free = self.tail[~torch.isin(self.tail, needed)]
        drawn = free[torch.randperm(len(free), generator=generator)[: self.sample]]
        ids = torch.cat([self.core, needed, drawn])
        log_weight = torch.zeros(len(ids))
        if len(drawn):
            log_weight[-len(drawn) :] = float(np.log(len(free) / len(drawn)))
        place = torch.full((self.size,), -1)
        own = ids[: len(ids) - len(drawn)]
        place[own] = torch.arange(len(own))
        return Candidates(ids, log_weight, place)


def distillation_loss(
    logits: torch.Tensor,
    soft_place: torch.Tensor,
    soft_logp: torch.Tensor,
    hard_place: torch.Tensor,
    hard_weight: float,
) -> torch.Tensor:
    """Sum over N positions of cross-entropy to the target's distribution and to one hard label.

    logits [N, C] (with log weights added); soft_place [N, k] columns of the target's likeliest ids, -1 where the id is
    no candidate; soft_logp [N, k]; hard_place [N]. What the listed ids leave of the target's mass is one more outcome,
    whose probability under the draft is likewise what they leave. Weights: 1 - hard_weight and hard_weight.
    """
    logits = logits.float()
    total = logits.logsumexp(-1)
    known = (soft_place >= 0) & (soft_logp > -torch.inf)
    p = soft_logp.float().exp() * known
    logq = logits.gather(1, soft_place.clamp(min=0)) - total[:, None]
    q_sum = (logq.exp() * known).sum(-1)
    rest_p = (1 - p.sum(-1)).clamp(min=0)
    rest_logq = torch.log((1 - q_sum).clamp(min=1e-6))
    soft = -(p * logq).sum(-1) - rest_p * rest_logq
    hard = total - logits.gather(1, hard_place[:, None]).squeeze(1)
    return ((1 - hard_weight) * soft + hard_weight * hard).sum()
