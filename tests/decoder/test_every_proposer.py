"""What every proposer must survive: the target's own greedy text at any draft length and limit, its own distribution
when sampled, and stops inside a draft. Batches, long texts and adaptive lengths have files of their own."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import GenerationConfig

from decoder.trace import violations
from tests import heads
from tests.decoder.every_proposer import EVERY, HEADS, every_decoder, request_for
from tests.statistics import LIMIT, fits
from tests.tiny import PATHS, tiny_llama, tiny_tokenizer

PROMPT = "fox jumps fox jumps fox jumps over the lazy dog, fox"
NEW = 50


@lru_cache
def expected(head: bool) -> list[int]:
    """transformers' own greedy output."""
    model = heads.predictable() if head else tiny_llama()
    ids = torch.tensor([tiny_tokenizer()(PROMPT)["input_ids"]])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.inference_mode():
        full = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return list(full[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", EVERY)
def test_greedy_text_is_the_targets_at_any_length_and_limit(key: str, path: str) -> None:
    decoder = every_decoder(key, path)
    right = expected(key in HEADS)
    assert len(right) == NEW
    guess = tiny_tokenizer().decode(right[2:30])
    for k in (1, 4, 32):
        for limit in (1, 2, k, k + 1, NEW):
            run = decoder.run(request_for(key, PROMPT, k=k, max_new_tokens=limit, ignore_eos=True, prediction=guess))
            assert list(run.output_ids) == right[:limit], (k, limit)
            assert run.finish_reason == "length"
            assert violations(run) == []


@pytest.mark.parametrize("key", EVERY)
def test_a_stop_inside_a_draft_ends_the_text_there(key: str) -> None:
    decoder = every_decoder(key, "fused")
    right = expected(key in HEADS)
    guess = tiny_tokenizer().decode(right)
    for stop in (right[1], right[7], right[20]):
        run = decoder.run(
            request_for(key, PROMPT, k=6, max_new_tokens=NEW, ignore_eos=True, prediction=guess, stop_ids=(stop,))
        )
        assert list(run.output_ids) == right[: right.index(stop) + 1]
        assert run.finish_reason == "stop"
        assert violations(run) == []


def exact(key: str, length: int) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first ``length`` tokens when the two likeliest are drawn from."""
    model = heads.predictable() if key in HEADS else tiny_llama()
    prompt = tiny_tokenizer()(PROMPT)["input_ids"]
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        texts = torch.tensor([[*prompt, *ids] for ids in found])
        with torch.inference_mode():
            rows = model(input_ids=texts).logits[:, -1]
        for (ids, probability), row in zip(found.items(), rows, strict=True):
            top = row.topk(2)
            for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
                longer[*ids, token] = probability * p
        found = longer
    return found


@pytest.mark.parametrize("key", EVERY)
def test_sampled_text_has_the_targets_distribution(key: str) -> None:
    """Drawn in batches of 32, each row with its own seed; the joint distribution of four tokens."""
    decoder = every_decoder(key, "fused")
    guess = tiny_tokenizer().decode(expected(key in HEADS)[:8])
    outputs: list[tuple[int, ...]] = []
    for first in range(0, 640, 32):
        requests = [
            request_for(
                key, PROMPT, k=3, max_new_tokens=5, ignore_eos=True, prediction=guess,
                temperature=1.0, top_k=2, seed=seed,
            )
            for seed in range(first, first + 32)
        ]  # fmt: skip
        outputs += [run.output_ids[:4] for run in decoder.generate(requests)]
    assert fits(outputs, exact(key, 4)) > LIMIT
