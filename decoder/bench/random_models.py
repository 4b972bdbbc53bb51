"""Models made in memory with random weights: Llama shapes, a truncated copy as a draft, heads, a tokenizer of numbers.

Costs are real, texts are not: what such a model writes means nothing, and what a draft of it gets right is chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoder.heads.expect import TargetFacts, eagle3_settings, eagle3_tensors, eagle_tensors, mtp_tensors
from decoder.heads.load import borrow
from decoder.heads.models import Eagle3Head, EagleHead, MedusaHeads, MedusaShape, MtpHead, RecurrentHead
from decoder.heads.runner import HeadRunner
from decoder.heads.sizes import read_sizes
from decoder.loading import LoadedModel
from decoder.proposers.base import Proposer
from decoder.proposers.heads import HeadProposer, MedusaProposer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS = ("eagle", "eagle3", "mtp", "medusa")
"""Proposers that ``random_head`` makes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama by its sizes; ``draft_layers`` of them make the truncated copy."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    draft_layers: int
    tied: bool = False


SHAPES = {
    "1b": Shape("1b", 2048, 16, 8192, 32, 8, 128_256, 2, tied=True),
    "8b": Shape("8b", 4096, 32, 14_336, 32, 8, 128_256, 2),
    "tiny": Shape("tiny", 64, 3, 96, 4, 2, 128, 1),
}


class IdTokenizer:
    """Token 17 is written " 17": a tokenizer for models whose texts mean nothing."""

    chat_template = None
    eos_token_id = None
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(f" {i}" for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return f" {token}"

    def get_vocab(self) -> dict[str, int]:
        return {f" {i}": i for i in range(self.size)}


def build(shape: Shape, device: str, dtype: str, seed: int = 0) -> Any:
    """A Llama of that shape with random weights, made on ``device`` in ``dtype``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wider than a trained model's, so that greedy choices are seldom near-ties.
                parameter.normal_(0.0, 2.0 / parameter.shape[1] ** 0.5)
    return model.eval().requires_grad_(False)


def truncated(model: Any, shape: Shape, device: str, dtype: str) -> Any:
    """A copy of the model's first ``draft_layers`` layers, embeddings, norm and head, as a model of its own."""
    short = build(dataclasses.replace(shape, layers=shape.draft_layers), device, dtype)
    wanted = short.state_dict()
    short.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in wanted})
    return short


def loaded(model: Any, name: str, device: str, dtype: str) -> LoadedModel:
    """The model as ``loading.load`` would have given it."""
    size = int(model.config.vocab_size)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=IdTokenizer(size),
        family="llama",
        revision="random",
        fingerprint=name,
        dtype=dtype,
        device=device,
        vocab_size=size,
        context=int(model.config.max_position_embeddings),
        eos_ids=frozenset(),
    )


def random_head(name: str, model: Any, device: str, seed: int = 3) -> Proposer:
    """One of ``HEADS`` with random weights, of the usual sizes for ``model``: one layer like the target's own, over the
    whole vocabulary; Medusa with four heads."""
    facts, borrowed = TargetFacts.of_config("random", model.config), borrow(model)
    config = {**model.config.to_dict(), "num_hidden_layers": 1}
    sizes = read_sizes("random", config)
    generator = torch.Generator(device).manual_seed(seed)

    def tensors(shapes: Any) -> dict[str, Tensor]:
        like = borrowed.embedding
        made = {}
        for key, size in shapes.items():
            made[key] = torch.ones(size, device=device, dtype=like.dtype)
            if len(size) > 1:
                made[key].normal_(0.0, 1.0 / size[-1] ** 0.5, generator=generator)
        return made

    h, vocabulary = facts.hidden, facts.vocab_size
    with torch.inference_mode(False), torch.no_grad():
        if name == "medusa":
            shape = MedusaShape(heads=4, blocks=1, shared=False, own_output=True)
            wanted = {f"blocks.{i}.layers.0.weight": (h, h) for i in range(4)}
            wanted |= {f"lm_heads.{i}.weight": (vocabulary, h) for i in range(4)}
            return MedusaProposer(MedusaHeads(tensors(wanted), shape, borrowed).eval(), device=device)
        head: RecurrentHead
        if name == "eagle3":
            settings = eagle3_settings(config, sizes, facts)
            head = Eagle3Head(tensors(eagle3_tensors(sizes, settings, facts).must), sizes, settings, borrowed)
        elif name == "eagle":
            head = EagleHead(tensors(eagle_tensors(sizes, facts).must), sizes, borrowed)
        else:
            head = MtpHead(tensors(mtp_tensors(sizes, "mtp").must), sizes, "mtp", borrowed)
        return HeadProposer(name, HeadRunner(head.eval(), vocab_size=vocabulary, device=device))


def free(device: str) -> None:
    """Give a model's memory back before the next one is built."""
    import gc

    from decoder import assemble

    # The fused weights of in-memory models are kept by the process's cache; these models are gone for good.
    assemble._weights.clear()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
