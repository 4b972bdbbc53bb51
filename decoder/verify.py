"""Exact verification: which draft tokens stay, and what the target puts in. Pure tensor functions.

Greedy keeps drafts while they equal the target's argmax. Sampling keeps draft x with probability min(1, p(x)/q(x))
and on a rejection draws from norm(max(0, p - q)): Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al.
(arXiv 2302.01318). Trees use the multi-round residual of SpecInfer (arXiv 2305.09781). B rows, K draft tokens, V
vocabulary; row t of ``p`` follows t draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.sampling import draw


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """Outcome for B chains. ``accepted`` [B] tokens were kept, ``token`` [B] is the target's own behind them.

    ``accept_prob`` [B, K] is min(1, p/q); entries behind the first rejection or at and beyond a row's draft count mean
    nothing. ``residual`` [B, V] is what ``token`` was drawn from.
    """

    accepted: Tensor
    token: Tensor
    accept_prob: Tensor
    residual: Tensor | None


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) over the last axis; p itself where p equals q up to rounding, never NaN."""
    left = (p - q).clamp_min(0)
    total = left.sum(-1, keepdim=True)
    # Below the rounding error of a sum there is nothing left over that means anything.
    return torch.where(total > 1e-9, left / total.clamp_min(1e-30), p)


def verify_greedy(drafts: Sequence[int], best: Sequence[int]) -> int:
    """How many of a chain's ``drafts`` are kept: those before the first that differs from the target's argmax at its
    position. ``best`` has an entry more; the target's own token is ``best[kept]``."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == best[kept]:
        kept += 1
    return kept


def verify_sampled(
    drafts: Tensor, counts: Tensor, p: Tensor, q: Tensor | None, u_accept: Tensor, u_token: Tensor
) -> ChainVerdict:
    """Rejection sampling of B chains.

    ``drafts`` [B, K] ids; ``counts`` [B]; ``p`` [B, K + 1, V] processed target probabilities; ``q`` [B, K, V] the
    distributions that the drafts were drawn from, or None when they were chosen without chance (one-hot);
    ``u_accept`` [B, K] and ``u_token`` [B] uniform draws.
    """
    batch, width = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    p_draft = p[:, :width].gather(2, drafts[..., None]).squeeze(2).double()
    if q is None:
        accept_prob = p_draft.clamp_max(1)
    else:
        q_draft = q.gather(2, drafts[..., None]).squeeze(2).double()
        # q is 0 only where padding stands; a drawn token has q > 0.
        accept_prob = torch.where(q_draft > 0, p_draft / q_draft.clamp_min(1e-300), 0).clamp_max(1)
    valid = torch.arange(width, device=drafts.device) < counts[:, None]
    kept = (u_accept < accept_prob) & valid
    accepted = kept.long().cumprod(1).sum(1)
    p_next = p[rows, accepted]
    rejected = accepted < counts
    at = accepted.clamp_max(max(width - 1, 0))
    if width == 0:
        source = p_next
    else:
        if q is None:
            q_next = torch.zeros_like(p_next).scatter(1, drafts[rows, at][:, None], 1.0)
        else:
            q_next = q[rows, at]
        source = torch.where(rejected[:, None], residual(p_next, q_next), p_next)
    return ChainVerdict(accepted, draw(source, u_token), accept_prob, source)


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """Outcome for one tree. ``path`` lists the accepted nodes from the root, ``tested`` every node that was tried
    with its acceptance probability, ``token`` is the target's own token, ``residual`` [V] what it was drawn from."""

    path: tuple[int, ...]
    token: int
    tested: dict[int, tuple[float, float]]
    """node -> (p of it in the distribution it was tested against, acceptance probability)"""
    residual: Tensor | None


def children_of(parents: Sequence[int | None]) -> dict[int | None, list[int]]:
    """Node -> its children in the order of the list; None is the root (the last committed token)."""
    found: dict[int | None, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def verify_tree_greedy(drafts: Sequence[int], parents: Sequence[int | None], best: Sequence[int]) -> TreeVerdict:
    """``best`` has len(drafts) + 1 entries: the argmax behind the root, then behind each node."""
    children = children_of(parents)
    node: int | None = None
    path: list[int] = []
    tested: dict[int, tuple[float, float]] = {}
    while True:
        want = best[0 if node is None else node + 1]
        for child in children.get(node, ()):
            hit = drafts[child] == want
            tested[child] = (float(hit), float(hit))
            if hit:
                path.append(child)
                node = child
                break
        else:
            return TreeVerdict(tuple(path), want, tested, None)


def verify_tree_sampled(
    drafts: Sequence[int],
    parents: Sequence[int | None],
    p: Tensor,
    q: Tensor | None,
    u_accept: Sequence[float],
    u_token: float,
) -> TreeVerdict:
    """Multi-round rejection sampling of one tree.

    ``p`` [N + 1, V]: target rows behind the root and behind each node. ``q`` [N, V]: for each node the distribution it
    was drawn from. Siblings drawn independently carry the same row; siblings drawn without replacement carry the row
    with the earlier ones removed and renormalised. ``q`` None means children chosen without chance (top-k): one-hot.
    After each rejection the target's distribution becomes norm(max(0, p - q)), and the next sibling is tested
    against that.
    """
    children = children_of(parents)
    node: int | None = None
    path: list[int] = []
    tested: dict[int, tuple[float, float]] = {}
    while True:
        left = p[0 if node is None else node + 1]
        for child in children.get(node, ()):
            token = drafts[child]
            row = torch.nn.functional.one_hot(torch.tensor(token), left.shape[-1]).to(left) if q is None else q[child]
            p_x, q_x = float(left[token]), float(row[token])
            accept = min(1.0, p_x / q_x) if q_x > 0 else 0.0
            tested[child] = (p_x, accept)
            if u_accept[child] < accept:
                path.append(child)
                node = child
                break
            left = residual(left, row)
        else:
            chosen = int(draw(left, torch.tensor(u_token, dtype=torch.float64)))
            return TreeVerdict(tuple(path), chosen, tested, left)
