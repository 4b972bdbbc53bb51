"""The decode step that is compiled: the fused forward of a fixed number of tokens over a cache of any capacity.

A maker (``target_step``) builds a module and example inputs from a recipe's options; ``decoder.packages`` exports and
compiles it. Whatever changes here, or in ``decoder.fused``, makes other packages.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from decoder.errors import ModelError
from decoder.fused import Weights, mix

REACH = 32_768
"""Positions that a compiled step knows at most (its rotary table); longer texts go on eagerly."""
TARGET_WIDTHS = (1, 5, 9)
"""Tokens per pass of the target: plain decoding, k up to 4, k up to 8. Widths between are padded up."""
DRAFT_WIDTHS = (1, 2)
"""A draft takes one token per pass, and two after a full accept."""
FEWEST_SEEN = 2
"""Slots that a pass looks at, at least: the exporter takes a size of one for a constant."""
_SLOTS = 256
"""Of the example only."""
EXIT_WIDTHS = (1,)
"""Early exit shares the target's cache, which is never behind."""


def tapped(layers: int) -> tuple[int, ...]:
    """The hidden states that a step of so many layers returns beside its logits, numbered as ``Runner.capture``.

    EAGLE-3's usual three, and the state behind the final norm, which EAGLE, MTP and Medusa heads read.
    """
    return tuple(sorted({i for i in (2, layers // 2, layers - 3) if 0 <= i < layers} | {layers}))


class StepModule(nn.Module):
    """The first ``layers`` layers of a model, its norm and its head, for positions below ``reach``.

    How many slots there are, and how many of them a pass looks at, may differ from call to call: attention costs what
    the text so far asks for, and a cache can grow.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, weights: Weights, reach: int, layers: int) -> None:
        super().__init__()
        self.weights = weights
        self.layers = layers
        cos, sin = weights.rotary(weights.embedding[:1], torch.arange(reach)[None])
        self.register_buffer("cos", cos[0].clone())
        self.register_buffer("sin", sin[0].clone())

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> list[Tensor]:
        """ids [1, T] at ``positions`` [T], written to ``slots`` [T] of keys and values ([1, kv_heads, S, d] per layer).

        ``mask`` [T * group, N], N <= S, is True where a token sees one of the first N slots. Returns logits [1, T, V]
        and the states [1, T, H] that ``tapped`` names.
        """
        w, seen = self.weights, mask.shape[-1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer].index_copy_(2, slots, k.transpose(1, 2))
            values[layer].index_copy_(2, slots, v.transpose(1, 2))
            return mix(w, q, keys[layer][:, :, :seen], values[layer][:, :, :seen], mask[None, None])

        taps = dict.fromkeys(tapped(self.layers)[:-1], w.embedding)
        cos, sin = self.cos[positions][None, :, None], self.sin[positions][None, :, None]
        normed = w.normed(w.run(ids, cos, sin, self.layers, attend, taps))
        return [w.score(normed), *(taps[i] for i in sorted(taps)), normed]


def target_step(
    source: str, dtype: str, *, width: int, reach: int, layers: int = 0, revision: str = ""
) -> tuple[Any, Any, dict[str, Any]]:
    """(module, example inputs, dynamic shapes by name) of a causal model's step for texts of up to ``reach`` tokens;
    ``layers`` > 0 is the early exit's short model."""
    from decoder.loading import load

    if revision:
        os.environ["HF_HUB_OFFLINE"] = "1"  # what was downloaded is what is compiled
    loaded = load(source, dtype, "cpu")
    if revision and loaded.revision != revision:
        raise ModelError(f"{source} is here in another revision than {revision}")
    weights = Weights(loaded.model)
    used = layers or len(weights.stack)
    weights.blocks, weights.stack = weights.blocks[:used], weights.stack[:used]
    shape = (1, weights.kv_heads, _SLOTS, weights.head_dim)
    keys = [torch.zeros(shape, dtype=weights.embedding.dtype) for _ in range(used)]
    example = (
        torch.zeros(1, width, dtype=torch.long),
        torch.arange(width),
        torch.arange(width),
        torch.ones(width * (weights.heads // weights.kv_heads), _SLOTS // 2, dtype=torch.bool),
        keys,
        [torch.zeros_like(k) for k in keys],
    )
    seen, slots = Dim("seen", min=FEWEST_SEEN, max=2 * REACH), Dim("slots", min=FEWEST_SEEN, max=2 * REACH)
    dynamic = {"mask": {1: seen}, "keys": [{2: slots}] * used, "values": [{2: slots}] * used}
    step = StepModule(weights, reach + width, used).eval()
    return step, example, {name: dynamic.get(name) for name in ("ids", "positions", "slots", "mask", "keys", "values")}
