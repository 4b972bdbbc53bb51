"""From a judged step to the trace: what is emitted, where it stops, and what is written down of it.

``Outcome.prepare`` is part of decoding (on the clock); ``write_step`` only describes (off the clock).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoder.request import GenerationRequest
from decoder.sampling import Sampler
from decoder.text import TextStream, TokenText
from decoder.trace import TOP, DraftToken, Emitted, FinishReason, Source, Step, TopToken, Verdict
from decoder.transfer import upload
from decoder.verify import residual


@dataclass
class Outcome:
    """One row's step. N drafts; row n + 1 of ``p_rows`` follows draft n, row 0 the committed text."""

    own: int
    """The target's own token."""
    k: int
    p_rows: Tensor
    """[N + 1 or more, V] processed logits of the target."""
    drafts: list[int] = field(default_factory=list)
    parents: list[int | None] | None = None
    """None = a chain."""
    path: list[int] = field(default_factory=list)
    """Accepted nodes in order."""
    tested: dict[int, tuple[float | None, float]] = field(default_factory=dict)
    """node -> (p in the distribution that it was tested against, or None for its row's; acceptance probability)"""
    probs: Tensor | None = None
    """What the target is sampled from, None when greedy."""
    q_rows: Tensor | None = None
    q_scores: Tensor | None = None
    """In place of ``q_rows``: processed logits of the draft, where its probabilities are only shown."""
    u: list[float] | None = None
    residual: Tensor | None = None
    k_reason: str | None = None
    """Why ``k`` is what it is, or why less was drafted."""

    emitted: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    kept: int = 0
    """Accepted drafts that reached the output."""
    added: str = ""
    """What the step adds to the answer."""
    removed: int = 0
    """Characters that a stop string takes from the end of the answer as it was before."""
    finish: FinishReason | None = None

    @property
    def depth(self) -> int:
        """How far ahead was drafted: the number of drafts in a chain, the longest path in a tree."""
        if self.parents is None:
            return len(self.drafts)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent is None else depths[parent] + 1)
        return max(depths, default=0)

    def prepare(
        self, text: TextStream, tail: str, left: int, stop_ids: frozenset[int], request: GenerationRequest
    ) -> None:
        """Decide what reaches the output: everything up to the first stop, EOS, or ``left`` tokens.

        ``tail`` is the end of the answer so far, as far back as a stop string may begin.
        """
        answer = tail
        for token in [*(self.drafts[node] for node in self.path), self.own]:
            self.emitted.append(token)
            if token in stop_ids:
                # The end token is shown, but it is not part of the answer; half a character before it is.
                rest = text.flush()
                answer += rest
                self.texts.append(rest + text.label(token))
                self.finish = FinishReason.STOP if token in request.stop_ids else FinishReason.EOS
                break
            piece = text.push(token)
            self.texts.append(piece)
            answer += piece
            cut = _first_stop(answer, request.stop, len(answer) - len(piece))
            if cut is not None:
                answer = answer[:cut]
                self.finish = FinishReason.STOP
                break
            if len(self.emitted) >= left:
                rest = text.flush()
                self.texts[-1] += rest
                answer += rest
                self.finish = FinishReason.LENGTH
                break
        self.added, self.removed = answer[len(tail) :], max(0, len(tail) - len(answer))
        self.kept = min(len(self.path), len(self.emitted))


def _first_stop(answer: str, stop: Sequence[str], new_from: int) -> int | None:
    """Where the earliest stop string begins that ends in the newly added text, or None."""
    found = [answer.find(s, max(0, new_from - len(s) + 1)) for s in stop]
    hits = [at for at in found if at >= 0]
    return min(hits) if hits else None


def write_step(
    index: int, outcome: Outcome, tokens: TokenText, sampler: Sampler, times: tuple[float, float, float]
) -> Step:
    """The Step of ``outcome``; ``times`` are draft, verify and overhead in ms."""
    n = len(outcome.drafts)
    p_all = outcome.probs if outcome.probs is not None else sampler.probs(outcome.p_rows)
    p_all = p_all[: n + 1]
    parents = outcome.parents if outcome.parents is not None else [i - 1 if i else None for i in range(n)]
    kept = set(outcome.path[: outcome.kept])
    cut = set(outcome.path[outcome.kept :])
    rejected = {node for node in outcome.tested if node not in kept and node not in cut}
    if len(outcome.emitted) <= len(outcome.path):
        # The run stopped at an accepted draft: whatever was tested behind it never mattered and counts as untested.
        behind = {outcome.path[outcome.kept - 1], *cut}
        rejected = {node for node in rejected if parents[node] not in behind}
    last = outcome.path[-1] if outcome.path else None
    corrected = any(parents[node] == last for node in rejected)
    p_top = _top(p_all, tokens)
    q_rows = outcome.q_rows
    if q_rows is None and outcome.q_scores is not None:
        q_rows = sampler.probs(outcome.q_scores[:n])
    q_top = _top(q_rows[:n], tokens) if q_rows is not None and n else [()] * n
    # Row 0 follows the committed text, row i + 1 draft i.
    behind_of = [0 if parent is None else parent + 1 for parent in parents]
    places = [0, *(node + 1 for node in outcome.path[: outcome.kept])][: len(outcome.emitted)]
    p_values = _picked(p_all, [*behind_of, *places], [*outcome.drafts, *outcome.emitted])
    q_values = _picked(q_rows, range(n), outcome.drafts) if q_rows is not None else [1.0] * n
    drafts = []
    for node, token in enumerate(outcome.drafts):
        verdict = Verdict.ACCEPTED if node in kept else Verdict.REJECTED if node in rejected else Verdict.UNTESTED
        tested = verdict is not Verdict.UNTESTED
        p, accept_prob = outcome.tested.get(node, (None, 0.0))
        drafts.append(
            DraftToken(
                id=token,
                text=tokens.label(token),
                parent=parents[node],
                p=(p_values[node] if outcome.parents is None or outcome.probs is None else p) if tested else None,
                q=q_values[node],
                accept_prob=accept_prob if tested else None,
                u=outcome.u[node] if tested and outcome.u is not None else None,
                verdict=verdict,
                top_p=p_top[behind_of[node]] if tested else (),
                top_q=q_top[node],
            )
        )
    emitted = []
    for position, (token, text) in enumerate(zip(outcome.emitted, outcome.texts, strict=True)):
        if position < outcome.kept:
            source = Source.ACCEPTED
        elif not n:
            source = Source.TARGET
        else:
            source = Source.CORRECTED if corrected else Source.BONUS
        emitted.append(Emitted(token, text, source, p_values[n + position]))
    left: tuple[TopToken, ...] = ()
    if corrected and outcome.probs is not None:
        row = 0 if last is None else last + 1
        left_over = outcome.residual
        if left_over is None:
            node = min(rejected)
            q = (
                q_rows[node]
                if q_rows is not None
                else torch.zeros_like(p_all[row]).index_fill_(0, upload([outcome.drafts[node]], p_all.device), 1.0)
            )
            left_over = residual(p_all[row], q)
        left = _top(left_over[None], tokens)[0]
    return Step(
        index=index,
        k=outcome.k,
        drafts=tuple(drafts),
        emitted=tuple(emitted),
        residual_top=left,
        draft_ms=times[0],
        verify_ms=times[1],
        overhead_ms=times[2],
        k_reason=outcome.k_reason,
    )


def _picked(probs: Tensor, rows: Sequence[int], ids: Sequence[int]) -> list[float]:
    """``probs[row, id]`` of every pair: one read, however many there are."""
    at, token = upload([list(rows), list(ids)], probs.device)
    picked: list[float] = probs[at, token].tolist()
    return picked


def _top(probs: Tensor, tokens: TokenText) -> list[tuple[TopToken, ...]]:
    """The likeliest tokens of each row; tokens of probability 0 are left out."""
    if not len(probs):
        return []
    best = probs.topk(min(TOP, probs.shape[-1]), dim=-1)
    values, ids = torch.stack([best.values.double(), best.indices.double()]).tolist()
    return [
        tuple(TopToken(int(i), tokens.label(int(i)), v) for i, v in zip(row_ids, row_values, strict=True) if v > 0)
        for row_ids, row_values in zip(ids, values, strict=True)
    ]
