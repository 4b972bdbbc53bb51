"""Exactness on the embedded SmolLM2: what a user runs, token for token, against transformers' own ``generate()``."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from decoder import catalog
from decoder.audit import AuditPlan, Oracle, check_greedy, oracle_greedy, run_audit, with_proposer
from decoder.audit_prompts import audit_prompts
from decoder.engine import SpeculativeDecoder
from decoder.errors import RequestError
from decoder.request import PROPOSERS, GenerationRequest, SamplingParams
from decoder.trace import Run, violations

pytestmark = pytest.mark.real_model

PROMPTS = dict(audit_prompts())
TOKENS = 200


@lru_cache
def oracle(kind: str) -> Oracle:
    return oracle_greedy(PROMPTS[kind].replace(dtype="float32", max_new_tokens=TOKENS, device="cpu", ignore_eos=True))


def test_the_long_prompt_is_long() -> None:
    request = PROMPTS["long"].replace(dtype="float32", device="cpu")
    assert len(SpeculativeDecoder.load(request).prompt_ids(request)) >= 1500


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_fp32_greedy_equals_generate(proposer: str, kind: str) -> None:
    expected = oracle(kind)
    request = PROMPTS[kind].replace(dtype="float32", max_new_tokens=TOKENS, device="cpu", ignore_eos=True)
    check = check_greedy(with_proposer(request, proposer, AuditPlan(), expected.text), kind, expected)
    assert check.tokens == TOKENS
    assert check.verdict == "equal", f"differs at token {check.divergence}, top-2 gap {check.top2_gap}"
    if proposer in ("draft-model", "early-exit", "prediction"):
        assert check.drafted > 0


@pytest.mark.parametrize("proposer", ["draft-model", "ngram", "early-exit"])
def test_four_mixed_prompts_decode_together_as_they_do_alone(proposer: str) -> None:
    """Three greedy rows against ``generate()``, one sampled row against itself alone; lengths of 30 to 1,600 tokens."""
    common = {"dtype": "float32", "device": "cpu", "ignore_eos": True, "proposer": proposer, "exit_layer": 8}
    greedy = [
        PROMPTS[kind].replace(k=k, max_new_tokens=n, **common)
        for kind, k, n in (("chat", 4, 48), ("long", 2, 24), ("code", 7, 60))
    ]
    sampled = PROMPTS["edit"].replace(
        k=3, max_new_tokens=40, sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=21), **common
    )
    decoder = SpeculativeDecoder.load(sampled)
    *together, drawn = decoder.generate([*greedy, sampled])
    for run, kind in zip(together, ("chat", "long", "code"), strict=True):
        assert list(run.output_ids) == list(oracle(kind).ids[: len(run.output_ids)]), kind
    alone = decoder.run(sampled)
    assert drawn.output_ids == alone.output_ids
    fate = [[[(d.id, d.u, d.verdict) for d in step.drafts] for step in run.steps] for run in (drawn, alone)]
    assert fate[0] == fate[1]
    assert [len(run.output_ids) for run in [*together, drawn]] == [48, 24, 60, 40]
    assert sum(run.metrics["num_draft_tokens"] for run in [*together, drawn]) > 0
    assert violations(drawn) == []


@pytest.mark.parametrize("kind", ["chat", "edit"])
def test_bf16_differs_at_near_ties_only(kind: str) -> None:
    request = PROMPTS[kind].replace(dtype="bfloat16", max_new_tokens=120, device="cpu")
    expected = oracle_greedy(request)
    for proposer in ("none", "ngram", "draft-model"):
        check = check_greedy(with_proposer(request, proposer, AuditPlan(), expected.text), kind, expected)
        assert check.verdict in ("equal", "near-tie"), check


def test_sampled_output_keeps_the_distribution() -> None:
    plan = AuditPlan(proposers=("draft-model", "ngram"), prompts=1, tokens=2, samples=150, dtype="bfloat16", seed=11)
    result = run_audit(plan)
    assert [s.verdict for s in result.sampled] == ["same", "same"]
    assert all(s.drafted > 100 for s in result.sampled)


def test_the_shipped_draft_is_accepted_often_enough_to_be_worth_shipping() -> None:
    draft = catalog.default_draft(catalog.DEFAULT_TARGET)
    assert draft is not None
    run = SpeculativeDecoder.load(request := GenerationRequest("Why do cats purr?", proposer="draft-model")).run(
        request
    )
    assert run.draft == draft
    assert violations(run) == []
    assert run.metrics["mean_acceptance_length"] > 1.3


def test_a_prompt_beyond_the_context_says_by_how_much() -> None:
    request = GenerationRequest("word " * 9000)
    with pytest.raises(RequestError, match="takes at most 8,191"):
        SpeculativeDecoder.load(request).stream(request)


def test_emoji_and_stops_on_the_real_tokenizer() -> None:
    request = GenerationRequest(
        "🦊🐻🐼🐸 " * 6,
        chat=False,
        proposer="ngram",
        max_new_tokens=40,
        sampling=SamplingParams(temperature=0.8, seed=3),
    )
    run = SpeculativeDecoder.load(request).run(request)
    assert violations(run) == []
    assert "\ufffd" not in run.text[:-1]


def test_the_command_line_prints_a_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decoder", "run", "--prompt", "Say hello.", "--max-new-tokens", "8", "--json"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    run = Run.from_json(json.loads(done.stdout))
    assert run.target == "smollm2-135m"
    assert run.text
