"""One bench from its plan to its result."""

from __future__ import annotations

from decoder import catalog, loading
from decoder.bench.batches import measure_batches
from decoder.bench.floor import better, measure_floor
from decoder.bench.hugging_face import hugging_face_variants
from decoder.bench.measure import Case, Report, Variant, interleave, part, sentence, silent
from decoder.bench.memory import measure_memory
from decoder.bench.ours import OurVariant, our_variants
from decoder.bench.peers import peer_variants
from decoder.bench.plan import BenchPlan
from decoder.bench.result import BenchResult, load_average, machine, now
from decoder.bench.suites import load_suite
from decoder.bench.synthetic import SyntheticPlan, run_synthetic
from decoder.bench.widths import measure_widths
from decoder.engine import SpeculativeDecoder
from decoder.errors import RedlineError
from decoder.loading import LoadedModel
from decoder.request import GenerationRequest
from decoder.text import encode_prompt

BATCH_PROPOSERS = ("draft-model", "ngram")
"""Measured for many rows at once, where they are in the plan."""


def run_bench(plan: BenchPlan, report: Report = silent) -> BenchResult:
    """Measure what ``plan`` asks for. Raises RedlineError when the target itself cannot be used; whatever else fails
    is a sentence in its row."""
    plan.validate()
    if plan.synthetic:
        return _synthetic(plan, report)
    load_before = load_average()
    loaded = loading.load(plan.target, plan.dtype, plan.device, report)
    report(0.0, "measuring the read bandwidth")
    floor = measure_floor(loaded.model, loaded.device)
    cases = cases_of(plan, loaded)
    layers = int(loaded.model.config.get_text_config().num_hidden_layers)
    exit_layer = plan.exit_layer or (8 if layers > 8 else max(1, round(layers / 4)))
    draft = plan.draft or catalog.default_draft(plan.target)
    ours = our_variants(plan, exit_layer)
    variants: list[Variant] = [*hugging_face_variants(plan, draft, exit_layer), *ours, *peer_variants(plan)]
    samples, errors = interleave(variants, cases, plan.repeats, part(report, 0.0, 0.7))
    runner = SpeculativeDecoder.load(_plain(plan)).target.runner
    report(0.7, "timing passes of several tokens")
    try:
        widths = measure_widths(runner, rounds=plan.width_rounds)
    except RedlineError as error:
        widths, errors["widths"] = [], sentence(error)
    # Measured twice, hours apart in a long bench: a machine that was busy at one end does not set the floor.
    floor = better(floor, measure_floor(loaded.model, loaded.device))
    pairs = []
    for variant in _for_batches(plan, ours, errors) if plan.batch else []:
        pairs.append((variant, SpeculativeDecoder.load(variant.request(cases[0]))))
    batches, batch_errors = measure_batches(pairs, cases, plan.batch, plan.repeats, part(report, 0.72, 0.95))
    memory = None
    if plan.memory:
        watched, decoder = pairs[-1] if pairs else (ours[0], SpeculativeDecoder.load(_plain(plan)))
        memory = measure_memory(
            lambda i: decoder.run(watched.request(cases[i % len(cases)])), plan.memory, part(report, 0.95, 1.0)
        )
    return BenchResult(
        plan=plan,
        created=now(),
        machine={**machine(loaded.device, loaded.dtype), "load_before": load_before},
        variants=tuple(variant.name.key for variant in variants),
        samples=tuple(samples),
        errors=errors,
        floor=floor,
        widths=tuple(widths),
        batches=tuple(batches),
        batch_errors=batch_errors,
        memory=memory,
    )


def cases_of(plan: BenchPlan, loaded: LoadedModel) -> list[Case]:
    """The plan's prompts as requests, tokenised. Suites take turns, so that a batch mixes them."""
    suites = [load_suite(name) for name in plan.suites]
    chat = bool(getattr(loaded.tokenizer, "chat_template", None))
    found = []
    for number in range(plan.prompts):
        for suite in suites:
            if number >= len(suite.prompts):
                continue
            prompt = suite.prompts[number]
            request = GenerationRequest(
                prompt.prompt,
                chat=chat,
                target=plan.target,
                max_new_tokens=plan.tokens,
                prediction=prompt.prediction,
                dtype=plan.dtype,
                device=plan.device,
            )
            ids = tuple(encode_prompt(request, loaded.tokenizer, loaded.name))
            found.append(Case(suite.name, prompt.id, request, ids))
    return found


def _plain(plan: BenchPlan) -> GenerationRequest:
    return GenerationRequest("x", target=plan.target, dtype=plan.dtype, device=plan.device)


def _for_batches(plan: BenchPlan, ours: list[OurVariant], errors: dict[str, str]) -> list[OurVariant]:
    """Plain, and the batch table's proposers at the common k."""
    return [
        v
        for v in ours
        if v.name.key not in errors
        and (v.proposer == "none" or (v.proposer in BATCH_PROPOSERS and v.k == plan.their_k))
    ]


def _synthetic(plan: BenchPlan, report: Report) -> BenchResult:
    device = loading.pick_device(plan.device)
    dtype = loading.pick_dtype(plan.dtype, device)
    # On a processor the large shapes take too long to be of use: the tiny one shows that every part works.
    shapes = plan.shapes or (("tiny",) if device == "cpu" else ("1b", "8b"))
    found = run_synthetic(
        SyntheticPlan(
            shapes=shapes,
            # In float32 a model takes twice the memory, and exactness does not need the largest.
            exact_shape="1b" if "1b" in shapes else shapes[0],
            device=device,
            dtype=dtype,
            k=plan.their_k,
            tokens=plan.tokens,
            repeats=plan.repeats,
            rounds=plan.width_rounds,
            transformers=plan.transformers,
        ),
        report,
    )
    return BenchResult(plan, now(), machine(device, dtype), synthetic=tuple(found))
