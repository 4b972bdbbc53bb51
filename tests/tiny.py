"""Tiny random Llamas, built in memory: real attention, rope and grouped heads, no download."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decoder import kernel, packages
from decoder.compiled import CompiledRunner
from decoder.engine import SpeculativeDecoder, Target
from decoder.fused import FusedRunner, Weights
from decoder.graphs import GraphRunner, Recordings
from decoder.kernel_runner import KernelRunner
from decoder.proposers.base import Proposer
from decoder.target import ModelRunner, RowRunner
from tests.compiled_steps import built_kernel, tiny_steps
from tests.tape import TapeCapture

CONTEXT = 3072
TEXT = (
    "The quick brown fox jumps over the lazy dog. Speculative decoding drafts tokens and verifies them. "
    "def f(x): return x + 1\n 🦊🐻 灯塔是什么 naïve café <b>&amp;</b> ${1+1} `x` {{y}} "
)


@lru_cache
def tiny_tokenizer(vocab_size: int = 384, text: str = TEXT) -> Any:
    """A byte-level BPE tokenizer of about ``vocab_size`` entries with an end token and a chat template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([text * 4], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


@lru_cache
def tiny_llama(seed: int = 0, layers: int = 3, vocab_size: int = 384) -> Any:
    """A float32 Llama with 4 query heads on 2 key-value heads; sharp enough that argmax has no near-ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


PATHS = (
    *("generic", "fused", "graphs"),
    *(("compiled",) if packages.compiler() else ()),
    *(("kernel",) if kernel.compiler() else ()),
)
"""Without a C++ compiler nothing runs compiled; the tests of compiled steps are skipped then, and say why."""


def runner(
    seed: int = 0, layers: int = 3, vocab_size: int = 384, context: int = CONTEXT, path: str = "fused"
) -> RowRunner:
    """A fresh runner around a tiny Llama, on any path; "graphs" replays a tape where a GPU would replay a graph, and
    "compiled" has steps for the first of these models only: others take the fused path."""
    if path == "compiled" and (seed, layers, vocab_size) == (0, 3, 384):
        weights = fused_weights(seed, layers, vocab_size)
        return CompiledRunner(weights, tiny_steps(), tiny_steps, context=context, device="cpu")
    return runner_of(tiny_llama(seed, layers, vocab_size), context, path)


def runner_of(model: Any, context: int = CONTEXT, path: str = "fused") -> RowRunner:
    """A fresh runner around ``model``."""
    if path == "generic":
        return ModelRunner(model, context=context, device="cpu")
    weights = weights_of(model)
    if path == "kernel":
        held = built_kernel(weights)
        return KernelRunner(weights, held, lambda layers: held, context=context, device="cpu")
    if path == "graphs":
        return GraphRunner(weights, Recordings(TapeCapture(), "cpu"), context=context, device="cpu")
    return FusedRunner(weights, context=context, device="cpu")


@lru_cache
def weights_of(model: Any) -> Weights:
    """The fused weights of a model."""
    return Weights(model)


def fused_weights(seed: int, layers: int, vocab_size: int) -> Weights:
    """The fused weights of a tiny Llama."""
    return weights_of(tiny_llama(seed, layers, vocab_size))


def tiny_decoder(proposer: Proposer | None = None, target: RowRunner | None = None) -> SpeculativeDecoder:
    """A decoder around a tiny Llama and its tokenizer."""
    tokenizer = tiny_tokenizer()
    return SpeculativeDecoder(
        Target(target or runner(), tokenizer, "tiny", frozenset({tokenizer.eos_token_id})), proposer
    )


def save_tiny(folder: Path, *, seed: int = 0, vocab_size: int = 384, tokenizer: Any = None) -> Path:
    """A tiny model as a local Hugging Face folder."""
    tiny_llama(seed, 3, vocab_size).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
