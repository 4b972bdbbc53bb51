"""The loop: prefill, then step() = propose -> verify -> commit -> roll back, until every row has stopped.

The engine knows nothing of who proposes. Only model time and what decoding needs is on the clock: writing the trace
(the five likeliest tokens, texts of drafts) and whatever the consumer does between two steps is not. The host waits for
the device once a step, when it reads the verdicts.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor

from decoder import metrics
from decoder.clock import Clock
from decoder.errors import RequestError
from decoder.proposers.base import Context, Proposal, Proposer, Row
from decoder.record import Outcome, write_step
from decoder.request import GenerationRequest
from decoder.sampling import Draws, Sampler, draw
from decoder.target import Runner
from decoder.text import TextStream, TokenText, encode_prompt
from decoder.trace import FinishReason, Run, Step
from decoder.verify import verify_greedy, verify_sampled, verify_tree_greedy, verify_tree_sampled


@dataclass(frozen=True)
class Target:
    """The model that decides, with what the engine must know of it. Tests build it around a table."""

    runner: Runner
    tokenizer: Any
    name: str
    eos_ids: frozenset[int]
    dtype: str = "float32"
    fingerprint: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    context_note: str = ""


def new_id() -> str:
    """A fresh run id."""
    return "r" + secrets.token_hex(6)


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """What computed a run."""
    from decoder import __version__

    return {
        "redline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass
class _RowState:
    """A row with everything that is needed to stop it and to write its trace."""

    row: Row
    text: TextStream
    limit: int
    """Most tokens it may emit."""
    stop_ids: frozenset[int]
    run: Run
    steps: list[Step] = field(default_factory=list)
    answer: str = ""
    finish: FinishReason | None = None
    error: str | None = None
    reason: str | None = None
    """Why the latest step without a draft had none."""


class SpeculativeDecoder:
    """A target with a proposer (None decodes plainly: the baseline)."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        *,
        draft: str | None = None,
        not_speculating: str | None = None,
        versions: dict[str, str] | None = None,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.draft = draft
        self.not_speculating = not_speculating
        self.tokens = TokenText(target.tokenizer)
        self._versions = dict(versions or {})

    @classmethod
    def load(
        cls, request: GenerationRequest, progress: Callable[[float, str], None] | None = None
    ) -> SpeculativeDecoder:
        """Load what ``request`` names (from this process's cache where it is there).

        ``progress(fraction, message)`` is told how far it is. Raises RedlineError subclasses with one sentence.
        """
        from decoder.assemble import assemble

        return assemble(request, progress)

    def stream(self, request: GenerationRequest) -> RunStream:
        """Check and tokenise ``request``; the result yields one Step per round. Raises RequestError before any work."""
        return RunStream(self, [request])

    def run(self, request: GenerationRequest) -> Run:
        """Decode to the end."""
        stream = self.stream(request)
        for _ in stream:
            pass
        return stream.run

    def remember(self, runs: Sequence[Sequence[int]]) -> None:
        """Token ids of earlier runs, for a request with ``suffix_earlier``; what is kept of them is recorded."""
        kept = self.proposer.remember(runs) if self.proposer is not None else ""
        if kept:
            self._versions["earlier_runs"] = kept

    def warm_up(self, request: GenerationRequest) -> None:
        """Decode a few tokens and forget them, so that no measured run pays for a first time."""
        short = request.replace(max_new_tokens=max(4, min(2 * (request.k + 1), 16)), ignore_eos=True)
        for _ in self.stream(short.replace(prompt="Hello, hello, hello.", stop=(), stop_ids=())):
            pass

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Token ids of the request's prompt; raises RequestError where it does not fit the context."""
        ids = encode_prompt(request, self.target.tokenizer, self.target.name)
        context = self.target.runner.context
        if len(ids) >= context:
            note = f" ({self.target.context_note})" if self.target.context_note else ""
            raise RequestError(
                f"the prompt has {len(ids):,} tokens and {self.target.name} takes at most {context - 1:,}{note}: "
                f"shorten it by {len(ids) - context + 1:,} tokens"
            )
        return ids

    def header(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> Run:
        """The Run as it is known before the first token."""
        versions = {**library_versions(), **self.target.versions, **self._versions}
        if self.proposer is not None and self.proposer.path():
            versions["draft_path"] = self.proposer.path()
        return Run(
            id=new_id(),
            request=request.to_json(),
            target=self.target.name,
            proposer=request.proposer,
            draft=self.draft,
            k=request.k,
            seed=request.sampling.seed,
            dtype=self.target.dtype,
            device=self.target.runner.device,
            versions=versions,
            fingerprint=self.target.fingerprint,
            prompt_ids=tuple(prompt_ids),
        )


class RunStream(Iterator[Step]):
    """One run in progress. Iterate for its steps; ``run`` is the Run so far; ``close()`` stops within a step."""

    def __init__(self, decoder: SpeculativeDecoder, requests: Sequence[GenerationRequest]) -> None:
        self._clock = Clock(decoder.target.runner.device)
        begin = self._clock.now()
        for request in requests:
            request.validate()
        self._decoding = Decoding(decoder, requests)
        # Checking and tokenising count for the first token; what the caller does before asking for it does not.
        self._prepared = self._clock.now() - begin
        self._closed = False

    def __iter__(self) -> RunStream:
        return self

    def __next__(self) -> Step:
        state = self._decoding.states[0]
        if self._closed or state.finish is not None:
            raise StopIteration
        try:
            if not state.steps:
                self._decoding.prefill(self._clock.now() - self._prepared)
            else:
                self._decoding.step()
        except (torch.OutOfMemoryError, MemoryError):
            state.finish, state.error = FinishReason.ERROR, "out of memory: use a shorter prompt or a smaller model"
        except KeyboardInterrupt:
            state.finish = FinishReason.CANCELLED
            raise
        except BaseException as error:
            # Whatever happens, the run keeps its steps and says why it ended.
            state.finish = FinishReason.ERROR
            state.error = f"{type(error).__name__}: {error}"
            raise
        if state.finish is FinishReason.ERROR:
            raise StopIteration
        return state.steps[-1]

    def close(self) -> None:
        """Stop. The run keeps what it has and is marked cancelled, unless it had ended already."""
        self._closed = True
        state = self._decoding.states[0]
        if state.finish is None:
            state.finish = FinishReason.CANCELLED

    @property
    def run(self) -> Run:
        """A frozen snapshot of the run so far."""
        return self._decoding.snapshot(0)


class Decoding:
    """B requests that decode together. Every list has an entry per row."""

    def __init__(self, decoder: SpeculativeDecoder, requests: Sequence[GenerationRequest]) -> None:
        self.decoder = decoder
        self.runner = decoder.target.runner
        self.device = self.runner.logits_device
        self.clock = Clock(self.runner.device)
        self.states = [self._new_row(request) for request in requests]

    def _new_row(self, request: GenerationRequest) -> _RowState:
        target = self.decoder.target
        ids = self.decoder.prompt_ids(request)
        sampler = Sampler(request.sampling, self.runner.vocab_size, ids, self.device)
        eos = frozenset() if request.ignore_eos else target.eos_ids
        return _RowState(
            row=Row(request, list(ids), len(ids), sampler, Draws(request.sampling.seed)),
            text=TextStream(self.decoder.tokens, ids),
            limit=min(request.max_new_tokens, self.runner.context - len(ids)),
            stop_ids=eos | frozenset(request.stop_ids),
            run=self.decoder.header(request, ids),
            reason=self.decoder.not_speculating,
        )

    # --- the two passes ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, started: float) -> None:
        """The prompt's pass, which gives the first token: step 0."""
        rows = [state.row for state in self.states]
        longest = max(len(row.tokens) for row in rows)
        ids = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows], device=self.device)
        self.runner.reset(len(rows))
        self.runner.capture = self.decoder.proposer.capture if self.decoder.proposer else ()
        begin = self.clock.now()
        logits = self.runner.forward(ids, [len(row.tokens) for row in rows], last=True)
        processed = [row.sampler.logits(logits[b]) for b, row in enumerate(rows)]
        first = torch.stack([self._choose(row, p[0]) for row, p in zip(rows, processed, strict=True)])
        sound = torch.stack([p.amax().isfinite() for p in processed])
        chosen, fine = first.tolist(), sound.tolist()
        end = self.clock.now()
        if self.decoder.proposer is not None:
            self.decoder.proposer.begin(Context(self.runner, rows, self.runner.vocab_size, self.device))
        for b, state in enumerate(self.states):
            prefill_ms = 1000 * (end - begin)
            state.run = state.run.replace(prefill_ms=prefill_ms, ttft_ms=1000 * (end - started))
            if not fine[b]:
                self._fail(state)
                continue
            outcome = Outcome(own=chosen[b], p_rows=processed[b], k=0)
            self._commit(state, outcome)
            self._record(state, outcome, (0.0, 0.0, 0.0))

    def _choose(self, row: Row, processed: Tensor) -> Tensor:
        if row.request.sampling.greedy:
            return processed.argmax()
        u = row.draws.take(1).to(self.device)[0]
        return draw(row.sampler.probs(processed[None])[0], u)

    @torch.inference_mode()
    def step(self) -> None:
        """One round for every row that has not stopped."""
        clock, proposer = self.clock, self.decoder.proposer
        clock.start()
        ks = [self._length(state) if proposer else 0 for state in self.states]
        width = max(ks)
        # A row's draws depend on its own draft length only: k to draft, k to accept, one for the target's token.
        draws = [state.row.draws.take(2 * k + 1) for state, k in zip(self.states, ks, strict=True)]
        if proposer is not None and width > 0:
            u = torch.zeros(len(ks), width, dtype=torch.float64)
            for b, (k, row_draws) in enumerate(zip(ks, draws, strict=True)):
                u[b, :k] = row_draws[:k]
            with clock.span("draft"):
                proposal = proposer.propose(ks, u)
        else:
            proposal = Proposal.of_lists([[] for _ in ks], self.device, [None] * len(ks))
        outcomes = self._verify(proposal, ks, draws)
        kept: list[Sequence[int]] = []
        for b, state in enumerate(self.states):
            outcome = outcomes[b]
            if state.finish is None and outcome is None:
                self._fail(state)
            if state.finish is not None or outcome is None:
                kept.append(())
                continue
            self._commit(state, outcome)
            kept.append(outcome.path[: outcome.kept])
        self._roll_back(proposal, outcomes)
        if proposer is not None:
            proposer.commit(kept)
        times = clock.stop()
        for b, state in enumerate(self.states):
            outcome = outcomes[b]
            if outcome is not None and state.finish is None:
                if not outcome.drafts and proposal.reasons[b]:
                    state.reason = proposal.reasons[b]
                self._record(state, outcome, times)

    def _length(self, state: _RowState) -> int:
        """Draft length of this step: never more than could still be emitted before the target's own token."""
        if state.finish is not None:
            return 0
        left = state.limit - len(state.row.tokens) + state.row.prompt_length
        return max(0, min(state.row.request.k, left - 1))

    # --- verification ------------------------------------------------------------------------------------------

    def _verify(self, proposal: Proposal, ks: Sequence[int], draws: Sequence[Tensor]) -> list[Outcome | None]:
        """Score all drafts in one pass and judge them. None for a row whose logits are not numbers."""
        rows = [state.row for state in self.states]
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        ids = torch.cat([last, proposal.ids], 1)
        # The host only knows an upper bound of the counts; the rest is masked by the verdict.
        widths = [min(k, proposal.ids.shape[1]) + 1 for k in ks]
        with self.clock.span("verify"):
            logits = self.runner.forward(ids, widths, parents=proposal.parents)
        processed = [row.sampler.logits(logits[b], proposal.ids[b], proposal.parents) for b, row in enumerate(rows)]
        if proposal.parents is not None:
            return [self._judge_tree(proposal, processed[0], draws[0])]
        greedy = [row.request.sampling.greedy for row in rows]
        probs: list[Tensor | None] = [
            None if g else row.sampler.probs(p) for row, p, g in zip(rows, processed, greedy, strict=True)
        ]
        columns = []
        for b in range(len(rows)):
            columns.append(self._judge_chain(proposal, b, ks[b], processed[b], probs[b], draws[b]))
        table = torch.stack(columns).cpu()  # the one wait of the step
        return [self._read(table[b], proposal, b, processed[b], probs[b], draws[b], ks[b]) for b in range(len(rows))]

    def _judge_chain(
        self, proposal: Proposal, b: int, k: int, processed: Tensor, probs: Tensor | None, draws: Tensor
    ) -> Tensor:
        """Row b's verdict as one float64 vector: sound, count, accepted, token, then K ids and K acceptance
        probabilities; ids are far below 2^53, so nothing is rounded."""
        width = proposal.ids.shape[1]
        drafts, counts = proposal.ids[b : b + 1], proposal.counts[b : b + 1]
        sound = processed.amax(-1)[: k + 1].isfinite().all()
        if probs is None:
            verdict = verify_greedy(drafts, counts, processed.argmax(-1)[None])
        else:
            u = torch.ones(1, width, dtype=torch.float64)
            u[0, : min(k, width)] = draws[k : 2 * k][:width]
            q = None if proposal.q is None else proposal.q[b : b + 1]
            verdict = verify_sampled(drafts, counts, probs[None], q, u.to(self.device), draws[2 * k :].to(self.device))
        head = torch.stack(
            [sound.double(), counts[0].double(), verdict.accepted[0].double(), verdict.token[0].double()]
        )
        return torch.cat([head, drafts[0].double(), verdict.accept_prob[0].double()])

    def _read(
        self,
        vector: Tensor,
        proposal: Proposal,
        b: int,
        processed: Tensor,
        probs: Tensor | None,
        draws: Tensor,
        k: int,
    ) -> Outcome | None:
        values = vector.tolist()
        width = proposal.ids.shape[1]
        if not values[0]:
            return None
        count, accepted, token = int(values[1]), int(values[2]), int(values[3])
        drafts = [int(v) for v in values[4 : 4 + count]]
        return Outcome(
            own=token,
            k=k,
            drafts=drafts,
            path=list(range(accepted)),
            tested={i: (None, values[4 + width + i]) for i in range(min(accepted + 1, count))},
            p_rows=processed,
            probs=probs,
            q_rows=None if proposal.q is None else proposal.q[b],
            u=None if probs is None else draws[k : 2 * k].tolist(),
        )

    def _judge_tree(self, proposal: Proposal, processed: Tensor, draws: Tensor) -> Outcome | None:
        state = self.states[0]
        parents = list(proposal.parents or ())
        drafts = [int(i) for i in proposal.ids[0].tolist()]
        if not bool(processed.amax(-1).isfinite().all()):
            return None
        k = (len(draws) - 1) // 2
        if state.row.request.sampling.greedy:
            verdict = verify_tree_greedy(drafts, parents, processed.argmax(-1).tolist())
            probs, u = None, None
        else:
            probs = state.row.sampler.probs(processed)
            # A tree holds more nodes than k; further draws come from the same row's generator.
            u = state.row.draws.take(len(drafts)).tolist()
            q = None if proposal.q is None else proposal.q[0]
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
            q_rows=None if proposal.q is None else proposal.q[0],
            u=u,
            residual=verdict.residual,
        )

    def _roll_back(self, proposal: Proposal, outcomes: Sequence[Outcome | None]) -> None:
        """Leave exactly the committed tokens but the newest in the target's cache."""
        if proposal.parents is not None and outcomes[0] is not None:
            state = self.states[0]
            start = len(state.row.tokens) - len(outcomes[0].emitted)
            self.runner.keep_path(0, start, outcomes[0].path[: outcomes[0].kept])
        lengths = []
        for b, state in enumerate(self.states):
            lengths.append(min(len(state.row.tokens) - 1, self.runner.lengths[b]))
        self.runner.rollback(lengths)

    # --- emitting and recording --------------------------------------------------------------------------------

    def _commit(self, state: _RowState, outcome: Outcome) -> None:
        """Decide what of ``outcome`` reaches the output, and append it."""
        outcome.prepare(state.text, state.row, state.limit, state.stop_ids, state.row.request.stop, state.answer)
        state.row.tokens.extend(outcome.emitted)
        state.row.sampler.commit(outcome.emitted)

    def _record(self, state: _RowState, outcome: Outcome, times: tuple[float, float, float]) -> None:
        step = write_step(len(state.steps), outcome, self.decoder.tokens, state.row.sampler, times)
        state.steps.append(step)
        state.answer = outcome.answer
        state.finish = outcome.finish

    def _fail(self, state: _RowState) -> None:
        state.finish = FinishReason.ERROR
        state.error = (
            f"the target's logits at output token {len(state.row.output) + 1} are not numbers (NaN or infinite): "
            "nothing can be sampled from them; try dtype float32"
        )

    def snapshot(self, b: int) -> Run:
        """Row b's Run so far."""
        state = self.states[b]
        derived = metrics.derive(state.steps, not_speculating=self._not_speculating(state))
        return state.run.replace(
            output_ids=tuple(state.row.output),
            text=state.answer,
            finish_reason=state.finish,
            error=state.error,
            steps=tuple(state.steps),
            decode_ms=sum(s.draft_ms + s.verify_ms + s.overhead_ms for s in state.steps),
            metrics=derived,
        )

    def _not_speculating(self, state: _RowState) -> str | None:
        """Why a run that should speculate has drafted nothing; None when it has, or when it should not."""
        if state.row.request.proposer == "none" or any(step.drafts for step in state.steps):
            return None
        if state.reason:
            return state.reason
        if state.finish is None:
            return None
        if len(state.row.output) <= 2:
            return "the answer was over before anything could be drafted"
        return "nothing was drafted"
