"""Pure functions from traces to the numbers that people argue about. Times in milliseconds, rates in [0, 1].

Names and definitions of the acceptance metrics are vLLM's (per-request speculative decoding metrics); the formulas
for expected tokens and speed-up are those of Leviathan et al., arXiv 2211.17192. Nothing here is estimated: a
speed-up comes from two measured runs, and where a number has no meaning it is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decoder.trace import Run, Step, Verdict


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How the drafts of one or many runs fared. Steps without a draft are ``num_plain_steps``."""

    num_spec_steps: int
    num_plain_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_rejected_draft_tokens: int
    num_untested_draft_tokens: int
    draft_acceptance_rate: float | None
    """accepted / drafted; None when nothing was drafted."""
    mean_acceptance_length: float | None
    """1 + accepted / num_spec_steps; None when no step drafted."""
    acceptance_histogram: tuple[int, ...]
    """Entry n counts the drafting steps that accepted exactly n draft tokens."""
    acceptance_per_position: tuple[float, ...]
    """Entry i is the share of drafting steps whose draft at depth i (0 = first) was accepted, as vLLM counts it."""
    per_step_accepted: tuple[int, ...]
    per_step_drafted: tuple[int, ...]


def _depths(step: Step) -> list[int]:
    depths: list[int] = []
    for draft in step.drafts:
        depths.append(0 if draft.parent is None else depths[draft.parent] + 1)
    return depths


def acceptance(steps: Iterable[Step]) -> Acceptance:
    """Acceptance metrics over ``steps``; step 0 (the token of the prefill) counts as neither kind of step."""
    accepted_per_step: list[int] = []
    drafted_per_step: list[int] = []
    at_depth: list[int] = []
    plain = drafted = accepted = rejected = 0
    for step in steps:
        if not step.drafts:
            plain += step.index > 0
            continue
        n = step.num_accepted
        accepted_per_step.append(n)
        drafted_per_step.append(len(step.drafts))
        drafted += len(step.drafts)
        accepted += n
        rejected += sum(d.verdict is Verdict.REJECTED for d in step.drafts)
        for depth, draft in zip(_depths(step), step.drafts, strict=True):
            at_depth.extend([0] * (depth + 1 - len(at_depth)))
            at_depth[depth] += draft.verdict is Verdict.ACCEPTED
    spec = len(accepted_per_step)
    histogram = [0] * (len(at_depth) + 1) if spec else []
    for n in accepted_per_step:
        histogram[n] += 1
    return Acceptance(
        num_spec_steps=spec,
        num_plain_steps=plain,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_rejected_draft_tokens=rejected,
        num_untested_draft_tokens=drafted - accepted - rejected,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / spec if spec else None,
        acceptance_histogram=tuple(histogram),
        acceptance_per_position=tuple(count / spec for count in at_depth),
        per_step_accepted=tuple(accepted_per_step),
        per_step_drafted=tuple(drafted_per_step),
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the decode time of a run went. Sums are over the steps after the first token.

    In a batch (``batch_size`` above 1) these are the times of shared rounds: what the reader of this run waited for its
    tokens, not what the run cost the machine. The batch's own speed is ``batch_timing``.
    """

    num_decode_steps: int
    num_decode_tokens: int
    """Tokens emitted after the first one, which the prefill gave."""
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    decode_ms: float
    ms_per_token: float | None
    tokens_per_second: float | None
    """Decode speed: 1000 * num_decode_tokens / decode_ms. Prefill is not part of it."""
    tokens_per_step: float | None
    """Tokens committed per decode step of the whole run, drafting or not, corrections and bonus tokens included."""


def timing(steps: Sequence[Step]) -> Timing:
    """Time split over ``steps``."""
    later = [s for s in steps if s.index > 0]
    tokens = sum(len(s.emitted) for s in later)
    draft = sum(s.draft_ms for s in later)
    verify = sum(s.verify_ms for s in later)
    overhead = sum(s.overhead_ms for s in later)
    total = draft + verify + overhead
    return Timing(
        num_decode_steps=len(later),
        num_decode_tokens=tokens,
        draft_ms=draft,
        verify_ms=verify,
        overhead_ms=overhead,
        decode_ms=total,
        ms_per_token=total / tokens if tokens else None,
        tokens_per_second=1000 * tokens / total if tokens and total > 0 else None,
        tokens_per_step=tokens / len(later) if later else None,
    )


def batch_size(run: Run) -> int:
    """How many requests decoded together with this one, itself included."""
    noted = run.versions.get("batch", "1")
    return int(noted) if noted.isdecimal() else 1


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """Speed of requests that decoded together, over the rounds after the prefill."""

    rounds: int
    tokens: int
    """Emitted by all rows."""
    decode_ms: float
    """Each round counted once, however many rows took part."""
    tokens_per_second: float | None
    """Of all rows together."""
    rows_alive: float | None
    """Mean number of rows that took part in a round."""


def batch_timing(runs: Sequence[Run]) -> BatchTiming:
    """The batch's own numbers from the Runs of ``SpeculativeDecoder.generate``.

    Every row takes part in each round until it ends, so that step n of every run is round n.
    """
    rounds = max((len(run.steps) for run in runs), default=1) - 1
    longest = max(runs, key=lambda run: len(run.steps), default=None)
    decode_ms = timing(longest.steps).decode_ms if longest else 0.0
    tokens = sum(len(step.emitted) for run in runs for step in run.steps[1:])
    alive = sum(max(0, len(run.steps) - 1) for run in runs)
    return BatchTiming(
        rounds=max(0, rounds),
        tokens=tokens,
        decode_ms=decode_ms,
        tokens_per_second=1000 * tokens / decode_ms if tokens and decode_ms > 0 else None,
        rows_alive=alive / rounds if rounds > 0 else None,
    )


def derive(steps: Sequence[Step], *, not_speculating: str | None = None) -> dict[str, Any]:
    """The ``metrics`` of a Run: acceptance and timing as one JSON-ready dict.

    ``not_speculating`` is the reason why a run with a proposer drafted nothing (None when it drafted, or when the
    proposer was none).
    """
    result: dict[str, Any] = {}
    for part in (acceptance(steps), timing(steps)):
        for name, value in asdict(part).items():
            result[name] = list(value) if isinstance(value, tuple) else value
    result["not_speculating"] = not_speculating
    return result


@dataclass(frozen=True, slots=True)
class Pooled:
    """Acceptance over several runs: pooled by drafted tokens, and each run's own rate beside it."""

    pooled: Acceptance
    per_run: Mapping[str, float | None]


def pool(runs: Sequence[Run]) -> Pooled:
    """Pool by tokens and steps, so that a rate is never a mean of means."""
    steps = [step for run in runs for step in run.steps]
    return Pooled(
        pooled=acceptance(steps),
        per_run={run.id: acceptance(run.steps).draft_acceptance_rate for run in runs},
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """(draft + verify + overhead) / tokens committed, against the baseline's time per token; all per decode step."""

    draft_ms: float
    verify_ms: float
    overhead_ms: float
    tokens_per_step: float
    ms_per_token: float
    baseline_ms_per_token: float
    speedup: float
    """baseline_ms_per_token / ms_per_token, both measured."""
    pays: bool
    blame: str | None
    """Which term is to blame when it does not pay: acceptance, draft, verify or overhead."""
    sentence: str


def baseline_fits(run: Run, baseline: Run) -> str | None:
    """Why ``baseline`` cannot be the baseline of ``run``, or None when it can.

    A speed-up compares one thing only: the proposer. Prompt, seed, sampling, target weights, dtype and device are held
    fixed.
    """
    pairs: list[tuple[str, Any, Any]] = [
        ("target", run.target, baseline.target),
        ("target weights", run.fingerprint, baseline.fingerprint),
        ("dtype", run.dtype, baseline.dtype),
        ("device", run.device, baseline.device),
        ("path of the passes", run.versions.get("target_path"), baseline.versions.get("target_path")),
        ("prompt", run.prompt_ids, baseline.prompt_ids),
        ("sampling", run.request.get("sampling"), baseline.request.get("sampling")),
    ]
    fields = ("max_new_tokens", "stop", "stop_ids", "ignore_eos")
    pairs += [(name, run.request.get(name), baseline.request.get(name)) for name in fields]
    for name, ours, theirs in pairs:
        if ours != theirs:
            return f"{name} differs"
    if batch_size(run) > 1 or batch_size(baseline) > 1:
        return "times of requests that decoded together are shared: a batch is compared as a whole"
    if run.proposer != "none" and not any(step.drafts for step in run.steps):
        return "this run did not speculate"
    if baseline.proposer != "none":
        return f"it drafted itself ({baseline.proposer})"
    if timing(baseline.steps).ms_per_token is None:
        return "it has no decoded token"
    return None


def break_even(run: Run, baseline: Run | None) -> BreakEven | None:
    """Does speculation pay in ``run``? None without a fitting baseline or without a decoded token."""
    if baseline is None or baseline_fits(run, baseline) is not None:
        return None
    ours = timing(run.steps)
    base = timing(baseline.steps).ms_per_token
    if ours.ms_per_token is None or ours.ms_per_token <= 0 or not base or ours.tokens_per_step is None:
        return None
    steps = ours.num_decode_steps
    draft, verify, overhead = ours.draft_ms / steps, ours.verify_ms / steps, ours.overhead_ms / steps
    pays = ours.ms_per_token < base
    saved = max(0.0, ours.tokens_per_step - 1)
    blame = None if pays else _blame(draft, verify, overhead, saved, base)
    if pays:
        sentence = f"Pays: {ours.ms_per_token:.1f} ms per token against {base:.1f} ms."
    else:
        sentence = f"Does not pay: {ours.ms_per_token:.1f} ms per token against {base:.1f} ms. " + _blame_sentence(
            blame or "", draft, verify, overhead, saved, base
        )
    return BreakEven(
        draft_ms=draft,
        verify_ms=verify,
        overhead_ms=overhead,
        tokens_per_step=ours.tokens_per_step,
        ms_per_token=ours.ms_per_token,
        baseline_ms_per_token=base,
        speedup=base / ours.ms_per_token,
        pays=pays,
        blame=blame,
        sentence=sentence,
    )


def _blame(draft: float, verify: float, overhead: float, saved: float, base: float) -> str:
    """The largest of what a step costs beyond one plain token; acceptance when even half a token would have paid."""
    extra = {"draft": draft, "verify": verify - base, "overhead": overhead}
    if saved < 0.5 and sum(extra.values()) < 0.5 * base:
        return "acceptance"
    return max(extra, key=lambda name: extra[name])


def _blame_sentence(blame: str, draft: float, verify: float, overhead: float, saved: float, base: float) -> str:
    gain = f"saves {saved:.1f} tokens ({saved * base:.1f} ms)"
    if blame == "draft":
        return f"Drafting costs {draft:.1f} ms a step and {gain}."
    if blame == "verify":
        return f"Verifying a step costs {verify:.1f} ms, {verify - base:.1f} ms more than one plain token, and {gain}."
    if blame == "overhead":
        return f"Overhead costs {overhead:.1f} ms a step and drafting {gain}."
    return f"Too few draft tokens were accepted: a step {gain}, less than the little it costs."


def floor_ms(run: Run) -> float | None:
    """Milliseconds that reading the target's weights once takes, or None where that was not measured with the run.

    A token that is decoded alone cannot take less; several that are verified together share one reading.
    """
    try:
        size, speed = (float(run.versions[name]) for name in ("target_bytes_per_token", "read_bytes_per_second"))
    except (KeyError, ValueError):
        return None
    return 1000 * size / speed if 0 < size < math.inf and 0 < speed < math.inf else None


def speedup(run: Run, baseline: Run | None) -> float | None:
    """Measured speed-up of decoding, or None where there is no fitting baseline."""
    result = break_even(run, baseline)
    return result.speedup if result else None


def expected_tokens(alpha: float, k: int) -> float:
    """Expected tokens per step at i.i.d. acceptance ``alpha``: (1 - alpha^(k+1)) / (1 - alpha), eq. 1 of the paper."""
    if alpha >= 1:
        return float(k + 1)
    return (1 - alpha ** (k + 1)) / (1 - alpha)


def expected_speedup(alpha: float, k: int, c: float, v: float = 1.0, h: float = 0.0) -> float:
    """Expected speed-up E / (k c + v + h); c, v, h are draft step, verify and overhead in target steps."""
    return expected_tokens(alpha, k) / (k * c + v + h)


def best_k(
    alpha: float, draft_step_ms: float, verify_ms: Mapping[int, float], overhead_ms: float, base_ms: float
) -> tuple[int, float]:
    """The k of least expected time per token and that time; k = 0 (do not speculate) costs ``base_ms``.

    ``verify_ms`` maps each candidate k to the measured time of verifying k + 1 tokens.
    """
    best = (0, base_ms)
    for k, verify in sorted(verify_ms.items()):
        per_token = (k * draft_step_ms + verify + overhead_ms) / expected_tokens(alpha, k)
        if per_token < best[1]:
            best = (k, per_token)
    return best
