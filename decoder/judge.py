"""From the target's scores of a proposal to what became of it: one ``Outcome`` per row.

What looks at whole rows of the vocabulary runs on the device, for all rows together; the host waits once, when it
reads what came of that, and compares a few ids itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from decoder.proposers.base import Proposal, Row
from decoder.proposers.confidence import NEVER
from decoder.record import Outcome
from decoder.sampling import likeliest, probs_of_rows, process_rows
from decoder.transfer import upload, upload_tensor
from decoder.verify import ChainVerdict, verify_greedy, verify_sampled, verify_tree_greedy, verify_tree_sampled


def judge(
    proposal: Proposal, rows: Sequence[Row], ks: Sequence[int], draws: Sequence[Tensor], logits: Tensor
) -> list[Outcome | None]:
    """Judge ``proposal`` (K drafts at most) by the target's ``logits`` [B, K + 1, V]; None for a row whose logits are
    not numbers. ``ks`` are the draft lengths asked for, ``draws[b]`` the row's 2 * ks[b] + 1 uniform draws: to draft,
    to accept, and for the target's own token (nothing where the row is greedy)."""
    processed = process_rows([row.sampler for row in rows], logits, proposal.ids, proposal.parents)
    if proposal.parents is not None:
        return [_judge_tree(proposal, rows[0], ks[0], processed[0], draws[0])]
    greedy = [row.request.sampling.greedy for row in rows]
    probs = probs_of_rows([row.sampler for row in rows], processed, [not g for g in greedy])
    table = _read(proposal, likeliest(processed), None if all(greedy) else _sample(proposal, ks, draws, probs))
    found: list[Outcome | None] = []
    for b, verdict in enumerate(table):
        if not all(map(math.isfinite, verdict.scores[: ks[b] + 1])):
            found.append(None)
            continue
        drafts = verdict.drafts
        if greedy[b]:
            accepted = verify_greedy(drafts, verdict.best)
            own, accept = verdict.best[accepted], [1.0] * accepted + [0.0]
        else:
            accepted, own, accept = verdict.accepted, verdict.token, verdict.accept_prob
        found.append(
            Outcome(
                own=own,
                k=ks[b],
                drafts=drafts,
                path=list(range(accepted)),
                tested={i: (None, accept[i]) for i in range(min(accepted + 1, len(drafts)))},
                p_rows=processed[b],
                probs=probs[b],
                q_rows=None if proposal.q is None else proposal.q[b],
                q_scores=None if proposal.scores is None else proposal.scores[b],
                u=None if greedy[b] else draws[b][ks[b] : 2 * ks[b]].tolist(),
                k_reason=_unsure(verdict.stopped, rows[b]),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Read:
    """A row as the host reads it: the highest score at each position and its token, the drafts, and what
    ``verify_sampled`` found where the row is sampled."""

    scores: list[float]
    best: list[int]
    drafts: list[int]
    stopped: float
    """The probability at which drafting stopped, or NEVER."""
    accepted: int = 0
    token: int = 0
    accept_prob: list[float] = field(default_factory=list)


def _read(proposal: Proposal, best: tuple[Tensor, Tensor], sampled: ChainVerdict | None) -> list[_Read]:
    """Everything that decides, by row, in one table: the one wait of the step."""
    parts = [*best, proposal.ids, proposal.counts[:, None]]
    if proposal.stopped is not None:
        parts.append(proposal.stopped[:, None])
    if sampled is not None:
        parts += [sampled.accepted[:, None], sampled.token[:, None], sampled.accept_prob]
    # Ids are far below 2^53, so nothing is rounded.
    table = torch.cat([part.double() for part in parts], 1).cpu().tolist()
    found = []
    for row in table:
        values = iter(row)
        pieces = [list(islice(values, part.shape[1])) for part in parts]
        scores, tokens, ids, (count,), *rest = pieces
        stopped = rest.pop(0)[0] if proposal.stopped is not None else NEVER
        read = _Read(scores, list(map(int, tokens)), list(map(int, ids[: int(count)])), stopped)
        if sampled is not None:
            (accepted,), (token,), accept_prob = rest
            read = replace(read, accepted=int(accepted), token=int(token), accept_prob=accept_prob)
        found.append(read)
    return found


def _unsure(best: float, row: Row) -> str | None:
    """Why a row stopped drafting by confidence, or None where it did not."""
    if best == NEVER:
        return None
    return f"the draft's likeliest next token had {best:.2f}, below the confidence of {row.request.confidence:g}"


def _sample(
    proposal: Proposal, ks: Sequence[int], draws: Sequence[Tensor], probs: Sequence[Tensor | None]
) -> ChainVerdict:
    """The verdict on the chains of all rows that are sampled (those with ``probs``); zeros for the others."""
    batch, width = proposal.ids.shape
    device = proposal.ids.device
    sampled = [b for b in range(batch) if probs[b] is not None]
    u_accept = torch.ones(len(sampled), width, dtype=torch.float64)
    u_token = torch.empty(len(sampled), dtype=torch.float64)
    for at, b in enumerate(sampled):
        k = ks[b]
        u_accept[at, : min(k, width)] = draws[b][k : 2 * k][:width]
        u_token[at] = draws[b][2 * k]
    index: Tensor | slice = slice(None) if len(sampled) == batch else upload(sampled, device)
    verdict = verify_sampled(
        proposal.ids[index],
        proposal.counts[index],
        torch.stack([p for p in probs if p is not None]),
        None if proposal.q is None else proposal.q[index],
        upload_tensor(u_accept, device),
        upload_tensor(u_token, device),
    )
    if isinstance(index, slice):
        return verdict
    accepted, token, accept_prob = (
        part.new_zeros(batch, *part.shape[1:]).index_copy(0, index, part)
        for part in (verdict.accepted, verdict.token, verdict.accept_prob)
    )
    return ChainVerdict(accepted, token, accept_prob, None)


def _judge_tree(proposal: Proposal, row: Row, k: int, processed: Tensor, draws: Tensor) -> Outcome | None:
    parents = list(proposal.parents or ())
    drafts = [int(i) for i in proposal.ids[0].tolist()]
    scores, best = likeliest(processed)
    if not bool(scores.isfinite().all()):
        return None
    q = None if proposal.q is None else proposal.q[0]
    if row.request.sampling.greedy:
        verdict = verify_tree_greedy(drafts, parents, best.tolist())
        probs, u = None, None
    else:
        probs = row.sampler.probs(processed)
        # A tree holds more nodes than k; further draws come from the same row's generator.
        u = row.draws.take(len(drafts)).tolist()
        verdict = verify_tree_sampled(drafts, parents, probs, q, u, float(draws[-1]))
    return Outcome(
        own=verdict.token,
        k=k,
        drafts=drafts,
        parents=parents,
        path=list(verdict.path),
        tested=dict(verdict.tested.items()),
        p_rows=processed,
        probs=probs,
        q_rows=q,
        u=u,
        residual=verdict.residual,
    )
