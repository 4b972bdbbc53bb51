"""What every proposer must survive, alone: the output is the target's, whatever is drafted. A new proposer is one line
in ``every_proposer``; a batch, and texts that outgrow a draft, are in ``test_batch``.

Heads are run three times: drafting chains, trees of a fixed shape, and trees that grow where the head is sure.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest
import torch

from decoder.engine import SpeculativeDecoder
from decoder.trace import Run, Verdict, violations
from tests.decoder.every_proposer import EVERY, HEADS, every_decoder, request_for
from tests.heads import predictable
from tests.statistics import LIMIT, fits
from tests.tiny import tiny_llama

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"
TREES = {"static tree": {"tree": "static"}, "dynamic tree": {"tree": "dynamic", "tree_nodes": 12, "tree_width": 3}}
MATRIX: dict[str, tuple[str, dict[str, Any]]] = {key: (key, {}) for key in EVERY if key != "none"}
MATRIX |= {f"{key}, {name}": (key, request) for key in HEADS for name, request in TREES.items() if key != "mtp"}
"""Case -> builder's key, and what its requests say besides."""

pytestmark = pytest.mark.parametrize("case", MATRIX)


@lru_cache
def decoder_of(key: str) -> SpeculativeDecoder:
    return every_decoder(key, "fused")


def run(case: str, prompt: str = PROMPT, **changes: Any) -> Run:
    key, request = MATRIX[case]
    found = decoder_of(key).run(request_for(key, prompt, **{**request, **changes}))
    assert violations(found) == []
    assert found.error is None
    return found


@lru_cache
def plain_decoder(head: bool) -> SpeculativeDecoder:
    decoder = every_decoder("eagle" if head else "none", "fused")
    return SpeculativeDecoder(decoder.target, None)


def plain(case: str, prompt: str = PROMPT, **changes: Any) -> Run:
    """The same request without drafting, on the same target."""
    return plain_decoder(MATRIX[case][0] in HEADS).run(request_for("none", prompt, **changes))


@pytest.mark.parametrize("k", [1, 4, 32])
def test_greedy_output_is_the_targets(case: str, k: int) -> None:
    """fp32, token for token; the cache of the target then holds exactly the text but its newest token."""
    ours, theirs = (f(case, k=k, max_new_tokens=70, ignore_eos=True) for f in (run, plain))
    assert ours.output_ids == theirs.output_ids
    assert ours.metrics["num_draft_tokens"] > 0
    runner = decoder_of(MATRIX[case][0]).target.runner
    assert runner.lengths == [len(ours.prompt_ids) + 69]
    assert max(len(step.drafts) for step in ours.steps) <= (16 if MATRIX[case][1] else k)


@pytest.mark.parametrize("limit", [1, 2, 4, 5])
def test_the_limit_is_met_exactly(case: str, limit: int) -> None:
    """max_new_tokens 1, 2, k and k + 1."""
    ours = run(case, k=4, max_new_tokens=limit, ignore_eos=True)
    assert ours.output_ids == plain(case, max_new_tokens=limit, ignore_eos=True).output_ids
    assert len(ours.output_ids) == limit
    assert ours.finish_reason == "length"


def test_a_stop_string_ends_the_text_where_it_ends_plain_text(case: str) -> None:
    text = plain(case, max_new_tokens=60, ignore_eos=True).text
    for stop in (text[20:23], text[41:42]):
        ours, theirs = (f(case, k=6, max_new_tokens=60, ignore_eos=True, stop=(stop,)) for f in (run, plain))
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        assert ours.finish_reason == "stop"


def test_penalties_and_bias_reach_drafts_and_target_alike(case: str) -> None:
    changes: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "logit_bias": ((65, 4.0),)}
    ours, theirs = (f(case, k=4, max_new_tokens=50, ignore_eos=True, **changes) for f in (run, plain))
    assert ours.output_ids == theirs.output_ids


def test_a_long_prompt_goes_through_in_parts(case: str) -> None:
    prompt = "The lazy dog jumps over the quick brown fox. " * 115
    ours, theirs = (f(case, prompt, k=4, max_new_tokens=12, ignore_eos=True) for f in (run, plain))
    assert len(ours.prompt_ids) > 1024
    assert ours.output_ids == theirs.output_ids


def test_sampled_output_has_the_targets_distribution(case: str) -> None:
    """The first three tokens of 220 runs against their exact probabilities; top-k 2 leaves eight possible texts."""
    head = MATRIX[case][0] in HEADS
    model = predictable() if head else tiny_llama()
    sampling: dict[str, Any] = {"temperature": 1.6, "top_k": 2}
    drafted, outputs = 0, []
    for seed in range(220):
        found = run(case, "fox", k=2, max_new_tokens=3, ignore_eos=True, seed=seed, **sampling)
        outputs.append(found.output_ids)
        drafted += found.metrics["num_draft_tokens"]
    if not case.startswith(("ngram", "suffix", "prediction")):
        assert drafted >= 220
    assert fits(outputs, _exact(model, list(found.prompt_ids), 3)) > LIMIT


@lru_cache
def _scores(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]


def _exact(model: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Every continuation of ``length`` tokens with its probability at temperature 1.6 and top-k 2."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in found.items():
            top = (_scores(model, (*prompt, *text)) / 1.6).topk(2)
            for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = probability * p
        found = longer
    return found


def test_rejected_drafts_leave_nothing_behind(case: str) -> None:
    """Probabilities of a sampled run: those that a fresh pass over the text gives, step after step."""
    head = MATRIX[case][0] in HEADS
    model = predictable() if head else tiny_llama()
    found = run(case, k=3, max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=4)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*found.prompt_ids, *found.output_ids]])).logits[0]
    emitted = list(itertools.chain.from_iterable(step.emitted for step in found.steps))
    for at, token in enumerate(emitted):
        expected = logits[len(found.prompt_ids) + at - 1].softmax(-1)[token.id]
        assert token.p == pytest.approx(float(expected), abs=1e-4)
    verdicts = {draft.verdict for step in found.steps for draft in step.drafts}
    if not case.startswith(("ngram", "prediction", "draft-model, copy")):
        assert Verdict.REJECTED in verdicts
