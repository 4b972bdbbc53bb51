"""The check for a bare machine with an accelerator: Llama-shaped models with random weights, built in memory.

Needs torch and transformers only: no network, no weights, no tokenizer. Costs are real, texts are not. Acceptance is
set by a proposer that replays the target's own continuation with a chosen error rate; a truncated copy of the target
is a draft of real cost, whatever it gets right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from decoder.bench.bed import Bed
from decoder.bench.exactness import Exact, check
from decoder.bench.floor import Floor, measure_floor
from decoder.bench.hugging_face import ASSISTED, PLAIN, HuggingFaceVariant
from decoder.bench.measure import Report, Sample, Variant, interleave, part, sentence, silent
from decoder.bench.ours import OurVariant
from decoder.bench.random_models import SHAPES, Shape, free
from decoder.bench.round_times import RoundTimes, medians
from decoder.bench.widths import WIDTHS, Width, measure_widths


@dataclass(frozen=True, slots=True)
class SyntheticPlan:
    """Which shapes, on what, and how much. ``errors`` are the replaying proposer's error rates."""

    shapes: tuple[str, ...] = ("1b", "8b")
    device: str = "cuda"
    dtype: str = "bfloat16"
    k: int = 4
    tokens: int = 64
    prompt_tokens: int = 128
    rounds: int = 20
    repeats: int = 2
    errors: tuple[float, ...] = (0.0, 0.2, 0.5)
    transformers: bool = True
    exact_tokens: int = 128
    exact_shape: str = "1b"
    """Checked in float32; "" leaves it out."""
    long_context: int = 2000
    """Passes of several tokens are timed behind so much text as well; 0 leaves it out."""
    buffer_bytes: int | None = None


@dataclass(frozen=True)
class Synthetic:
    """One shape: its floor, the cost of each width, the samples of every variant, and whether greedy was exact."""

    shape: str
    dtype: str
    device: str
    parameters: int
    path: str
    floor: Floor | None = None
    widths: tuple[Width, ...] = ()
    samples: tuple[Sample, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    exact: dict[str, Exact] = field(default_factory=dict)
    """By proposer: float32 greedy against plain decoding, token for token (only in the exactness part)."""
    rounds: tuple[RoundTimes, ...] = ()
    context: int = 0
    """Tokens in front of the passes of ``widths``."""
    long_context: int = 0
    long_widths: tuple[Width, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        names = ("shape", "dtype", "device", "parameters", "path", "context", "long_context")
        return {
            **{name: getattr(self, name) for name in names},
            "floor": self.floor.to_json() if self.floor else None,
            "widths": [w.to_json() for w in self.widths],
            "long_widths": [w.to_json() for w in self.long_widths],
            "rounds": [r.to_json() for r in self.rounds],
            "samples": [s.to_json() for s in self.samples],
            "errors": dict(self.errors),
            "exact": {name: exact.to_json() for name, exact in self.exact.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Synthetic:
        """Read what ``to_json`` wrote."""
        values = dict(data)
        values["floor"] = Floor.from_json(data["floor"]) if data["floor"] else None
        values["widths"] = tuple(Width.from_json(w) for w in data["widths"])
        values["long_widths"] = tuple(Width.from_json(w) for w in data.get("long_widths", ()))
        values["rounds"] = tuple(RoundTimes.from_json(r) for r in data.get("rounds", ()))
        values["samples"] = tuple(Sample(**s) for s in data["samples"])
        values["exact"] = {name: Exact(e) if isinstance(e, bool) else Exact(**e) for name, e in data["exact"].items()}
        return cls(**values)


def run_synthetic(plan: SyntheticPlan, report: Report = silent) -> list[Synthetic]:
    """Every shape of ``plan``, and the exactness part last. A shape that does not fit into memory is a sentence."""
    steps = [(name, plan.dtype, plan.tokens) for name in plan.shapes]
    if plan.exact_shape:
        steps.append((plan.exact_shape, "float32", plan.exact_tokens))
    found = []
    for index, (name, dtype, tokens) in enumerate(steps):
        inner = part(report, index / len(steps), (index + 1) / len(steps))
        exactness = index == len(plan.shapes)
        inner(0.0, f"exactness in float32, {name}" if exactness else f"building {name}")
        try:
            bed = Bed(
                SHAPES[name], device=plan.device, dtype=dtype, k=plan.k, prompt_tokens=plan.prompt_tokens, tokens=tokens
            )
            found.append(_checked(bed, SHAPES[name], plan) if exactness else _measured(bed, SHAPES[name], plan, inner))
        except torch.OutOfMemoryError as error:
            found.append(Synthetic(name, dtype, plan.device, 0, "", errors={name: sentence(error)}))
        bed = None  # type: ignore[assignment]
        free(plan.device)
    return found


def _measured(bed: Bed, shape: Shape, plan: SyntheticPlan, report: Report) -> Synthetic:
    variants: list[Variant] = [OurVariant("none", 0, decoder=bed.decoder(None))]
    eager = bed.eager()
    if eager is not None:
        variants.append(OurVariant("none", 0, decoder=bed.decoder(None, eager), label="none, eager path"))
    for label, proposer in bed.proposers(plan.errors).items():
        # Labels that are no proposer's name run as n-gram requests: the engine takes whatever proposer it was given.
        known = label if label in ("draft-model", "early-exit", "ngram") else "ngram"
        variants.append(OurVariant(known, plan.k, decoder=bed.decoder(proposer), label=label))
    if plan.transformers:
        variants.append(HuggingFaceVariant(PLAIN, model=bed.model))
        variants.append(HuggingFaceVariant(ASSISTED, plan.k, model=bed.model, assistant=bed.draft))
    samples, errors = interleave(variants, [bed.case], plan.repeats, report)
    for variant in variants:
        # A variant that takes few rounds for its text is asked again until there are enough for a median.
        repeat = plan.repeats
        while variant.name.key not in errors and 0 < len(variant.rounds) < plan.rounds:
            samples.append(variant.measure(bed.case, repeat))
            repeat += 1
    times = [medians(variant.name.key, variant.rounds) for variant in variants]
    widths = measure_widths(bed.runner, context=plan.prompt_tokens, rounds=plan.rounds, widths=WIDTHS)
    behind = min(plan.long_context, bed.runner.context - max(WIDTHS) - 1)
    long_widths = measure_widths(bed.runner, context=behind, rounds=plan.rounds, widths=WIDTHS) if behind > 0 else []
    return Synthetic(
        shape.name,
        plan.dtype,
        plan.device,
        bed.parameters,
        bed.path,
        floor=measure_floor(bed.model, plan.device, buffer_bytes=plan.buffer_bytes),
        widths=tuple(widths),
        samples=tuple(samples),
        errors=errors,
        rounds=tuple(t for t in times if t is not None),
        context=plan.prompt_tokens,
        long_context=behind,
        long_widths=tuple(long_widths),
    )


def _checked(bed: Bed, shape: Shape, plan: SyntheticPlan) -> Synthetic:
    exact = check(bed, transformers=plan.transformers)
    return Synthetic(shape.name, "float32", plan.device, bed.parameters, bed.path, exact=exact)
