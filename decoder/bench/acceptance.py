"""Does another engine accept our drafts as often as ours does? The same draft, prompts and k, greedy, in a real vLLM.

For each method the peer is started with speculation on, asked for every prompt, and what it counted per step is set
beside what our engine counted. Greedy texts of two engines part at near-ties in bf16, so rates are compared, position
by position; the interval is a bootstrap over prompts, since the steps of one text resemble each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from decoder import catalog
from decoder.bench.measure import Case, Report, sentence, silent
from decoder.bench.peers import PeerError, VllmVariant
from decoder.bench.plan import BenchPlan
from decoder.engine import SpeculativeDecoder
from decoder.errors import RedlineError
from decoder.request import GenerationRequest

METHODS = {
    "eagle3": "eagle3",
    "draft-model": "draft_model",
    "medusa": "medusa",
    "ngram": "ngram",
    "suffix": "suffix",
}
"""Our proposers and vLLM's names for them."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Counted:
    """One prompt on one engine: ``accepted`` of ``drafted`` tokens, one entry per step that had a draft."""

    prompt: str
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """One draft position: share of drafting steps that accepted it, here and there; ``low`` to ``high`` is the 95 %
    interval of the difference (theirs - ours) over resampled prompts."""

    position: int
    ours: float
    theirs: float
    low: float
    high: float

    @property
    def agrees(self) -> bool:
        """Whether no difference lies within the interval."""
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True, slots=True)
class Comparison:
    """One method. ``same_text``: prompts whose answers were equal token for token, out of ``prompts``; ``same_steps``:
    those of them in which every step accepted the same number. ``error``: what the peer answered instead."""

    proposer: str
    k: int
    prompts: int = 0
    same_text: int = 0
    same_steps: int = 0
    our_length: float = 0.0
    their_length: float = 0.0
    our_steps: int = 0
    their_steps: int = 0
    positions: tuple[Position, ...] = ()
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict, verdicts included."""
        return asdict(self) | {"positions": [asdict(p) | {"agrees": p.agrees} for p in self.positions]}


def speculative_config(proposer: str, k: int, draft: str | None) -> dict[str, Any]:
    """vLLM's ``--speculative-config`` for one of our proposers; ``draft`` is a folder."""
    config: dict[str, Any] = {"method": METHODS[proposer], "num_speculative_tokens": k}
    if draft is not None:
        config["model"] = draft
    defaults = GenerationRequest("x")
    if proposer == "ngram":
        config |= {"prompt_lookup_max": defaults.ngram_max, "prompt_lookup_min": defaults.ngram_min}
    if proposer == "suffix":
        config |= {
            "suffix_decoding_max_tree_depth": defaults.suffix_depth,
            "suffix_decoding_max_spec_factor": defaults.suffix_factor,
            "suffix_decoding_min_token_prob": defaults.suffix_min_prob,
            "suffix_decoding_max_cached_requests": 0,  # nothing of earlier answers, as with us
        }
    return config


def count_theirs(variant: VllmVariant, case: Case) -> Counted:
    """Ask the running peer for one answer and read what it counted. Raises PeerError."""
    import httpx

    body = variant.body(case) | {"stream": False, "return_token_ids": True}
    body.pop("stream_options", None)
    try:
        answer = httpx.post(f"{variant.server.url}{variant.route}", json=body, timeout=600)
    except httpx.HTTPError as error:
        raise PeerError(f"vLLM did not answer: {error}") from None
    if answer.status_code != 200:
        raise PeerError(f"vLLM answered {answer.status_code}: {' '.join(answer.text.split())[:300]}")
    data = answer.json()
    ids = tuple(int(i) for i in data["choices"][0].get("token_ids") or ())
    metrics = (data.get("metrics") or {}).get("speculative_decoding") or {}
    accepted, drafted = metrics.get("per_step_accepted"), metrics.get("per_step_drafted")
    if accepted is None or drafted is None:
        if not metrics.get("num_spec_steps"):
            return Counted(case.id, (), (), ids)  # nothing was drafted for this prompt
        raise PeerError("vLLM sent no detailed metrics of speculation")
    return Counted(case.id, tuple(accepted), tuple(drafted), ids)


def count_ours(decoder: SpeculativeDecoder, case: Case, proposer: str, k: int) -> Counted:
    """The same prompt on our engine."""
    run = decoder.run(case.request.replace(proposer=proposer, k=k, draft=decoder.draft))
    steps = [step for step in run.steps if step.drafts]
    accepted = [step.num_accepted for step in steps]
    return Counted(case.id, tuple(accepted), tuple(len(step.drafts) for step in steps), run.output_ids)


def rates(counted: Sequence[Counted], k: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Share of drafting steps that accepted position 1 .. k: [k]."""
    steps = np.concatenate([np.array(c.accepted, dtype=int) for c in counted]) if counted else np.zeros(0, int)
    return np.array([(steps > i).mean() if len(steps) else 0.0 for i in range(k)])


def compare(proposer: str, k: int, ours: Sequence[Counted], theirs: Sequence[Counted], seed: int = 0) -> Comparison:
    """Set both counts side by side; entries of ``ours`` and ``theirs`` are the same prompts in the same order."""
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(len(ours), size=len(ours))
        draws.append(rates([theirs[i] for i in chosen], k) - rates([ours[i] for i in chosen], k))
    low, high = np.percentile(np.array(draws), [2.5, 97.5], axis=0)
    here, there = rates(ours, k), rates(theirs, k)
    # The last step of an answer may be cut off by its length, and engines count that differently.
    same = [a for a, b in zip(ours, theirs, strict=True) if a.ids == b.ids]
    stepwise = sum(a.accepted[:-1] == b.accepted[:-1] for a, b in zip(ours, theirs, strict=True) if a.ids == b.ids)
    return Comparison(
        proposer=proposer,
        k=k,
        prompts=len(ours),
        same_text=len(same),
        same_steps=stepwise,
        our_length=1 + float(here.sum()),
        their_length=1 + float(there.sum()),
        our_steps=sum(len(c.accepted) for c in ours),
        their_steps=sum(len(c.accepted) for c in theirs),
        positions=tuple(
            Position(i + 1, float(here[i]), float(there[i]), float(low[i]), float(high[i])) for i in range(k)
        ),
    )


def compare_acceptance(plan: BenchPlan, cases: Sequence[Case], report: Report = silent) -> list[Comparison]:
    """Every method of the plan that vLLM has too. What cannot be compared is a sentence in its row."""
    programs = [path for engine, path in plan.peers if engine == "vllm"]
    if not programs:
        raise PeerError("acceptance is compared with vLLM: give --peer vllm=PYTHON")
    found = []
    for proposer in [p for p in plan.proposers if p in METHODS]:
        try:
            found.append(_one(proposer, plan, programs[0], cases, report))
        except (RedlineError, OSError) as error:
            found.append(Comparison(proposer, plan.their_k, error=sentence(error)))
    return found


def _one(proposer: str, plan: BenchPlan, program: str, cases: Sequence[Case], report: Report) -> Comparison:
    k = plan.their_k
    request = cases[0].request.replace(proposer=proposer, k=k, draft=plan.draft)
    decoder = SpeculativeDecoder.load(request)
    if decoder.not_speculating:
        raise PeerError(f"not speculating: {decoder.not_speculating}")
    ours = []
    for i, case in enumerate(cases):
        report(i / len(cases), f"{proposer}: ours, prompt {i + 1} of {len(cases)}")
        ours.append(count_ours(decoder, case, proposer, k))
    config = speculative_config(proposer, k, _folder(decoder.draft))
    extra = ("--enforce-eager", "--per-request-spec-decode-metrics", "detailed")
    variant = VllmVariant(program, plan, (*extra, "--speculative-config", json.dumps(config)))
    theirs = []
    try:
        variant.start(report)
        for i, case in enumerate(cases):
            report(i / len(cases), f"{proposer}: vLLM, prompt {i + 1} of {len(cases)}")
            theirs.append(count_theirs(variant, case))
    finally:
        variant.stop()
    return compare(proposer, k, ours, theirs)


def _folder(draft: str | None) -> str | None:
    """What vLLM must be given for a draft: the folder of a shipped one, else the name itself."""
    if draft is None:
        return None
    shipped = catalog.DRAFTS_DIR / draft
    return str(shipped) if shipped.is_dir() else draft


def markdown(found: Sequence[Comparison]) -> str:
    """Both engines side by side, position by position."""
    lines = [
        "| proposer | k | prompts | same text (same steps) | mean acceptance length, ours / theirs | "
        "accepted at 1, 2, ..., ours / theirs [95 % of the difference] | agrees |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in found:
        if c.error:
            lines.append(f"| {c.proposer} | {c.k} | | | | {c.error} | |")
            continue
        places = "; ".join(f"{p.ours:.3f} / {p.theirs:.3f} [{p.low:+.3f}, {p.high:+.3f}]" for p in c.positions)
        verdict = "yes" if all(p.agrees for p in c.positions) else "no"
        lines.append(
            f"| {c.proposer} | {c.k} | {c.prompts} | {c.same_text} ({c.same_steps}) | "
            f"{c.our_length:.2f} / {c.their_length:.2f} | {places} | {verdict} |"
        )
    return "\n".join(lines) + "\n"
