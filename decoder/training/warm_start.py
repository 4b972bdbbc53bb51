"""Where a small Llama starts from when it is to imitate a larger one with the same tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.errors import ModelError


def draft_config(
    target: Any, *, hidden: int, layers: int, intermediate: int, head_dim: int = 64, kv_heads: int = 2
) -> LlamaConfig:
    """A plain Llama, embeddings tied, with vocabulary, special tokens and context length of ``target`` (a config)."""
    if hidden % head_dim or (hidden // head_dim) % kv_heads:
        raise ModelError(f"a width of {hidden} is not made of heads of {head_dim} in groups for {kv_heads} kv heads")
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        dtype="float32",
    )


def reduce_embeddings(
    embeddings: torch.Tensor, counts: npt.NDArray[np.int64], width: int
) -> tuple[torch.Tensor, float]:
    """The best rank-``width`` picture of the target's embeddings: [V, H] float -> [V, width], and the share kept.

    A singular value decomposition in which a frequent token weighs more (square root of its count, so that rare ones
    still matter). Inner products are what a tied head works with, and a rotation keeps them; so the reduced matrix
    serves as input and as head.
    """
    weight = torch.from_numpy(np.sqrt(counts + 1.0)).float()
    weighted = embeddings * weight[:, None]
    values, basis = torch.linalg.eigh(weighted.T @ embeddings)  # ascending; [H], [H, H]
    kept = float(values[-width:].sum() / values.sum())
    return embeddings @ basis[:, -width:].flip(1), kept


def warm_start(config: LlamaConfig, target: Any, counts: npt.NDArray[np.int64], seed: int) -> tuple[Any, float]:
    """A draft model (float32) with reduced target embeddings and fresh layers, and the share of the embeddings kept."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    embeddings, kept = reduce_embeddings(
        target.get_input_embeddings().weight.detach().float().cpu(), counts, config.hidden_size
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embeddings)
        for layer in model.model.layers:  # blocks begin as identities: the first steps cannot spoil the embeddings
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        # After the norm a state has length sqrt(width) and still resembles its own token, whose logit must stay small.
        spread = 4 * float(embeddings.norm(dim=1).mean())
        model.model.norm.weight.fill_(1.0 / max(spread, 1e-6))
    return model, kept
