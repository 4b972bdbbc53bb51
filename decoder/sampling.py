"""Logits -> the probabilities that are sampled from, and drawing from them.

The order is transformers': bias, repetition penalty, presence and frequency penalty, temperature, top-k, top-p,
min-p. Target and draft rows pass through the same function with the same parameters, so that the stored p and q are
the arrays that were drawn from. V is the vocabulary size, T the number of rows (positions).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decoder.errors import RequestError
from decoder.request import SamplingParams
from decoder.threads import alone
from decoder.transfer import upload

_NUCLEUS = 512
"""Tokens that are looked at before the whole vocabulary is sorted for top-p."""


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p and min-p on float32 ``logits`` [T, V]; refused tokens become -inf.

    ``params.temperature`` must be above 0.
    """
    # Shifting first keeps a tiny temperature from overflowing to inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        logits = _keep_nucleus(logits, params.top_p)
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def _keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Top-p: the likeliest tokens until their mass reaches ``top_p``; the first one always stays."""
    # Sorting a whole vocabulary costs more than a small model's layer; the nucleus is nearly always among a few.
    probs = logits.softmax(-1)
    few = min(_NUCLEUS, logits.shape[-1])
    if logits.device.type == "cpu" and few < logits.shape[-1]:
        ordered, index = probs.topk(few, dim=-1)
        if bool((ordered.sum(-1) < top_p).any()):
            ordered, index = probs.sort(dim=-1, descending=True)
    else:
        ordered, index = probs.sort(dim=-1, descending=True)
    # A token stays if what lies before it is still below top_p.
    keep = (ordered.cumsum(-1) - ordered) < top_p
    keep[..., 0] = True
    return logits.masked_fill(~torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, keep), -torch.inf)


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of ``scores`` [..., V] and its id, the first of equals: values [...], ids [...]; NaN where one is."""
    if scores.device.type != "cpu" or scores.dtype != torch.float32:
        values, ids = scores.max(-1)
        return values, ids
    # NumPy's is vectorised: a tenth of the time of PyTorch's, which is a seventh of a plain step's overhead.
    ids = torch.from_numpy(np.asarray(scores.numpy().argmax(-1)))
    return scores.gather(-1, ids[..., None])[..., 0], ids


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [..., D] of the tokens ``ids`` [D] -> [..., vocab_size], -inf elsewhere; as they are where None."""
    if ids is None:
        return logits
    shape = torch.Size((*logits.shape[:-1], vocab_size))
    with alone(shape.numel()):
        full = logits.new_full(shape, -torch.inf)
        return full.index_copy_(-1, ids, logits)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Sample by inverting the distribution function: ``probs`` [..., V], ``u`` [...] in [0, 1) -> ids [...].

    Sums in float64, and never returns a token of probability 0. ``probs`` need not be normalised.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    index = torch.searchsorted(cumulative, u.double().unsqueeze(-1) * total, right=True)
    # Rounding may put u * total at the very end: the token that completes the sum takes it, and has a probability.
    end = torch.searchsorted(cumulative, total).clamp_max(probs.shape[-1] - 1)  # rows that are not numbers have none
    return torch.minimum(index, end).squeeze(-1)


class Sampler:
    """The processors of one row with the row's own history. Drafts never change it; only ``commit`` does."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int], device: str) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.kind = dataclasses.replace(params, seed=0)
        """What ``probs`` depends on: rows of one kind are processed together."""
        self._bias: Tensor | None = None
        if params.logit_bias:
            self._bias = torch.zeros(vocab_size, device=device)
            for token, bias in params.logit_bias:
                if token >= vocab_size:
                    raise RequestError(f"logit bias for token {token:,}, but the vocabulary ends at {vocab_size - 1:,}")
                self._bias[token] += bias
        self._in_prompt: Tensor | None = None
        self._counts: Tensor | None = None
        if params.penalised:
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._in_prompt[upload(list(prompt_ids), device)] = True
            self._counts = torch.zeros(vocab_size, device=device)

    @property
    def plain(self) -> bool:
        """Neither bias nor penalties: ``logits`` changes nothing but dtype and width."""
        return self._bias is None and self._counts is None

    def commit(self, ids: Sequence[int]) -> None:
        """Count tokens that reached the output."""
        if self._counts is not None and ids:
            index = upload(list(ids), self._counts.device)
            self._counts.index_add_(0, index, torch.ones(len(ids), device=self._counts.device))

    def logits(
        self,
        logits: Tensor,
        ahead: Tensor | None = None,
        parents: Sequence[int | None] | None = None,
        *,
        skip: int = 0,
    ) -> Tensor:
        """Bias and penalties on raw ``logits`` [T, V] (float32 out).

        Row 0 follows the committed text, row t the draft tokens ``ahead[:t]`` behind it. ``parents`` (a tree) gives
        each draft's parent draft instead; row t + 1 then follows draft t and its ancestors. ``skip`` n leaves out the
        first n rows: ``logits`` then begins with the row behind ``ahead[:n]``.
        """
        logits = self.fit(logits)
        if self._bias is not None:
            logits = logits + self._bias
        if self._counts is None or self._in_prompt is None:
            return logits
        counts = self._counts + _ahead(logits.shape[0] + skip, self.vocab_size, ahead, parents, logits.device)[skip:]
        p = self.params
        seen = self._in_prompt | (counts > 0)
        penalised = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
        return logits - p.presence_penalty * (counts > 0) - p.frequency_penalty * counts

    def fit(self, logits: Tensor) -> Tensor:
        """``logits`` [..., any width] as float32 [..., V]."""
        logits = logits.float()
        width = logits.shape[-1]
        if width < self.vocab_size:  # a padded head on the other side: same tokenizer, fewer rows
            return torch.nn.functional.pad(logits, (0, self.vocab_size - width), value=-torch.inf)
        return logits[..., : self.vocab_size]

    def probs(self, processed: Tensor) -> Tensor:
        """What is sampled from: ``processed`` (from ``logits``) [..., V] -> probabilities [..., V] that sum to 1.

        When greedy, the softmax at temperature 1, which is only shown.
        """
        if self.params.greedy:
            return processed.softmax(-1)
        return filter_logits(processed, self.params).softmax(-1)


def _ahead(
    rows: int, vocab_size: int, ahead: Tensor | None, parents: Sequence[int | None] | None, device: torch.device
) -> Tensor:
    """How often each token stands in ``ahead`` before each row, [rows, V]; the host reads no token."""
    counts = torch.zeros(rows, vocab_size, device=device)
    drafts = 0 if ahead is None else min(len(ahead), rows - 1)
    if ahead is None or not drafts:
        return counts
    counts[1 : drafts + 1].scatter_(1, ahead[:drafts, None], 1.0)
    if parents is None:
        return counts.cumsum(0)
    for node, parent in enumerate(parents[:drafts]):
        if parent is not None:
            counts[node + 1] += counts[parent + 1]
    return counts


def process_rows(
    samplers: Sequence[Sampler],
    logits: Tensor,
    ahead: Tensor,
    parents: Sequence[int | None] | None = None,
    *,
    skip: int = 0,
) -> Tensor:
    """``Sampler.logits`` of B rows: raw ``logits`` [B, T, V] and drafts ``ahead`` [B, K] -> [B, T, V]."""
    if all(sampler.plain for sampler in samplers):
        return samplers[0].fit(logits)
    return torch.stack([sampler.logits(logits[b], ahead[b], parents, skip=skip) for b, sampler in enumerate(samplers)])


def probs_of_rows(
    samplers: Sequence[Sampler], processed: Tensor, wanted: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """``Sampler.probs`` of B rows [B, T, V], those of one kind together; None for rows that are not ``wanted``."""
    found: list[Tensor | None] = [None] * len(samplers)
    groups: dict[tuple[SamplingParams, int], list[int]] = {}
    for b, sampler in enumerate(samplers):
        if wanted is None or wanted[b]:
            # How many tokens top-p looks at must not depend on the neighbours: equal tokens are ordered by it.
            alone = b if sampler.params.top_p < 1 else -1
            groups.setdefault((sampler.kind, alone), []).append(b)
    for group in groups.values():
        everyone = len(group) == len(samplers)
        probs = samplers[group[0]].probs(processed if everyone else processed[upload(group, processed.device)])
        for at, b in enumerate(group):
            found[b] = probs[at]
    return found


class Draws:
    """The random numbers of one row: ``u`` in [0, 1), float64, the same whatever its neighbours do."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, n: int) -> Tensor:
        """``n`` uniform draws [n] on the CPU."""
        return torch.rand(n, generator=self._generator, dtype=torch.float64)
