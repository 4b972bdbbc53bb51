"""Keys and values of a transformers model, in buffers that rows can be rolled back in, moved within and taken out of.

Slot s of a row holds its token at position s. Buffers grow in buckets, and attention only ever reads up to the longest
row, so the allocated size changes nothing that is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET = 256
"""Cache buffers grow to a multiple of this many tokens."""


@dataclass
class Plan:
    """Where the pass that is running writes its keys and values."""

    start: int = 0
    width: int = 0
    slots: Tensor | None = None
    """[B, T] slots when rows differ in length, else None (all rows write at ``start``)."""
    end: int = 0


class _Layer(CacheLayerMixin):
    """One layer's buffers [B, heads, capacity, head_dim]; reads are views of what exists."""

    is_sliding = False
    is_croppable = True

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._reserve(key_states, value_states, BUCKET)
        self.is_initialized = True

    def _reserve(self, key: Tensor, value: Tensor, tokens: int) -> None:
        # Grown by half at least, so that a long text moves its cache a few times only.
        had = 0 if self.keys is None else self.keys.shape[2]
        capacity = -(-max(tokens, had + had // 2) // BUCKET) * BUCKET
        batch, heads = key.shape[:2]
        keys = key.new_zeros((batch, heads, capacity, key.shape[3]))
        values = value.new_zeros((batch, heads, capacity, value.shape[3]))
        if self.keys is not None and self.values is not None:
            keys[:, :, :had] = self.keys
            values[:, :, :had] = self.values
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.room(key_states, value_states)
        plan = self.plan
        if plan.slots is None:
            keys[:, :, plan.start : plan.start + plan.width] = key_states
            values[:, :, plan.start : plan.start + plan.width] = value_states
        else:
            index = plan.slots[:, None, :, None]
            keys.scatter_(2, index.expand_as(key_states), key_states)
            values.scatter_(2, index.expand_as(value_states), value_states)
        return keys[:, :, : plan.end], values[:, :, : plan.end]

    def room(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers [B, heads, capacity, head_dim] with room for what the plan says; ``key`` and ``value`` are of
        their kind and may be empty."""
        if self.keys is None or self.keys.shape[2] < self.plan.end:
            self._reserve(key, value, max(self.plan.end, BUCKET))
            self.is_initialized = True
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def places(self, batch: int, width: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where the plan writes, [B, T], and what each token sees, [B * T, end]; ``mask`` None: all before it."""
        plan = self.plan
        slots = torch.arange(plan.start, plan.start + width).expand(batch, width) if plan.slots is None else plan.slots
        if mask is None:
            return slots, torch.arange(plan.end) <= slots.reshape(-1, 1)
        return slots, mask.expand(batch, 1, width, plan.end).reshape(batch * width, plan.end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.end, 0

    def get_seq_length(self) -> int:
        return self.plan.start

    def get_max_length(self) -> int:
        return -1

    def move(self, row: int, sources: Tensor, start: int) -> None:
        """Copy slots ``sources`` of a row to ``start``, ``start + 1``, ..."""
        if self.keys is None or self.values is None:
            return
        n = sources.shape[0]
        self.keys[row, :, start : start + n] = self.keys[row, :, sources]
        self.values[row, :, start : start + n] = self.values[row, :, sources]

    def lead(self, rows: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Show only the first ``rows`` of ``batch`` rows, with room for ``tokens`` each; returns the buffers of all."""
        assert self.keys is not None
        assert self.values is not None
        assert self.keys.shape[0] == batch
        if self.keys.shape[2] < tokens:
            self._reserve(self.keys, self.values, tokens)
        whole = (self.keys, self.values)
        self.keys, self.values = self.keys[:rows], self.values[:rows]
        return whole

    def keep(self, rows: Sequence[int]) -> None:
        """Only ``rows`` stay, in place: the buffers become views of their first rows."""
        if self.keys is None or self.values is None:
            return
        move_rows(self.keys, self.values, rows, dim=0)
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]


def move_rows(keys: Tensor, values: Tensor, rows: Sequence[int], *, dim: int) -> None:
    """Copy ``rows`` (increasing) of axis ``dim`` to its beginning. Whole rows: a slot that a row has not written yet
    must not show it what another row left there."""
    for to, row in enumerate(rows):
        if to != row:
            keys.select(dim, to).copy_(keys.select(dim, row))
            values.select(dim, to).copy_(values.select(dim, row))


@dataclass
class KVCache:
    """The buffers of all layers; early exit shares the target's."""

    layers: int
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        self.rows = [_Layer(self.plan) for _ in range(self.layers)]
        self.cache = Cache(layers=list(self.rows))

    def clear(self) -> None:
        """Drop the buffers."""
        for layer in self.rows:
            layer.keys = layer.values = None
            layer.is_initialized = False
