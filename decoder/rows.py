"""A row of a batch: one request with everything that is needed to stop it and to write its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from decoder import metrics
from decoder.proposers.base import Row
from decoder.record import Outcome, write_step
from decoder.text import Answer, TextStream, TokenText
from decoder.trace import FinishReason, Run, Step


@dataclass(eq=False)
class RowState:
    """What the engine keeps of one request while it decodes."""

    index: int
    """Of its request."""
    row: Row
    text: TextStream
    answer: Answer
    limit: int
    """Most tokens it may emit."""
    stop_ids: frozenset[int]
    header: Run
    """The Run as it was known before the first token; times of the prefill are filled in."""
    steps: list[Step] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    reason: str | None = None
    """Why the latest step without a draft had none."""

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.row.emitted

    def commit(self, outcome: Outcome) -> None:
        """Decide what of ``outcome`` reaches the output, and append it."""
        outcome.prepare(self.text, self.answer.tail, self.left, self.stop_ids, self.row.request)
        self.row.tokens.extend(outcome.emitted)
        self.row.sampler.commit(outcome.emitted)

    def record(self, outcome: Outcome, tokens: TokenText, times: tuple[float, float, float]) -> Step:
        """Write the step down; ``times`` are draft, verify and overhead in ms."""
        step = write_step(len(self.steps), outcome, tokens, self.row.sampler, times)
        self.steps.append(step)
        self.answer.take(outcome.added, outcome.removed)
        self.finish = outcome.finish
        return step

    def end(self, finish: FinishReason, error: str | None = None) -> None:
        """End a row that goes on; one that has ended stays as it is."""
        if self.finish is None:
            self.finish, self.error = finish, error

    def snapshot(self) -> Run:
        """The Run so far: exactly what its recorded steps say, also when an error came in the middle of one."""
        return self.header.replace(
            output_ids=tuple(token.id for step in self.steps for token in step.emitted),
            text=str(self.answer),
            finish_reason=self.finish,
            error=self.error,
            steps=tuple(self.steps),
            decode_ms=sum(s.draft_ms + s.verify_ms + s.overhead_ms for s in self.steps),
            metrics=metrics.derive(self.steps, not_speculating=self._not_speculating(self.steps)),
        )

    def _not_speculating(self, steps: Sequence[Step]) -> str | None:
        """Why a run that should speculate has drafted nothing; None when it has, or when it should not."""
        if self.row.request.proposer == "none" or any(step.drafts for step in steps):
            return None
        if self.reason:
            return self.reason
        if self.finish is None:
            return None
        if self.row.emitted <= 2:
            return "the answer was over before anything could be drafted"
        return "nothing was drafted"
