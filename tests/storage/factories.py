"""Plausible runs to store: sound by decoder.trace.violations, with awkward floats and texts."""

from __future__ import annotations

import itertools
import random
from typing import Any

from decoder.metrics import derive
from decoder.request import GenerationRequest, SamplingParams
from decoder.trace import DraftToken, Emitted, FinishReason, Run, Source, Step, TopToken, Verdict
from storage import Store

_counter = itertools.count()


def make_id() -> str:
    return f"r{next(_counter):012x}"


def top(rng: random.Random) -> tuple[TopToken, ...]:
    return tuple(TopToken(rng.randrange(49152), f" t{i}", rng.random()) for i in range(5))


def make_step(index: int, *, k: int = 4, accepted: int | None = None, seed: int = 0, text: str = " word") -> Step:
    """Step 0 is the prefill's token; later ones draft k tokens (k = 0: none) and keep ``accepted`` of them."""
    rng = random.Random(f"{seed}/{index}")
    if index == 0:
        token = Emitted(rng.randrange(49152), text, Source.TARGET, rng.random())
        return Step(0, k, (), (token,), (), 0.0, 0.0, 0.0)
    n = rng.randint(0, k) if accepted is None else accepted
    drafts: list[DraftToken] = []
    for i in range(k):
        verdict = Verdict.ACCEPTED if i < n else Verdict.REJECTED if i == n else Verdict.UNTESTED
        tested = verdict is not Verdict.UNTESTED
        p, q = rng.random(), rng.random()
        drafts.append(
            DraftToken(
                id=rng.randrange(49152),
                text=f"{text}{i}",
                parent=i - 1 if i else None,
                p=p if tested else None,
                q=q,
                accept_prob=min(1.0, p / q) if tested else None,
                u=rng.random() if tested else None,
                verdict=verdict,
                top_p=top(rng) if tested else (),
                top_q=top(rng),
            )
        )
    source = Source.TARGET if not k else Source.BONUS if n == k else Source.CORRECTED
    emitted = [Emitted(d.id, d.text, Source.ACCEPTED, d.p) for d in drafts[:n]]
    emitted.append(Emitted(rng.randrange(49152), text, source, rng.random()))
    return Step(
        index=index,
        k=k,
        drafts=tuple(drafts),
        emitted=tuple(emitted),
        residual_top=top(rng) if k and n < k else (),
        draft_ms=rng.random() * 3 if k else 0.0,
        verify_ms=0.1 + rng.random() * 20,
        overhead_ms=rng.random() / 3,
        k_reason=None if index % 2 else f"{k} should take 9.1 ms per token, plain decoding{text[:40]}",
    )


def make_start(
    *,
    run_id: str | None = None,
    prompt: str = "Why is the sky blue?",
    proposer: str = "draft-model",
    k: int = 4,
    seed: int = 0,
    temperature: float = 0.0,
    target: str = "smollm2-135m",
    baseline_id: str | None = None,
    prompt_ids: tuple[int, ...] = (1, 2, 3, 4),
) -> Run:
    """A run as it is when it begins: no steps."""
    request = GenerationRequest(
        prompt=prompt or "x",
        proposer=proposer,
        draft="smollm2-135m-draft" if proposer == "draft-model" else None,
        prediction="x" if proposer == "prediction" else None,
        k=k,
        target=target,
        sampling=SamplingParams(temperature=temperature, seed=seed),
    ).to_json()
    return Run(
        id=run_id or make_id(),
        request={**request, "prompt": prompt},
        target=target,
        proposer=proposer,
        draft=request["draft"],
        k=k,
        seed=seed,
        dtype="float32",
        device="cpu",
        versions={"torch": "2.13.0", "family": "llama"},
        fingerprint="sha256:0123",
        prompt_ids=prompt_ids,
        baseline_id=baseline_id,
    )


def complete(start: Run, steps: tuple[Step, ...], reason: FinishReason | None = FinishReason.LENGTH) -> Run:
    """``start`` with ``steps`` and everything that follows from them."""
    return start.replace(
        steps=steps,
        output_ids=tuple(e.id for s in steps for e in s.emitted),
        text="".join(e.text for s in steps for e in s.emitted),
        finish_reason=reason,
        error="the logits are not numbers" if reason is FinishReason.ERROR else None,
        prefill_ms=12.5,
        ttft_ms=13.25 + 1 / 3,
        decode_ms=sum((s.draft_ms + s.verify_ms + s.overhead_ms for s in steps), 0.0),
        metrics=derive(steps),
    )


def bare(run: Run) -> Run:
    """``run`` as it was when it began."""
    return run.replace(
        steps=(),
        output_ids=(),
        text="",
        finish_reason=None,
        error=None,
        prefill_ms=0.0,
        ttft_ms=0.0,
        decode_ms=0.0,
        metrics={},
    )


def keep(store: Store, run: Run, **label: Any) -> Run:
    """Store ``run`` as the playground does: step by step."""
    writer = store.start_run(bare(run), **label)
    for step in run.steps:
        writer.append([step])
    writer.finish(run)
    return run


def make_run(
    num_steps: int = 6, *, reason: FinishReason | None = FinishReason.LENGTH, text: str = " word", **start: Any
) -> Run:
    """A complete run of ``num_steps`` steps (the prefill's included)."""
    begin = make_start(**start)
    k = 0 if begin.proposer == "none" else begin.k
    steps = tuple(make_step(i, k=k, seed=begin.seed, text=text) for i in range(num_steps))
    return complete(begin, steps, reason)
