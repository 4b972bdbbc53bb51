"""The loop: prefill, then step() = propose -> verify -> commit -> roll back, until every row has stopped.

Only model time and what decoding needs is on the clock: writing the trace (the five likeliest tokens, texts of drafts)
and whatever the consumer does between two steps is not. The host waits for the device once a step, when it reads the
verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoder.clock import Clock
from decoder.judge import judge
from decoder.lengths import Choice, Lengths, Round
from decoder.proposers.base import Context, Proposal, Row
from decoder.record import Outcome
from decoder.request import GenerationRequest
from decoder.rows import RowState
from decoder.sampling import Draws, Sampler, draw, likeliest
from decoder.text import Answer, TextStream
from decoder.threads import alone
from decoder.trace import FinishReason, Step
from decoder.transfer import upload

if TYPE_CHECKING:
    from decoder.engine import SpeculativeDecoder

_NO_DRAWS = torch.empty(0, dtype=torch.float64)
"""Of a greedy row."""


class Decoding:
    """B requests that decode together. ``states`` has an entry per request, ``live`` the rows that the cache holds:
    those that have not finished, and until the next round those that just have."""

    def __init__(self, decoder: SpeculativeDecoder, requests: Sequence[GenerationRequest]) -> None:
        self.decoder = decoder
        self.proposer = decoder.proposer
        self.runner = decoder.target.runner
        self.device = self.runner.logits_device
        self.clock = Clock(self.runner.device)
        self.states = [self._new_row(index, request, len(requests)) for index, request in enumerate(requests)]
        # Longest first: while a long prompt is read, the rows behind it that are done take no part.
        self.live = sorted(self.states, key=lambda state: -len(state.row.tokens))
        self.lengths = Lengths(requests)
        self._context: Context | None = None
        self._paths = self._paths_now()

    def _new_row(self, index: int, request: GenerationRequest, batch: int) -> RowState:
        decoder, target = self.decoder, self.decoder.target
        ids = decoder.prompt_ids(request)
        eos = frozenset() if request.ignore_eos else target.eos_ids
        return RowState(
            index=index,
            row=Row(
                request,
                list(ids),
                len(ids),
                Sampler(request.sampling, self.runner.vocab_size, ids, self.device),
                Draws(request.sampling.seed),
            ),
            text=TextStream(decoder.tokens, ids),
            answer=Answer(max((len(s) for s in request.stop), default=1) - 1),
            limit=min(request.max_new_tokens, self.runner.context - len(ids)),
            stop_ids=eos | frozenset(request.stop_ids),
            header=decoder.header(request, ids, batch),
            reason=decoder.not_speculating,
        )

    @property
    def over(self) -> bool:
        """True when every row has finished."""
        return all(state.finish is not None for state in self.states)

    # --- the two kinds of pass ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, started: float) -> dict[int, Step]:
        """The prompts' pass, which gives every row its first token: step 0. ``started`` is when the request came."""
        rows = [state.row for state in self.live]
        longest = max(len(row.tokens) for row in rows)
        ids = upload([row.tokens + [0] * (longest - len(row.tokens)) for row in rows], self.device)
        self.runner.reset(len(rows))
        self.runner.capture = self.proposer.capture if self.proposer else ()
        begin = self.clock.now()
        logits = self.runner.forward(ids, [len(row.tokens) for row in rows], last=True)
        with alone(logits.numel()):
            processed = [row.sampler.logits(logits[b]) for b, row in enumerate(rows)]
            best = [likeliest(p[0]) for p in processed]
            own = [self._choose(row, p[0], b[1]) for row, p, b in zip(rows, processed, best, strict=True)]
            sound = torch.stack([score.isfinite() for score, _ in best])
            chosen, fine = torch.stack(own).tolist(), sound.tolist()
        end = self.clock.now()
        outcomes = []
        for b, state in enumerate(self.live):
            state.header = state.header.replace(prefill_ms=1000 * (end - begin), ttft_ms=1000 * (end - started))
            outcome = Outcome(own=chosen[b], p_rows=processed[b], k=0) if fine[b] else None
            if outcome is not None:
                state.commit(outcome)
            outcomes.append(outcome)
        return self._record(outcomes, (0.0, 0.0, 0.0))

    def _choose(self, row: Row, processed: Tensor, best: Tensor) -> Tensor:
        if row.request.sampling.greedy:
            return best
        u = row.draws.take(1).to(self.device)[0]
        return draw(row.sampler.probs(processed[None])[0], u)

    @torch.inference_mode()
    def step(self) -> dict[int, Step]:
        """One round for every row that has not finished; the new steps by index of their request."""
        self.clock.start()
        self._let_go()
        rows = [state.row for state in self.live]
        choices = self._choose_lengths()
        ks = [choice.k for choice in choices]
        # A row's draws depend on its own draft length only: k to draft, k to accept, one for the target's token.
        draws = [
            _NO_DRAWS if row.request.sampling.greedy else row.draws.take(2 * k + 1)
            for row, k in zip(rows, ks, strict=True)
        ]
        proposal = self._propose(ks, draws)
        outcomes = self._verify(proposal, ks, draws)
        kept: list[Sequence[int]] = []
        for state, outcome in zip(self.live, outcomes, strict=True):
            if outcome is not None:
                state.commit(outcome)
            kept.append(() if outcome is None else outcome.path[: outcome.kept])
        self._roll_back(proposal, outcomes)
        if self.proposer is not None:
            self.proposer.commit(kept)
        times = self.clock.stop()
        for state, choice, outcome, nothing in zip(self.live, choices, outcomes, proposal.reasons, strict=True):
            if outcome is None:
                continue
            if not outcome.drafts:
                state.reason = outcome.k_reason or nothing or state.reason
            outcome.k_reason = outcome.k_reason or choice.reason
        if self.proposer is not None:
            self.lengths.observe(
                {s.index: Round(o.k, o.depth, o.kept) for s, o in zip(self.live, outcomes, strict=True) if o},
                max(ks),
                proposal.ids.shape[1] + 1,
                times,
            )
        return self._record(outcomes, times)

    def _let_go(self) -> None:
        """Take the rows that have finished out of the batch, so that nobody computes for them."""
        stay = [b for b, state in enumerate(self.live) if state.finish is None]
        if len(stay) == len(self.live):
            return
        self.live = [self.live[b] for b in stay]
        self.runner.select(stay)
        if self._context is not None and self.proposer is not None:
            self._context.rows[:] = [state.row for state in self.live]
            self.proposer.select(stay)

    def _choose_lengths(self) -> list[Choice]:
        if self.proposer is None:
            return [Choice(0)] * len(self.live)
        chosen = self.lengths.choose({state.index: state.left for state in self.live})
        return [chosen[state.index] for state in self.live]

    def _propose(self, ks: Sequence[int], draws: Sequence[Tensor]) -> Proposal:
        if self.proposer is None:
            return self._nothing(len(ks))
        with self.clock.span("draft"):
            if self._context is None:
                rows = [state.row for state in self.live]
                self._context = Context(self.runner, rows, self.runner.vocab_size, self.device)
                self.proposer.begin(self._context)
            width = max(ks)
            if width == 0:
                return self._nothing(len(ks))
            u = torch.zeros(len(ks), width, dtype=torch.float64)
            for b, (k, row_draws) in enumerate(zip(ks, draws, strict=True)):
                if len(row_draws):
                    u[b, :k] = row_draws[:k]
            return self.proposer.propose(ks, u)

    def _nothing(self, batch: int) -> Proposal:
        return Proposal.of_lists([[] for _ in range(batch)], self.device, [None] * batch)

    def _verify(self, proposal: Proposal, ks: Sequence[int], draws: Sequence[Tensor]) -> list[Outcome | None]:
        """Score all drafts in one pass and judge them. None for a row whose logits are not numbers."""
        rows = [state.row for state in self.live]
        last = upload([[row.tokens[-1]] for row in rows], self.device)
        ids = torch.cat([last, proposal.ids], 1)
        # The host only knows an upper bound of the counts; the rest is masked by the verdict.
        widths = [min(k, proposal.ids.shape[1]) + 1 for k in ks]
        with self.clock.span("verify"):
            logits = self.runner.forward(ids, widths if proposal.parents is None else None, parents=proposal.parents)
        with alone(logits.numel()):
            return judge(proposal, rows, ks, draws, logits)

    def _roll_back(self, proposal: Proposal, outcomes: Sequence[Outcome | None]) -> None:
        """Leave exactly the committed tokens but the newest in the target's cache."""
        if proposal.parents is not None and outcomes[0] is not None:
            start = len(self.live[0].row.tokens) - len(outcomes[0].emitted)
            self.runner.keep_path(0, start, outcomes[0].path[: outcomes[0].kept])
        self.runner.rollback(
            [min(len(s.row.tokens) - 1, at) for s, at in zip(self.live, self.runner.lengths, strict=True)]
        )

    # --- recording ---------------------------------------------------------------------------------------------

    def _record(self, outcomes: Sequence[Outcome | None], times: tuple[float, float, float]) -> dict[int, Step]:
        """Write the round down for every row; a row without an outcome ends here, and disturbs nobody."""
        steps: dict[int, Step] = {}
        for b, (state, outcome) in enumerate(zip(self.live, outcomes, strict=True)):
            if outcome is None:
                self.runner.wipe(b)
                state.end(FinishReason.ERROR, _not_numbers(state.row.emitted + 1))
                continue
            with alone(outcome.p_rows.numel()):
                steps[state.index] = state.record(outcome, self.decoder.tokens, times)
        self._note_paths()
        return steps

    def _paths_now(self) -> dict[str, str]:
        runners = {"target": self.runner, "draft": getattr(self.proposer, "runner", None)}
        return {role: path for role, runner in runners.items() if (path := getattr(runner, "path", ""))}

    def _note_paths(self) -> None:
        """Passes that turn out not to be recordable go on eagerly from there: the runs say so."""
        paths = self._paths_now()
        if paths == self._paths:
            return
        self._paths = paths
        found = {f"{role}_path": path for role, path in paths.items()}
        for role, owner in (("target", self), ("draft", self.proposer)):
            note = getattr(getattr(owner, "runner", None), "path_note", lambda: None)()
            if note:
                found[f"{role}_path_note"] = note
        for state in self.states:
            state.header = state.header.replace(versions={**state.header.versions, **found})


def _not_numbers(position: int) -> str:
    return (
        f"the target's logits at output token {position} are not numbers (NaN or infinite): "
        "nothing can be sampled from them; try dtype float32"
    )
