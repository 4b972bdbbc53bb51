"""Several runs of one prompt, to be compared: what to run, and how far it is. No Gradio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decoder.errors import RequestError
from decoder.request import GenerationRequest
from decoder.trace import Run
from playground.events import Begun, Done, Ended, Failed, ModelEvent, Planned, Stepped, Waiting
from playground.notes import Kind


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a comparison is. ``runs`` is given at its end: what can be compared, the baseline first."""

    text: str
    fraction: float | None = None
    kind: Kind = "busy"
    runs: tuple[Run, ...] | None = None


def by_length(request: GenerationRequest, lengths: Sequence[int]) -> list[tuple[str, GenerationRequest]]:
    """The request with each draft length."""
    if request.proposer == "none":
        raise RequestError("choose a proposer in the Playground first: without one there is no draft length to compare")
    return [(f"k = {k}", request.replace(k=k)) for k in lengths]


def progress(plan: Sequence[Planned], events: Iterator[ModelEvent], refused: Sequence[str] = ()) -> Iterator[Progress]:
    """Events of a comparison as progress: which run, how far, and the share of the whole.

    ``refused`` are sentences on what was asked for and could not even be planned: the end repeats them.
    """
    tokens = 0
    failed: list[str] = list(refused)
    ended: dict[int, Run] = {}
    unsaved: str | None = None
    for event in events:
        match event:
            case Waiting(message, _):
                yield Progress(message, len(ended) / len(plan))
            case Begun(index, _):
                tokens = 0
                yield Progress(f"{_place(plan, index)}: reading the prompt", index / len(plan))
            case Stepped(index, steps, _):
                tokens += sum(len(step.emitted) for step in steps)
                limit = plan[index].request.max_new_tokens
                share = (index + min(1.0, tokens / limit)) / len(plan)
                yield Progress(f"{_place(plan, index)}: {tokens} of at most {limit} tokens", share)
            case Ended(index, run, problem):
                ended[index] = run
                unsaved = unsaved or problem
            case Failed(index, sentence):
                failed.append(f"{plan[index].title}: {sentence}")
            case Done(runs, baseline, _, stopped, unlinked):
                everything = ((baseline,) if baseline and baseline.output_ids else ()) + runs
                failed += [f"{_drafter(run)} drafted nothing: {why}" for run in runs if (why := _idle(run))]
                yield _end(everything, failed, unsaved or unlinked, stopped)


def _idle(run: Run) -> str:
    """Why a run with a proposer decoded plainly, or ""."""
    reason = run.metrics.get("not_speculating") if run.proposer != "none" else None
    return str(reason) if reason else ""


def _drafter(run: Run) -> str:
    return run.draft or run.proposer


def _place(plan: Sequence[Planned], index: int) -> str:
    return f"{index + 1} of {len(plan)}, {plan[index].title}"


def _end(runs: tuple[Run, ...], failed: Sequence[str], unsaved: str | None, stopped: bool) -> Progress:
    shown = tuple(run for run in runs if run.output_ids)
    if unsaved:
        return Progress(
            f"not every run could be saved: {unsaved}. Save again, or download them before you leave",
            None,
            "error",
            shown,
        )
    if failed:
        return Progress("; ".join(failed), None, "error" if not shown else "warning", shown)
    if stopped:
        return Progress(f"stopped: {len(shown)} runs are kept", None, "info", shown)
    return Progress(f"done: {len(shown)} runs", None, "good", shown)
