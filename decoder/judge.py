"""From the target's scores of a proposal to what became of it: one ``Outcome`` per row.

Everything is computed on the device for all rows together; the host waits once, when it reads the verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.proposers.base import Proposal, Row
from decoder.proposers.confidence import NEVER
from decoder.record import Outcome
from decoder.sampling import probs_of_rows, process_rows
from decoder.transfer import upload, upload_tensor
from decoder.verify import ChainVerdict, verify_greedy, verify_sampled, verify_tree_greedy, verify_tree_sampled

_HEAD = 5
"""Numbers of a row's verdict before its ids: sound, count, accepted, token, probability at which drafting stopped."""


def judge(
    proposal: Proposal, rows: Sequence[Row], ks: Sequence[int], draws: Sequence[Tensor], logits: Tensor
) -> list[Outcome | None]:
    """Judge ``proposal`` (K drafts at most) by the target's ``logits`` [B, K + 1, V]; None for a row whose logits are
    not numbers. ``ks`` are the draft lengths asked for, ``draws[b]`` the row's 2 * ks[b] + 1 uniform draws: to draft,
    to accept, and for the target's own token."""
    processed = process_rows([row.sampler for row in rows], logits, proposal.ids, proposal.parents)
    if proposal.parents is not None:
        return [_judge_tree(proposal, rows[0], ks[0], processed[0], draws[0])]
    greedy = [row.request.sampling.greedy for row in rows]
    probs = probs_of_rows([row.sampler for row in rows], processed, [not g for g in greedy])
    verdict = _verify(proposal, ks, draws, processed, probs, greedy)
    stopped = (
        torch.full_like(proposal.counts, NEVER, dtype=torch.float64) if proposal.stopped is None else proposal.stopped
    )
    head = [_sound(processed, ks), proposal.counts, verdict.accepted, verdict.token, stopped]
    # Ids are far below 2^53, so nothing is rounded.
    table = torch.cat(
        [torch.stack([part.double() for part in head], 1), proposal.ids.double(), verdict.accept_prob.double()], 1
    )
    values = table.cpu().tolist()  # the one wait of the step
    width = proposal.ids.shape[1]
    found: list[Outcome | None] = []
    for b, row_values in enumerate(values):
        sound, count, accepted, token = (int(v) for v in row_values[: _HEAD - 1])
        if not sound:
            found.append(None)
            continue
        accept = row_values[_HEAD + width :]
        found.append(
            Outcome(
                own=token,
                k=ks[b],
                drafts=[int(v) for v in row_values[_HEAD : _HEAD + count]],
                path=list(range(accepted)),
                tested={i: (None, accept[i]) for i in range(min(accepted + 1, count))},
                p_rows=processed[b],
                probs=probs[b],
                q_rows=None if proposal.q is None else proposal.q[b],
                u=None if greedy[b] else draws[b][ks[b] : 2 * ks[b]].tolist(),
                k_reason=_unsure(row_values[_HEAD - 1], rows[b]),
            )
        )
    return found


def _unsure(best: float, row: Row) -> str | None:
    """Why a row stopped drafting by confidence, or None where it did not."""
    if best == NEVER:
        return None
    return f"the draft's likeliest next token had {best:.2f}, below the confidence of {row.request.confidence:g}"


def _sound(processed: Tensor, ks: Sequence[int]) -> Tensor:
    """[B]: the scores that row b needs, the first ks[b] + 1, are numbers."""
    needed = upload(list(ks), processed.device)[:, None]
    padding = torch.arange(processed.shape[1], device=processed.device) > needed
    return (processed.amax(-1).isfinite() | padding).all(1)


def _verify(
    proposal: Proposal,
    ks: Sequence[int],
    draws: Sequence[Tensor],
    processed: Tensor,
    probs: Sequence[Tensor | None],
    greedy: Sequence[bool],
) -> ChainVerdict:
    """The verdict on all chains: greedy rows and sampled rows, each in one go."""
    batch, width = proposal.ids.shape
    device = proposal.ids.device
    sampled = [b for b in range(batch) if not greedy[b]]
    verdict = ChainVerdict(
        torch.zeros(batch, dtype=torch.long, device=device),
        torch.zeros(batch, dtype=torch.long, device=device),
        torch.zeros(batch, width, dtype=torch.float64, device=device),
        None,
    )
    if len(sampled) < batch:
        verdict = verify_greedy(proposal.ids, proposal.counts, processed.argmax(-1))
    if not sampled:
        return verdict
    u_accept = torch.ones(len(sampled), width, dtype=torch.float64)
    u_token = torch.empty(len(sampled), dtype=torch.float64)
    for at, b in enumerate(sampled):
        k = ks[b]
        u_accept[at, : min(k, width)] = draws[b][k : 2 * k][:width]
        u_token[at] = draws[b][2 * k]
    index: Tensor | slice = slice(None) if len(sampled) == batch else upload(sampled, device)
    rows = torch.stack([p for p in probs if p is not None])
    other = verify_sampled(
        proposal.ids[index],
        proposal.counts[index],
        rows,
        None if proposal.q is None else proposal.q[index],
        upload_tensor(u_accept, device),
        upload_tensor(u_token, device),
    )
    if isinstance(index, slice):
        return other
    return ChainVerdict(
        verdict.accepted.index_copy(0, index, other.accepted),
        verdict.token.index_copy(0, index, other.token),
        verdict.accept_prob.index_copy(0, index, other.accept_prob),
        None,
    )


def _judge_tree(proposal: Proposal, row: Row, k: int, processed: Tensor, draws: Tensor) -> Outcome | None:
    parents = list(proposal.parents or ())
    drafts = [int(i) for i in proposal.ids[0].tolist()]
    if not bool(processed.amax(-1).isfinite().all()):
        return None
    q = None if proposal.q is None else proposal.q[0]
    if row.request.sampling.greedy:
        verdict = verify_tree_greedy(drafts, parents, processed.argmax(-1).tolist())
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
