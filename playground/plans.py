"""Plans: which generations belong together, in which order, and what they come to. No Gradio, no threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from decoder.metrics import baseline_fits
from decoder.request import GenerationRequest
from decoder.trace import FinishReason, Run
from playground.events import Done, Planned


def plan_run(request: GenerationRequest, *, baseline: bool) -> list[Planned]:
    """A run and, if asked for and if it drafts, its baseline behind it."""
    plan = [Planned(request)]
    if baseline and request.proposer != "none":
        plan.append(Planned(request.baseline(), "baseline", "baseline", ("baseline",)))
    return plan


def plan_comparison(variants: Sequence[tuple[str, GenerationRequest]]) -> list[Planned]:
    """One baseline, then each variant. The variants must differ in nothing but who drafts, and how much."""
    baseline = Planned(variants[0][1].baseline(), "baseline", "baseline", ("baseline",))
    rest = [Planned(request, "run", title) for title, request in variants if request.proposer != "none"]
    return [baseline, *rest]


def conclude(
    plan: Sequence[Planned],
    ended: Mapping[int, Run],
    reasons: Mapping[int, str],
    link: Callable[[str, str], str | None],
    *,
    stopped: bool,
) -> Done:
    """Link the baseline to every run that it fits, and say why where there is none.

    ``ended`` and ``reasons`` (why one did not run) by index of the plan; ``link(run id, baseline id)`` keeps the link
    and says why it could not.
    """
    position = next((i for i, p in enumerate(plan) if p.role == "baseline"), None)
    baseline = ended.get(position) if position is not None else None
    if position is None:
        reason: str | None = "no baseline was asked for"
    elif baseline is None:
        reason = reasons.get(position, "it was not run")
    elif baseline.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        reason = "it was stopped" if baseline.finish_reason is FinishReason.CANCELLED else "it failed"
    else:
        reason = None
    runs = []
    unlinked: str | None = None
    for index, run in ended.items():
        if plan[index].role == "run" and baseline is not None and reason is None:
            misfit = baseline_fits(run, baseline)
            if misfit is None:
                unlinked = link(run.id, baseline.id) or unlinked
                run = run.replace(baseline_id=baseline.id)
            elif len(plan) == 2:
                reason = misfit
        if plan[index].role == "run":
            runs.append(run)
    return Done(tuple(runs), baseline, reason, stopped, unlinked)
