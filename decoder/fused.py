"""A lean forward pass for Llama-shaped models: fused q/k/v and gate/up projections, and attention that reads views.

Computes what transformers computes (the exactness tests run on both paths) with fewer operations: no copies of keys and
values for grouped heads, no module calls. The weights are shared with the transformers model: its own projections
become views into the fused tensors, so that nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.kv_cache import BUCKET, move_rows
from decoder.linear import Linear
from decoder.sampling import spread
from decoder.target import RowRunner, chain_mask, check_exit, tree_mask
from decoder.transfer import upload

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

_FAMILIES = {"gemma", "llama", "mistral", "mimo", "qwen2", "qwen3"}
"""Families whose layers are the plain ones below; others take the generic path."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Block(nn.Module):
    """Weights of one layer. ``qkv``: H -> (heads + 2 kv_heads) * head_dim, ``gate_up``: H -> 2 I."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biased = projections[0].bias is not None
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.attention_norm = layer.input_layernorm.weight
        bias = _fixed(torch.cat([p.bias for p in projections])) if biased else None
        self.qkv = Linear(_join([p.weight for p in projections]), bias)
        self.q_norm = None if q_norm is None else q_norm.weight
        self.k_norm = None if k_norm is None else k_norm.weight
        self.out = Linear(attention.o_proj.weight, attention.o_proj.bias)
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.gate_up = Linear(_join([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.down = Linear(mlp.down_proj.weight)


def why_not(model: Any) -> str | None:
    """Why ``model`` cannot take the lean path, or None when it can."""
    config = model.config
    if config.model_type not in _FAMILIES:
        return f"{config.model_type} layers are not the plain Llama ones"
    if config.hidden_act not in _ACTIVATIONS:
        return f"its activation is {config.hidden_act}"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have biases"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its positions are scaled by {rope['rope_type']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its positions turn a part of each head only"
    return None


class Weights(nn.Module):
    """The fused weights of a model; built once and shared by every runner on it."""

    def __init__(self, model: Any, scored: Tensor | None = None) -> None:
        """``scored``: ids of the tokens that are scored (``draft_vocabulary``), None: all."""
        super().__init__()
        config, inner = model.config, model.model
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.eps = float(config.rms_norm_eps)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.embedding = inner.embed_tokens.weight
        self.norm = inner.norm.weight
        self.head = Linear(model.lm_head.weight, model.lm_head.bias)
        self.scored = scored
        if scored is not None:
            with torch.inference_mode(False), torch.no_grad():
                bias = model.lm_head.bias
                self.head = Linear(_fixed(model.lm_head.weight[scored]), None if bias is None else _fixed(bias[scored]))
        self.rotary = inner.rotary_emb
        self.activation = _ACTIVATIONS[config.hidden_act]
        # Gemma's norms multiply by one more than their weight, and its embeddings are scaled, in the weights' dtype.
        gemma = config.model_type == "gemma"
        self.rms_norm = shifted_rms_norm if gemma else rms_norm
        self.embedding_scale = float(inner.embed_tokens.embed_scale.to(self.embedding.dtype)) if gemma else 1.0
        with torch.inference_mode(False), torch.no_grad():
            self.blocks = nn.ModuleList([Block(layer) for layer in inner.layers])
        self.stack: list[Block] = list(self.blocks)  # type: ignore[arg-type]

    def run(
        self, ids: Tensor, cos: Tensor, sin: Tensor, layers: int, attend: Attend, taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Hidden states [B, T, H] of ids [B, T] behind ``layers`` layers; cos and sin are [B, T, 1, head_dim].

        ``attend(layer, q, k, v)`` stores keys and values and mixes: q [B, T, heads, d], k and v [B, T, kv_heads, d]
        -> [B, T, heads * d]. ``taps`` is given the state behind each number of layers that it has as a key.
        """
        batch, width = ids.shape
        hidden = F.embedding(ids, self.embedding)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        for layer, b in enumerate(self.stack[:layers]):
            if taps is not None and layer in taps:
                taps[layer] = hidden
            x = self.rms_norm(hidden, b.attention_norm, self.eps)
            q, k, v = b.qkv(x).split(sizes, -1)
            q = q.view(batch, width, self.heads, self.head_dim)
            k = k.view(batch, width, self.kv_heads, self.head_dim)
            v = v.view(batch, width, self.kv_heads, self.head_dim)
            if b.q_norm is not None and b.k_norm is not None:
                q, k = self.rms_norm(q, b.q_norm, self.eps), self.rms_norm(k, b.k_norm, self.eps)
            mixed = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
            hidden = hidden + b.out(mixed)
            gate, up = b.gate_up(self.rms_norm(hidden, b.mlp_norm, self.eps)).chunk(2, -1)
            hidden = hidden + b.down(self.activation(gate) * up)
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm: [..., H] -> [..., H]."""
        return self.rms_norm(hidden, self.norm, self.eps)

    def score(self, normed: Tensor) -> Tensor:
        """The head on normed states: [..., H] -> [..., V]."""
        return spread(self.head(normed), self.scored, self.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., H] -> [..., V]."""
        return self.score(self.normed(hidden))


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _join(parts: Sequence[nn.Parameter]) -> nn.Parameter:
    """One tensor of all rows; the parts become views into it."""
    joined = torch.cat([p.data for p in parts])
    at = 0
    for part in parts:
        part.data = joined[at : at + part.shape[0]]
        at += part.shape[0]
    return _fixed(joined)


class HeadCounts(Protocol):
    """How the projections of a layer are split into attention heads."""

    heads: int
    kv_heads: int
    head_dim: int


def mix(w: HeadCounts, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [B, T, heads, d] over keys and values [B, kv_heads, S, d] -> [B, T, heads * d].

    The query heads of a group become further queries of their key-value head, so that nothing is copied; ``mask``
    [B or 1, 1, T * group, S] is True where a query sees a slot (None: all of them).
    """
    batch, width = q.shape[:2]
    group = w.heads // w.kv_heads
    packed = q.view(batch, width, w.kv_heads, group, w.head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, w.kv_heads, group * width, w.head_dim)
    mixed = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    mixed = mixed.view(batch, w.kv_heads, group, width, w.head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, width, w.heads * w.head_dim)


class Buffers:
    """Keys and values of all layers, [layers, B, kv_heads, capacity, head_dim] each; early exit shares the target's."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.narrowed = False
        """Rows have left: the buffers are views of larger ones."""

    def reserve(self, batch: int, tokens: int) -> None:
        """Make room for ``tokens`` per row; what is there stays."""
        if self.keys is not None and self.keys.shape[3] >= tokens and self.keys.shape[1] == batch:
            return
        w = self.weights
        # Grown by half at least, so that a long text moves its cache a few times only.
        had = self.keys.shape[3] if self.keys is not None and self.keys.shape[1] == batch else 0
        capacity = -(-max(tokens, had + had // 2) // BUCKET) * BUCKET
        shape = (len(w.stack), batch, w.kv_heads, capacity, w.head_dim)
        keys = torch.zeros(shape, dtype=w.embedding.dtype, device=w.embedding.device)
        values = torch.zeros_like(keys)
        if had and self.keys is not None and self.values is not None:
            keys[:, :, :, :had] = self.keys
            values[:, :, :, :had] = self.values
        self.keys, self.values = keys, values

    def keep(self, rows: Sequence[int]) -> None:
        """Only ``rows`` stay, in place: the buffers become views of their first rows."""
        if self.keys is None or self.values is None:
            return
        move_rows(self.keys, self.values, rows, dim=1)
        self.keys, self.values = self.keys[:, : len(rows)], self.values[:, : len(rows)]
        self.narrowed = True

    def restart(self, batch: int) -> None:
        """Before ``batch`` new rows: buffers that hold more rows than they show, or another number, are dropped."""
        if self.narrowed or (self.keys is not None and self.keys.shape[1] != batch):
            self.keys = self.values = None
        self.narrowed = False


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 as transformers does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def shifted_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma's norm: one more than the weight, and rounded only at the end."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


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
        self.layers = len(weights.stack) if layers is None else layers
        self.buffers = buffers or Buffers(weights)
        self.lengths = []

    def reset(self, batch: int) -> None:
        self.buffers.restart(batch)
        self.lengths = [0] * batch

    def short(self, layers: int) -> FusedRunner:
        check_exit(layers, len(self.weights.stack))
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
        final = self.layers
        taps = {i: self.weights.embedding[:0] for i in self.capture if i != final} or None
        hidden = self._layers(ids, positions, slots, mask, start, start + width, taps)
        normed = self.weights.normed(hidden)
        states = [normed if i == final or taps is None else taps[i] for i in self.capture]
        self.captured = torch.cat(states, -1) if states else None
        hidden = normed
        if last:
            at = upload([max(count - 1, 0) for count in counts], self.device)
            hidden = hidden[torch.arange(batch, device=self.device), at][:, None]
        return self.weights.score(hidden)

    def _layers(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
        mask: Tensor | None,
        start: int,
        end: int,
        taps: dict[int, Tensor] | None,
    ) -> Tensor:
        w = self.weights
        keys, values = self.buffers.keys, self.buffers.values
        assert keys is not None
        assert values is not None
        batch, width = ids.shape
        group = w.heads // w.kv_heads
        causal = mask is None and width > 1
        if mask is not None and group > 1:
            mask = mask.repeat(1, 1, group, 1)
        index = None if slots is None else slots[:, None, :, None].expand(batch, w.kv_heads, width, w.head_dim)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if index is None:
                keys[layer, :, :, start:end] = k
                values[layer, :, :, start:end] = v
            else:
                keys[layer].scatter_(2, index, k)
                values[layer].scatter_(2, index, v)
            seen_k, seen_v = keys[layer, :, :, :end], values[layer, :, :, :end]
            if not causal:
                return mix(w, q, seen_k, seen_v, mask)
            # A prompt from the start: the flash kernel knows causality by itself.
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), seen_k, seen_v, is_causal=True, enable_gqa=group > 1
            )
            return mixed.transpose(1, 2).reshape(batch, width, w.heads * w.head_dim)

        cos, sin = w.rotary(w.embedding[:1], positions)
        return w.run(ids, cos[:, :, None], sin[:, :, None], self.layers, attend, taps)

    @torch.inference_mode()
    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        keys, values = self.buffers.keys, self.buffers.values
        if keys is not None and values is not None and list(nodes) != list(range(len(nodes))):
            sources = upload([start + node for node in nodes], self.device)
            keys[:, row, :, start : start + len(nodes)] = keys[:, row, :, sources]
            values[:, row, :, start : start + len(nodes)] = values[:, row, :, sources]
        self.lengths[row] = start + len(nodes)

    def _leading(self, ids: Tensor, counts: list[int]) -> Tensor:
        (rows, width), lengths = ids.shape, self.lengths
        self.buffers.reserve(len(lengths), max(lengths) + width)
        keys, values = self.buffers.keys, self.buffers.values
        assert keys is not None
        assert values is not None
        self.buffers.keys, self.buffers.values, self.lengths = keys[:, :rows], values[:, :rows], lengths[:rows]
        try:
            # This path whatever the subclass: recorded and compiled passes know the whole buffers only.
            return FusedRunner._pass(self, ids, counts, True, None)
        finally:
            self.buffers.keys, self.buffers.values, self.lengths = keys, values, lengths

    def _keep_rows(self, rows: Sequence[int]) -> None:
        self.buffers.keep(rows)

    @torch.inference_mode()
    def wipe(self, row: int) -> None:
        if self.buffers.keys is not None and self.buffers.values is not None:
            self.buffers.keys[:, row] = 0
            self.buffers.values[:, row] = 0
