"""Is speculation lossless here? Greedy: token for token against transformers' own ``generate()``. Sampled: many short
runs with and without drafts, compared by a chi-square test and by total variation.

In float32 greedy must be equal. In bfloat16 transformers' operations round differently from ours, so the first
difference must be a near-tie: the two likeliest logits lie within a few steps of bfloat16's resolution.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from decoder import catalog
from decoder.audit_prompts import audit_prompts
from decoder.engine import SpeculativeDecoder
from decoder.errors import RequestError
from decoder.heads.layout import HEADS
from decoder.loading import load
from decoder.request import PROPOSERS, GenerationRequest, SamplingParams

SAMPLED_TOKENS = 4
"""Tokens of each sampled run."""
SIGNIFICANCE = 0.001
"""A lossless decoder fails the sampled test this often, at most."""
_NO_ID = 2**31 - 1
NEAR_TIE_STEPS = 4
"""A greedy difference in low precision is a near-tie within this many steps of the dtype's resolution."""


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to check. ``proposers`` empty = all of them, heads where one that is here was made for the target;
    ``draft`` None = one that fits, else the target itself."""

    target: str = catalog.DEFAULT_TARGET
    proposers: tuple[str, ...] = ()
    draft: str | None = None
    k: int = 4
    tokens: int = 200
    prompts: int = 8
    samples: int = 400
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"

    def names(self) -> tuple[str, ...]:
        """The proposers to check."""
        unknown = [name for name in self.proposers if name not in PROPOSERS]
        if unknown:
            raise RequestError(f"unknown proposer {unknown[0]!r}: choose from {', '.join(PROPOSERS)}")
        return self.proposers or tuple(
            name for name in PROPOSERS if name not in HEADS or catalog.default_draft(self.target, name)
        )

    def validate(self) -> None:
        """Raise RequestError on numbers that make no audit."""
        for name, value, low in (
            ("tokens", self.tokens, 2),
            ("prompts", self.prompts, 1),
            ("samples", self.samples, 0),
        ):
            if value < low:
                raise RequestError(f"{name} must be at least {low}, not {value}")
        if 0 < self.samples < 100:
            raise RequestError("a test with fewer than 100 samples proves nothing: use at least 100, or 0 to skip it")


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """One proposer on one prompt. ``verdict``: equal, near-tie or different."""

    proposer: str
    prompt: str
    verdict: str
    tokens: int
    drafted: int
    accepted: int
    divergence: int | None
    """Index of the first output token that differs."""
    top2_gap: float | None
    """Difference of the two largest logits there, in the plain pass."""


@dataclass(frozen=True, slots=True)
class SampledCheck:
    """One proposer against plain sampling. ``verdict``: same, different, or not speculating."""

    proposer: str
    verdict: str
    samples: int
    positions: int
    drafted: int
    p_value: float
    """The smallest p-value over positions and the pair of drafted tokens, times their number (Bonferroni)."""
    total_variation: float
    expected_variation: float
    """Mean total variation when the same samples are dealt at random to the two sides."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Verdicts and whether all of them passed."""

    plan: AuditPlan
    greedy: tuple[GreedyCheck, ...]
    sampled: tuple[SampledCheck, ...]

    @property
    def passed(self) -> bool:
        """True when no check found a difference, and every proposer did draft somewhere."""
        return not self.untested and all(c.verdict != "different" for c in self.checks)

    @property
    def checks(self) -> list[GreedyCheck | SampledCheck]:
        """All checks of both halves."""
        return [*self.greedy, *self.sampled]

    @property
    def untested(self) -> tuple[str, ...]:
        """Proposers that drafted nothing in any check: nothing can be said of them."""
        drafted: dict[str, int] = {}
        for check in self.checks:
            drafted[check.proposer] = drafted.get(check.proposer, 0) + check.drafted
        return tuple(name for name, n in drafted.items() if not n and name != "none")

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return {
            "passed": self.passed,
            "untested": list(self.untested),
            "plan": asdict(self.plan),
            "greedy": [asdict(g) for g in self.greedy],
            "sampled": [asdict(s) for s in self.sampled],
        }


def run_audit(plan: AuditPlan, report: Callable[[float, str], None] = lambda f, m: None) -> AuditResult:
    """Run both halves; ``report(fraction, message)`` is told how far it is."""
    plan.validate()
    names = plan.names()
    chosen = audit_prompts()[: plan.prompts]
    work = len(chosen) * (len(names) + 1) + (len(names) * 2 if plan.samples else 0)
    done = 0

    def tick(message: str) -> None:
        nonlocal done
        report(done / work, message)
        done += 1

    greedy: list[GreedyCheck] = []
    for kind, prompt in chosen:
        base = prompt.replace(
            target=plan.target, dtype=plan.dtype, device=plan.device, max_new_tokens=plan.tokens, ignore_eos=True
        )
        tick(f"transformers generate: {kind}")
        oracle = oracle_greedy(base)
        for name in names:
            tick(f"greedy {name}: {kind}")
            greedy.append(check_greedy(with_proposer(base, name, plan, oracle.text), kind, oracle))
    sampled: list[SampledCheck] = []
    if plan.samples:
        request = _sampled_request(plan)
        tick("sampling plainly")
        plain = _samples(request, plan.samples, plan.seed + 1_000_003, report, done / work)[0]
        for name in names:
            if name == "none":
                continue
            tick(f"sampling with {name}")
            ours, drafted = _samples(
                with_proposer(request, name, plan, " red green blue red green"),
                plan.samples,
                plan.seed,
                report,
                done / work,
            )
            sampled.append(compare_samples(name, plain, ours, drafted, plan.seed))
    return AuditResult(plan, tuple(greedy), tuple(sampled))


def with_proposer(request: GenerationRequest, name: str, plan: AuditPlan, text: str) -> GenerationRequest:
    """The request with a proposer and what it needs; the prediction is the expected text with every 12th word gone."""
    draft = None
    if name == "draft-model":
        draft = plan.draft or catalog.default_draft(plan.target) or plan.target
    words = text.split(" ")
    guess = " ".join(w for i, w in enumerate(words) if i % 12 != 11) or "unknown"
    return request.replace(proposer=name, draft=draft, k=plan.k, prediction=guess if name == "prediction" else None)


# --- greedy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Oracle:
    """What transformers' own greedy ``generate()`` says: output ids, their text, and how to ask for logits."""

    ids: tuple[int, ...]
    text: str
    gap_at: Callable[[int], tuple[float, float]]
    """output index -> (difference of the two largest logits, the largest)"""


def oracle_greedy(request: GenerationRequest) -> Oracle:
    """Greedy output of transformers itself for the same target, dtype and prompt."""
    from transformers import GenerationConfig

    from decoder.text import encode_prompt

    loaded = load(request.target, request.dtype, request.device)
    prompt = encode_prompt(request, loaded.tokenizer, loaded.name)
    ids = torch.tensor([prompt], device=loaded.device)
    config = GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        # An id that no model emits: the text then goes on to its full length, as ours does.
        eos_token_id=_NO_ID if request.ignore_eos else sorted(loaded.eos_ids),
        pad_token_id=sorted(loaded.eos_ids)[0] if loaded.eos_ids else 0,
    )
    model = loaded.model
    with torch.inference_mode():
        full = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist()
    output = tuple(full[len(prompt) :])

    def gap_at(index: int) -> tuple[float, float]:
        text = torch.tensor([[*prompt, *output[:index]]], device=loaded.device)
        with torch.inference_mode():
            top = model(input_ids=text, logits_to_keep=1).logits[0, -1].float().topk(2).values
        return float(top[0] - top[1]), float(top[0])

    return Oracle(output, loaded.tokenizer.decode(output, skip_special_tokens=True), gap_at)


def check_greedy(request: GenerationRequest, kind: str, oracle: Oracle) -> GreedyCheck:
    """Our greedy run against the oracle."""
    run = SpeculativeDecoder.load(request).run(request)
    if run.error:
        raise RequestError(run.error)
    ours = run.output_ids
    drafted = int(run.metrics["num_draft_tokens"])
    accepted = int(run.metrics["num_accepted_draft_tokens"])
    if ours == oracle.ids:
        return GreedyCheck(request.proposer, kind, "equal", len(ours), drafted, accepted, None, None)
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, oracle.ids, strict=False)) if a != b), min(len(ours), len(oracle.ids))
    )
    gap, largest = oracle.gap_at(at)
    near = run.dtype != "float32" and gap <= NEAR_TIE_STEPS * resolution(largest, run.dtype)
    verdict = "near-tie" if near else "different"
    return GreedyCheck(request.proposer, kind, verdict, len(ours), drafted, accepted, at, gap)


def resolution(value: float, dtype: str) -> float:
    """Distance between neighbouring numbers of ``dtype`` at ``value``."""
    bits = {"float32": 23, "bfloat16": 7, "float16": 10}[dtype]
    return float(2.0 ** (math.floor(math.log2(max(abs(value), 1e-9))) - bits))


# --- sampled ------------------------------------------------------------------------------------------------------


def _sampled_request(plan: AuditPlan) -> GenerationRequest:
    return GenerationRequest(
        "Colours: red green blue red green yellow red green blue red green blue red green",
        chat=False,
        target=plan.target,
        dtype=plan.dtype,
        device=plan.device,
        max_new_tokens=SAMPLED_TOKENS,
        ignore_eos=True,
        # Few likely tokens at each position: the test then has enough samples of each to see a difference.
        sampling=SamplingParams(temperature=1.0, top_k=8),
    )


def _samples(
    request: GenerationRequest, n: int, seed: int, report: Callable[[float, str], None], fraction: float
) -> tuple[list[tuple[int, ...]], int]:
    """``n`` runs with seeds of their own -> their output ids, and how many tokens were drafted."""
    decoder = SpeculativeDecoder.load(request)
    found, drafted = [], 0
    for i in range(n):
        if i % 20 == 0:
            report(fraction, f"sampling with {request.proposer}: {i} of {n}")
        run = decoder.run(request.replace(sampling=replace(request.sampling, seed=seed + i)))
        found.append(run.output_ids)
        drafted += int(run.metrics["num_draft_tokens"])
    return found, drafted


def compare_samples(
    proposer: str, plain: Sequence[tuple[int, ...]], ours: Sequence[tuple[int, ...]], drafted: int, seed: int = 0
) -> SampledCheck:
    """Are two sets of token sequences draws from one distribution? Tests every position and neighbouring pairs."""
    length = min(len(s) for s in (*plain, *ours))
    views: list[Callable[[tuple[int, ...]], Any]] = [lambda s, t=t: s[t] for t in range(length)]  # type: ignore[misc]
    views += [lambda s, t=t: s[t : t + 2] for t in range(length - 1)]  # type: ignore[misc]
    p_values = [homogeneity([view(s) for s in plain], [view(s) for s in ours]) for view in views]
    p_value = min(1.0, min(p_values) * len(p_values))
    pairs = [s[1:3] for s in plain], [s[1:3] for s in ours]
    variation = total_variation(*pairs)
    rng = random.Random(seed)
    pool = [*pairs[0], *pairs[1]]
    dealt = []
    for _ in range(50):
        rng.shuffle(pool)
        dealt.append(total_variation(pool[: len(plain)], pool[len(plain) :]))
    verdict = "not speculating" if not drafted else "same" if p_value >= SIGNIFICANCE else "different"
    return SampledCheck(proposer, verdict, len(ours), length, drafted, p_value, variation, sum(dealt) / len(dealt))


def homogeneity(a: Sequence[Any], b: Sequence[Any]) -> float:
    """p-value of the chi-square test that two samples have one distribution; rare values are pooled.

    Categories are joined until each expects at least 5 in both samples, the usual condition of the test.
    """
    count_a, count_b = Counter(a), Counter(b)
    n_a, n_b = len(a), len(b)
    cells: list[tuple[int, int]] = []
    rest = (0, 0)
    for value in sorted(set(count_a) | set(count_b), key=repr):
        pair = (count_a[value], count_b[value])
        if sum(pair) * min(n_a, n_b) / (n_a + n_b) >= 5:
            cells.append(pair)
        else:
            rest = (rest[0] + pair[0], rest[1] + pair[1])
    if sum(rest) * min(n_a, n_b) / (n_a + n_b) >= 5 or not cells:
        cells.append(rest)
    elif sum(rest):
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    if len(cells) < 2:
        return 1.0
    chi2 = 0.0
    for x, y in cells:
        for observed, n in ((x, n_a), (y, n_b)):
            expected = (x + y) * n / (n_a + n_b)
            chi2 += (observed - expected) ** 2 / expected
    return chi_square_tail(chi2, len(cells) - 1)


def chi_square_tail(value: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees >= value)."""
    half = torch.tensor([freedom / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def total_variation(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Half the L1 distance of two empirical distributions, in [0, 1]."""
    count_a, count_b = Counter(a), Counter(b)
    return sum(abs(count_a[v] / len(a) - count_b[v] / len(b)) for v in set(count_a) | set(count_b)) / 2
