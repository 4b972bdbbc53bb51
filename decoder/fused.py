"""A lean forward pass for Llama-shaped models: fused q/k/v and gate/up projections, and attention that reads views.

Computes what transformers computes (the exactness tests run on both paths) with fewer operations: no copies of keys and
values for grouped heads, no module calls. The weights are shared with the transformers model: its own projections
become views into the fused tensors, so that nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.target import BUCKET, RowRunner, chain_mask, check_exit, tree_mask

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""Families whose layers are the plain ones below; others take the generic path."""


@dataclass(slots=True)
class _Block:
    """Weights of one layer. ``qkv`` [(heads + 2 kv_heads) * head_dim, H], ``gate_up`` [2 I, H]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def why_not(model: Any) -> str | None:
    """Why ``model`` cannot take the lean path, or None when it can."""
    config = model.config
    if config.model_type not in _FAMILIES:
        return f"{config.model_type} layers are not the plain Llama ones"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have biases"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its positions are scaled by {rope['rope_type']}"
    return None


class Weights:
    """The fused weights of a model; built once and shared by every runner on it."""

    def __init__(self, model: Any) -> None:
        config, inner = model.config, model.model
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.eps = float(config.rms_norm_eps)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.embedding: Tensor = inner.embed_tokens.weight
        self.norm: Tensor = inner.norm.weight
        self.head: Tensor = model.lm_head.weight
        self.head_bias: Tensor | None = model.lm_head.bias
        self.rotary = inner.rotary_emb
        with torch.inference_mode(False), torch.no_grad():
            self.blocks = [_fuse(layer) for layer in inner.layers]


def _fuse(layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Block(
        attention_norm=layer.input_layernorm.weight,
        qkv=_join([p.weight for p in projections]),
        qkv_bias=None if projections[0].bias is None else torch.cat([p.bias for p in projections]),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_join([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )


def _join(parts: Sequence[torch.nn.Parameter]) -> Tensor:
    """One tensor of all rows; the parts become views into it."""
    joined = torch.cat([p.data for p in parts])
    at = 0
    for part in parts:
        part.data = joined[at : at + part.shape[0]]
        at += part.shape[0]
    return joined


class Buffers:
    """Keys and values of all layers, [layers, B, kv_heads, capacity, head_dim] each; early exit shares the target's."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def reserve(self, batch: int, tokens: int) -> None:
        """Make room for ``tokens`` per row; what is there stays."""
        if self.keys is not None and self.keys.shape[3] >= tokens and self.keys.shape[1] == batch:
            return
        w = self.weights
        # Grown by half at least, so that a long text moves its cache a few times only.
        had = self.keys.shape[3] if self.keys is not None and self.keys.shape[1] == batch else 0
        capacity = -(-max(tokens, had + had // 2) // BUCKET) * BUCKET
        shape = (len(w.blocks), batch, w.kv_heads, capacity, w.head_dim)
        keys = torch.zeros(shape, dtype=w.embedding.dtype, device=w.embedding.device)
        values = torch.zeros_like(keys)
        if had and self.keys is not None and self.values is not None:
            keys[:, :, :, :had] = self.keys
            values[:, :, :, :had] = self.values
        self.keys, self.values = keys, values


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 as transformers does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x [B, T, heads, d], cos and sin [B, T, 1, d]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class FusedRunner(RowRunner):
    """A runner on the lean path. ``layers`` fewer than the model's make the early exit's short model."""

    path = "eager, fused"

    def __init__(
        self,
        weights: Weights,
        *,
        context: int,
        device: str,
        buffers: Buffers | None = None,
        layers: int | None = None,
    ) -> None:
        self.weights = weights
        self.context = context
        self.device = device
        self.vocab_size = weights.vocab_size
        self.layers = len(weights.blocks) if layers is None else layers
        self.buffers = buffers or Buffers(weights)
        self.lengths = []

    def reset(self, batch: int) -> None:
        self.lengths = [0] * batch

    def short(self, layers: int) -> FusedRunner:
        check_exit(layers, len(self.weights.blocks))
        return FusedRunner(self.weights, context=self.context, device=self.device, buffers=self.buffers, layers=layers)

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        start = max(self.lengths)
        self.buffers.reserve(batch, start + width)
        positions, mask = (
            chain_mask(self.lengths, width, self.device)
            if parents is None
            else tree_mask(start, width, parents, self.device)
        )
        slots = None if min(self.lengths) == start else positions
        hidden = self._layers(ids, positions, slots, mask, start, start + width)
        if last:
            at = torch.tensor([max(count - 1, 0) for count in counts], device=self.device)
            hidden = hidden[torch.arange(batch, device=self.device), at][:, None]
        hidden = rms_norm(hidden, self.weights.norm, self.weights.eps)
        return F.linear(hidden, self.weights.head, self.weights.head_bias)

    def _layers(
        self, ids: Tensor, positions: Tensor, slots: Tensor | None, mask: Tensor | None, start: int, end: int
    ) -> Tensor:
        w = self.weights
        keys, values = self.buffers.keys, self.buffers.values
        assert keys is not None
        assert values is not None
        batch, width = ids.shape
        hidden = F.embedding(ids, w.embedding)
        cos, sin = w.rotary(hidden, positions)
        cos, sin = cos[:, :, None], sin[:, :, None]
        group = w.heads // w.kv_heads
        sizes = (w.heads * w.head_dim, w.kv_heads * w.head_dim, w.kv_heads * w.head_dim)
        causal = mask is None and width > 1
        if mask is not None and group > 1:
            mask = mask.repeat(1, 1, group, 1)
        index = None if slots is None else slots[:, None, :, None].expand(batch, w.kv_heads, width, w.head_dim)
        for layer in range(self.layers):
            b = w.blocks[layer]
            x = rms_norm(hidden, b.attention_norm, w.eps)
            q, k, v = F.linear(x, b.qkv, b.qkv_bias).split(sizes, -1)
            q = q.view(batch, width, w.heads, w.head_dim)
            k = k.view(batch, width, w.kv_heads, w.head_dim)
            v = v.view(batch, width, w.kv_heads, w.head_dim)
            if b.q_norm is not None and b.k_norm is not None:
                q, k = rms_norm(q, b.q_norm, w.eps), rms_norm(k, b.k_norm, w.eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if index is None:
                keys[layer, :, :, start:end] = k
                values[layer, :, :, start:end] = v
            else:
                keys[layer].scatter_(2, index, k)
                values[layer].scatter_(2, index, v)
            seen_k, seen_v = keys[layer, :, :, :end], values[layer, :, :, :end]
            if causal:
                # A prompt from the start: the flash kernel knows causality, and heads are repeated once per layer.
                mixed = F.scaled_dot_product_attention(
                    q.transpose(1, 2), seen_k, seen_v, is_causal=True, enable_gqa=group > 1
                ).transpose(1, 2)
            else:
                # The query heads of a group become further queries of their key-value head: nothing is copied.
                packed = q.view(batch, width, w.kv_heads, group, w.head_dim).permute(0, 2, 3, 1, 4)
                packed = packed.reshape(batch, w.kv_heads, group * width, w.head_dim)
                mixed = F.scaled_dot_product_attention(packed, seen_k, seen_v, attn_mask=mask)
                mixed = mixed.view(batch, w.kv_heads, group, width, w.head_dim).permute(0, 3, 1, 2, 4)
            mixed = mixed.reshape(batch, width, w.heads * w.head_dim)
            hidden = hidden + F.linear(mixed, b.out, b.out_bias)
            gate, up = F.linear(rms_norm(hidden, b.mlp_norm, w.eps), b.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, b.down)
        return hidden

    @torch.inference_mode()
    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        keys, values = self.buffers.keys, self.buffers.values
        if keys is not None and values is not None and list(nodes) != list(range(len(nodes))):
            sources = torch.tensor([start + node for node in nodes], dtype=torch.long, device=self.device)
            keys[:, row, :, start : start + len(nodes)] = keys[:, row, :, sources]
            values[:, row, :, start : start + len(nodes)] = values[:, row, :, sources]
        self.lengths[row] = start + len(nodes)
