"""The generation that is going on: what must be closed and saved, whatever happens."""

from __future__ import annotations

import logging

from decoder.metrics import derive
from decoder.trace import FinishReason, Run, Step
from playground.model_thread import Stream, first_line
from playground.saving import RunSaver

log = logging.getLogger(__name__)


class Active:
    """A stream, who saves it, and the steps so far. ``plan`` holds the ids of all runs of its plan."""

    def __init__(self, stream: Stream, saver: RunSaver, plan: list[str]) -> None:
        self.stream = stream
        self.saver = saver
        self.plan = plan
        self.steps: list[Step] = []
        self.handed_over = 0
        self.crash: str | None = None
        self.left = False
        """True once somebody settles it because nobody watches any more."""

    def take(self) -> list[Step]:
        """The steps that were not handed over yet."""
        fresh, self.handed_over = self.steps[self.handed_over :], len(self.steps)
        return fresh

    def final(self) -> Run:
        """The run as it stands, with a finish reason."""
        try:
            run = self.stream.run
        except Exception as error:
            log.exception("run %s cannot be read: its steps are kept", self.saver.run.id)
            self.crash = self.crash or internal(error)
            run = self._rebuilt()
        if self.crash is not None:
            return run.replace(finish_reason=FinishReason.ERROR, error=run.error or self.crash)
        return run if run.finish_reason else run.replace(finish_reason=FinishReason.CANCELLED)

    def _rebuilt(self) -> Run:
        emitted = [token for step in self.steps for token in step.emitted]
        numbers = derive(self.steps)
        return self.saver.run.replace(
            steps=tuple(self.steps),
            output_ids=tuple(token.id for token in emitted),
            text="".join(token.text for token in emitted),
            decode_ms=numbers["decode_ms"],
            metrics=numbers,
        )


def internal(error: BaseException) -> str:
    """A mistake of the program, not of the visitor, in one sentence."""
    said = first_line(error)
    return f"the run stopped on an internal error ({type(error).__name__}{': ' + said if said else ''})"
