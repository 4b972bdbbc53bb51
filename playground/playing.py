"""A run as the Playground shows it: events of the model service turned into feed text and sentences.

Pure Python, so that the whole way from a ticket to what the page shows can be tested with a fake decoder.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from decoder.request import GenerationRequest
from decoder.trace import FinishReason, Run
from playground import feed
from playground.events import Begun, Done, Ended, Failed, ModelEvent, Planned, Stepped, Waiting
from playground.notes import Kind
from playground.saving import Label

_numbers = itertools.count(1)
_seqs = itertools.count(int(time.time()))


def next_seq() -> int:
    """A number that no other feed of this process has: it tells the browser that another run begins."""
    return next(_seqs)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a visitor asked for and has not got yet. ``refused``: sentences on the part of it that cannot be run;
    ``number`` makes every click a new one."""

    plan: tuple[Planned, ...]
    label: Label
    refused: tuple[str, ...] = ()
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def request(self) -> GenerationRequest:
        """The request that the page shows."""
        return self.plan[0].request


@dataclass(frozen=True, slots=True)
class Frame:
    """What to show now. ``feed`` None leaves the feed as it is; ``finished`` is set when the run is complete."""

    feed: str | None
    text: str
    kind: Kind = "busy"
    fraction: float | None = None
    run: Run | None = None
    baseline: Run | None = None
    finished: bool = False
    unsaved: bool = False


def frames(ticket: Ticket, events: Iterator[ModelEvent]) -> Iterator[Frame]:
    """Frames for the first generation of the ticket's plan; a baseline behind it shows as progress."""
    text = ""
    run: Run | None = None
    tokens = 0
    failure: str | None = None
    problems: dict[int, str] = {}
    limit = ticket.request.max_new_tokens
    for event in events:
        match event:
            case Waiting(message, fraction):
                yield Frame(None, message, fraction=fraction)
            case Begun(0, begun):
                text = feed.begin_line(
                    begun, {"author": ticket.label.author, "name": ticket.label.name}, True, next_seq()
                )
                yield Frame(text, "reading the prompt", run=begun)
            case Begun():
                # Shown before the baseline's first token is timed, as for the run itself: both share the machine alike.
                yield Frame(None, "measuring the baseline: reading the prompt", fraction=0.0)
            case Stepped(0, steps, prefill):
                text += "".join(feed.step_line(step, prefill if step.index == 0 else None) for step in steps)
                tokens += sum(len(step.emitted) for step in steps)
                yield Frame(feed.tail(text), f"{tokens} of at most {limit} tokens", fraction=tokens / limit)
            case Ended(0, ended, problem):
                run = ended
                if problem:
                    problems[0] = f"this run could not be saved ({problem})"
                more = len(ticket.plan) > 1 and ended.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
                text += feed.end_line(ended, None, "the baseline is being measured" if more else None)
                yield Frame(
                    text, "measuring the baseline: the same prompt with the proposer off" if more else "", run=run
                )
                tokens = 0
            case Stepped(_, steps, _):
                tokens += sum(len(step.emitted) for step in steps)
                total = len(run.output_ids) if run else limit
                yield Frame(
                    None, f"measuring the baseline: {tokens} of about {total} tokens", fraction=tokens / max(1, total)
                )
            case Ended(index, _, problem):
                if problem:
                    problems[index] = f"the baseline of this run could not be saved ({problem})"
            case Failed(index, sentence):
                failure = sentence if index == 0 else f"the baseline could not be run: {sentence}"
            case Done(runs, baseline, reason, stopped, unlinked):
                unsaved = next((problems[index] for index in sorted(problems)), unlinked)
                yield _last(ticket, text, runs[0] if runs else run, baseline, reason, stopped, failure, unsaved)


def _last(
    ticket: Ticket,
    text: str,
    run: Run | None,
    baseline: Run | None,
    reason: str | None,
    stopped: bool,
    failure: str | None,
    unsaved: str | None,
) -> Frame:
    if run is None:
        said: tuple[str, Kind] = (failure, "error") if failure else ("stopped before it began", "info")
        return Frame(None, *said, finished=True)
    if len(ticket.plan) > 1:
        # The last end line counts: now with the baseline, or with the reason why there is none.
        text += feed.end_line(run, baseline if reason is None else None, reason)
    said = outcome(run)
    if unsaved:
        said = (f"{unsaved}: save again, or download it before you leave this page", "error")
    elif failure:
        said = (failure, "error" if run.finish_reason is FinishReason.ERROR else "warning")
    elif stopped and run.finish_reason is not FinishReason.CANCELLED:
        said = ("stopped while the baseline was measured: the run is kept, without a speed-up", "info")
    return Frame(text, *said, run=run, baseline=baseline, finished=True, unsaved=unsaved is not None)


def outcome(run: Run) -> tuple[str, Kind]:
    """How a run ended, in words."""
    tokens = len(run.output_ids)
    match run.finish_reason:
        case FinishReason.ERROR:
            kept = f" The {tokens} tokens before it are kept." if tokens else ""
            return f"{run.error or 'the run failed'}.{kept}".replace("..", "."), "error"
        case FinishReason.CANCELLED:
            return f"stopped after {tokens} tokens; they are kept", "info"
        case None:
            return f"this run was interrupted after {tokens} tokens: the program that wrote it ended", "warning"
    reason = run.metrics.get("not_speculating") if isinstance(run.metrics, dict) else None
    if reason:
        return f"not speculating: {reason}", "warning"
    if run.finish_reason is FinishReason.LENGTH:
        return f"done: {tokens} tokens, the most that was allowed", "good"
    return f"done: {tokens} tokens", "good"
