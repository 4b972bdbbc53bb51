"""Several runs of one prompt, to be compared: what to run, and how far it is. No Gradio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decoder import catalog
from decoder.errors import RequestError
from decoder.request import GenerationRequest
from decoder.trace import Run
from playground import pairs
from playground.events import Begun, Done, Ended, Failed, ModelEvent, Planned, Stepped, Waiting
from playground.notes import Kind

DRAFT_PREFIX = "draft-model:"


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


def proposer_options(target: str) -> list[tuple[str, str]]:
    """What can be compared for ``target``, as label and value: proposers, and each draft that fits."""
    options: list[tuple[str, str]] = []
    for entry in catalog.proposers():
        if entry.name == "draft-model":
            drafts = pairs.draft_options(target, entry.name, read=False)
            options += [
                (f"Draft model: {d.name}", DRAFT_PREFIX + d.name) for d in drafts if d.state in ("ready", "fetch")
            ]
        elif entry.name != "none":
            options.append((entry.title, entry.name))
    return options


def progress(plan: Sequence[Planned], events: Iterator[ModelEvent]) -> Iterator[Progress]:
    """Events of a comparison as progress: which run, how far, and the share of the whole."""
    tokens = 0
    failed: list[str] = []
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
                yield _end(everything, failed, unsaved or unlinked, stopped)


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
