"""Models whose layers forget: exact within their window on every path, and refused beyond it with the reason."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from decoder import loading
from decoder.assemble import new_runner
from decoder.engine import SpeculativeDecoder
from decoder.errors import RequestError
from decoder.fused import FusedRunner, why_not
from decoder.proposers.base import Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.request import GenerationRequest
from tests.decoder.every_proposer import request_for
from tests.tiny import PATHS, runner_of, tiny_decoder, tiny_tokenizer

WINDOW = 48
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "every layer": MistralConfig(**SIZES),
    "the upper layers": Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1),
    "every other layer": Gemma3TextConfig(
        **SIZES, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "every other layer, attention written out": Gemma2Config(**SIZES),
}
PROMPT = "The quick brown fox"


@lru_cache
def model(kind: str) -> Any:
    torch.manual_seed(1)
    attention = "eager" if "written out" in kind else "sdpa"
    made = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation=attention)
    made.generation_config.eos_token_id = None  # generate() would stop at it whatever it is told
    return made.eval().requires_grad_(False)


@lru_cache
def expected(kind: str, prompt: str) -> list[int]:
    """transformers' own greedy output, up to the window."""
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    new = WINDOW - ids.shape[1]
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        full = model(kind).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return list(full[0, ids.shape[1] :].tolist())


def cases() -> list[tuple[str, str]]:
    return [(kind, path) for kind in CONFIGS for path in PATHS if path == "generic" or not why_not(model(kind))]


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_window_is_the_context_and_the_reason(kind: str, tmp_path: Path) -> None:
    model(kind).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = loading.load(str(tmp_path), "float32", "cpu")
    assert loaded.context == WINDOW
    assert new_runner(loaded).context == WINDOW
    request = GenerationRequest("fox " * 60, chat=False, target=str(tmp_path), dtype="float32")
    decoder = SpeculativeDecoder.load(request)
    with pytest.raises(RequestError, match=r"at most 47 \(its sliding window; longer texts would not be exact here\)"):
        decoder.stream(request)
    run = decoder.run(request.replace(prompt=PROMPT, max_new_tokens=500, ignore_eos=True))
    assert (run.finish_reason, len(run.prompt_ids) + len(run.output_ids)) == ("length", WINDOW)
    assert list(run.output_ids) == expected(kind, PROMPT)


def test_a_window_that_is_switched_off_is_no_limit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = Qwen2Config(**SIZES, use_sliding_window=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert loading.load(str(tmp_path), "float32", "cpu").context == 512


@pytest.mark.parametrize(("kind", "path"), cases())
def test_every_path_is_exact_up_to_the_window(kind: str, path: str) -> None:
    target = runner_of(model(kind), WINDOW, path)
    proposers: dict[str, Proposer | None] = {
        "none": None,
        "ngram": NgramProposer(),
        "early-exit": EarlyExitProposer(target, 3, 2),
        "draft-model": DraftModelProposer(runner_of(model("every layer"), WINDOW, path)),
    }
    prompts = (PROMPT, "x", "fox fox fox fox")
    for name, proposer in proposers.items():
        decoder = tiny_decoder(proposer, target)
        requests = [request_for(name, p, k=4, max_new_tokens=500, ignore_eos=True) for p in prompts]
        for run, prompt in zip(decoder.generate(requests), prompts, strict=True):
            assert list(run.output_ids) == expected(kind, prompt), (name, prompt)


def test_a_draft_drafts_up_to_its_own_window_only() -> None:
    """A draft that forgets, behind a target that does not: text beyond the window is written without drafts."""
    target = runner_of(model("every other layer"), WINDOW, "generic")
    draft = runner_of(model("every layer"), 24, "fused")
    decoder = tiny_decoder(DraftModelProposer(draft), target)
    run = decoder.run(request_for("draft-model", PROMPT, k=4, max_new_tokens=500, ignore_eos=True))
    assert list(run.output_ids) == expected("every other layer", PROMPT)
    at = len(run.prompt_ids)
    for step in run.steps:
        assert at < 24 or not step.drafts
        at += len(step.emitted)
    assert run.metrics["num_spec_steps"] > 0
    assert isinstance(draft, FusedRunner)
