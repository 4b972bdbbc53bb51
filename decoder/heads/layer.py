"""One Llama-shaped layer of a head, its rotary tables, and attention over a cache: the lean forward of ``fused``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.compiled import StepSet
from decoder.fused import mix, rotate
from decoder.heads.sizes import Sizes
from decoder.kernel import WIDEST, why_not_dtype
from decoder.kv_cache import KVCache
from decoder.linear import Linear


def frozen(tensor: Tensor) -> nn.Parameter:
    """A weight that is never trained here."""
    return nn.Parameter(tensor, requires_grad=False)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, as one operation: a draft need not round as transformers does."""
    return F.rms_norm(x, weight.shape, weight, eps)


class HeadLayer(nn.Module):
    """``tensors`` by the layer's canonical names (``self_attn.q_proj.weight``, ...), on their device, in their dtype.

    The attention reads ``inputs`` values per token: the hidden size, or twice that in EAGLE-3.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sizes: Sizes, index: int) -> None:
        super().__init__()
        self.index = index
        self.held: StepSet | None = None
        """The kernel for this layer, once it is built; it takes over between runs."""
        self.heads, self.kv_heads, self.head_dim, self.eps = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.eps
        self.splits = tuple(n * sizes.head_dim for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))

        def some(name: str) -> nn.Parameter | None:
            return frozen(tensors[name]) if name in tensors else None

        def joined(names: list[str]) -> nn.Parameter:
            return frozen(torch.cat([tensors[name] for name in names]))

        qkv = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
        bias = joined([name + ".bias" for name in qkv]) if qkv[0] + ".bias" in tensors else None
        self.qkv = Linear(joined([name + ".weight" for name in qkv]), bias)
        self.q_norm, self.k_norm = some("self_attn.q_norm.weight"), some("self_attn.k_norm.weight")
        self.out = Linear(frozen(tensors["self_attn.o_proj.weight"]), some("self_attn.o_proj.bias"))
        self.attention_norm = some("input_layernorm.weight")
        self.mlp_norm = frozen(tensors["post_attention_layernorm.weight"])
        self.gate_up = Linear(joined(["mlp.gate_proj.weight", "mlp.up_proj.weight"]))
        self.down = Linear(frozen(tensors["mlp.down_proj.weight"]))

    def read(self, hidden: Tensor) -> Tensor:
        """Hidden states as this layer's attention reads them: normed, where it has such a norm."""
        return hidden if self.attention_norm is None else norm(hidden, self.attention_norm, self.eps)

    def forward(
        self, read: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """``read`` [B, T, inputs] is what the attention reads (normed), ``residual`` [B, T, H] what it adds to.

        ``mask`` [B or 1, 1, T, S] is True where a token sees a slot; None: plain causality.
        """
        batch, width = read.shape[:2]
        fast = self.held.steps.get(WIDEST) if self.held is not None else None
        if fast is not None and batch * width <= WIDEST:
            rows = cache.rows[self.index]
            some = residual.new_empty(batch, self.kv_heads, 0, self.head_dim)
            keys, values = rows.room(some, some)
            slots, sees = rows.places(batch, width, mask)
            return fast(read, residual, rope, slots, sees, keys, values)
        q, k, v = self.qkv(read).split(self.splits, -1)
        q = q.view(batch, width, self.heads, self.head_dim)
        k = k.view(batch, width, self.kv_heads, self.head_dim)
        v = v.view(batch, width, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm(q, self.q_norm, self.eps), norm(k, self.k_norm, self.eps)
        q, k = rotate(q, *rope), rotate(k, *rope)
        keys, values = cache.rows[self.index].update(k.transpose(1, 2), v.transpose(1, 2))
        hidden = residual + self.out(self._mix(q, keys, values, mask))
        gate, up = self.gate_up(norm(hidden, self.mlp_norm, self.eps)).chunk(2, -1)
        result: Tensor = hidden + self.down(F.silu(gate) * up)
        return result

    def _mix(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        batch, width = q.shape[:2]
        group = self.heads // self.kv_heads
        if mask is None and width > 1:
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=group > 1
            )
            return mixed.transpose(1, 2).reshape(batch, width, -1)
        if mask is not None and group > 1:
            mask = mask.repeat(1, 1, group, 1)
        return mix(self, q, keys, values, mask)


class Output(Linear):
    """A head's output matrix: states [..., H] -> logits [..., D]; float32 where the kernel makes them."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.held: StepSet | None = None
        """The kernel for this matrix, once it is built; it takes over between runs."""

    def only(self, ids: Tensor) -> Output:
        """A copy of the rows ``ids`` [D]."""
        return Output(self.weight[ids], None if self.bias is None else self.bias[ids])

    def why_not_fast(self) -> str | None:
        """Why the kernel cannot compute this product, or None."""
        same = self.bias is None or self.bias.dtype == self.weight.dtype
        if not self.weight.is_contiguous() or not same:
            return "its weights do not lie row by row, or are of several dtypes"
        return why_not_dtype(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        fast = self.held.steps.get(WIDEST) if self.held is not None else None
        if fast is not None and x.numel() <= WIDEST * x.shape[-1]:
            logits: Tensor = fast(x)
            return logits
        return super().forward(x)


class Rope:
    """Cosines and sines by position, from a table that grows with the text."""

    def __init__(self, sizes: Sizes, like: Tensor) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        settings: dict[str, Any] = dict(sizes.rope)
        config = LlamaConfig(
            hidden_size=sizes.heads * sizes.head_dim,
            num_attention_heads=sizes.heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=sizes.context,
            **settings,
        )
        self._rotary = LlamaRotaryEmbedding(config).to(like.device)
        self._like = like[:1]
        self._table: tuple[Tensor, Tensor] | None = None
        self._size = 0

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """``positions`` [B, T], all below ``end`` -> cosines and sines [B, T, 1, head_dim]."""
        if end > self._size:
            self._size = max(512, 2 * end)
            every = torch.arange(self._size, device=self._like.device)[None]
            cos, sin = self._rotary(self._like, every)
            self._table = cos[0][:, None], sin[0][:, None]
        assert self._table is not None
        return self._table[0][positions], self._table[1][positions]
