"""A causal language model with a KV cache that can be rolled back: the target, and the draft of ``draft-model``.

B rows decode together, each with its own length. Slot s of a row's cache holds its token at position s, so a row is
rolled back by moving its length: what lies behind it is masked, and overwritten by the next pass. Buffers grow in
buckets, and attention only ever reads up to the longest row, so the allocated size changes nothing that is computed.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.kv_cache import KVCache
from decoder.transfer import upload, upload_tensor

PREFILL_CHUNK = 1024
"""Prompt tokens of a row per forward pass: bounds the memory of a long prompt's mask."""
PREFILL_ROWS = 8
"""Rows that may have so many of them in one pass; more rows get fewer each."""
WORTH_A_PASS = 64
"""Padding tokens that a further pass must spare."""


class Runner(Protocol):
    """What the engine and the proposers ask of a model. Tests put tables in its place.

    ``lengths[b]`` is the number of row b's tokens that are in the cache.

    ``capture`` names hidden states that every pass leaves in ``captured`` [B, T, len(capture) * H], side by side: i is
    the residual stream behind the first i layers, the number of layers is the state behind the final norm (numbered as
    transformers' ``hidden_states``). Heads that read the target's mind (EAGLE, MTP, Medusa) ask for them.
    """

    vocab_size: int
    context: int
    device: str
    lengths: list[int]
    capture: tuple[int, ...]
    captured: Tensor | None

    @property
    def logits_device(self) -> str:
        """Where logits come back, and everything is verified: the device, or the CPU where it lacks float64 (mps)."""

    def reset(self, batch: int) -> None:
        """Forget everything and start ``batch`` empty rows."""

    def forward(
        self,
        ids: Tensor,
        counts: Sequence[int] | None = None,
        *,
        last: bool = False,
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        """Append ids [B, T] behind each row and return logits [B, T, V] of all positions.

        ``counts`` gives the real tokens of each row (the rest is padding on the right, default T). ``last`` returns
        [B, 1, V] instead: each row's last real position. ``parents`` (T - 1 entries, only with B = 1) makes ids[1:] a
        tree below ids[0].
        """

    def rollback(self, lengths: Sequence[int]) -> None:
        """Shorten every row to ``lengths``; never lengthens."""

    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Keep tree nodes: move the tokens ``start + n`` for n in ``nodes`` to ``start``, ``start + 1``, ..."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows`` (increasing indices) with their cache and captured states; they become rows 0, 1, ..."""

    def wipe(self, row: int) -> None:
        """Zero a row's slots. Needed after a pass that was not numbers: attention masks a slot by weight 0, and
        0 * NaN would be NaN for whoever uses the slot next."""


class RowRunner(ABC):
    """What every real runner shares: rows with lengths of their own, long prompts in chunks, rolling back."""

    context: int
    device: str
    vocab_size: int
    lengths: list[int]
    path: str
    """Which implementation computes the passes; recorded in every run."""
    capture: tuple[int, ...] = ()
    captured: Tensor | None = None

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        counts: Sequence[int] | None = None,
        *,
        last: bool = False,
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        """See ``Runner.forward``."""
        batch, width = ids.shape
        ids = ids.to(self.device)
        counts = [width] * batch if counts is None else list(counts)
        if parents is not None and batch != 1:
            raise ValueError("trees are decoded one row at a time")
        parts = prefill_parts(counts, width) if last else []
        if len(parts) > 1:
            return self._in_parts(ids, counts, parts)
        logits = self._pass(ids, counts, last, parents)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits.to(self.logits_device)

    @property
    def logits_device(self) -> str:
        """See ``Runner.logits_device``."""
        return "cpu" if self.device.startswith("mps") else self.device

    def _in_parts(self, ids: Tensor, counts: list[int], parts: Sequence[tuple[int, int]]) -> Tensor:
        """Long or ragged prompts, part by part; rows at the end of the list that are done take no further part."""
        batch = ids.shape[0]
        result: Tensor | None = None
        states = []
        for start, end in parts:
            here = [min(max(count - start, 0), end - start) for count in counts]
            # The first part makes the buffers, for all rows.
            rows = max(row + 1 for row, count in enumerate(here) if count) if start else batch
            part = ids[:rows, start:end]
            logits = self._pass(part, here, True, None) if rows == batch else self._leading(part, here[:rows])
            self.lengths = [length + count for length, count in zip(self.lengths, here, strict=True)]
            logits = logits.to(self.logits_device)
            if self.captured is not None:
                states.append(F.pad(self.captured, (0, 0, 0, 0, 0, batch - rows)))
            if result is None:
                result = logits.new_zeros(batch, 1, logits.shape[-1])
            alive = upload([count > 0 for count in here[:rows]], self.logits_device, torch.bool)
            result[:rows] = torch.where(alive[:, None, None], logits, result[:rows])
        assert result is not None
        self.captured = torch.cat(states, 1) if states else None
        return result

    def rollback(self, lengths: Sequence[int]) -> None:
        """See ``Runner.rollback``."""
        for row, length in enumerate(lengths):
            if length > self.lengths[row]:
                raise ValueError(f"row {row} has {self.lengths[row]} tokens and cannot be rolled back to {length}")
        self.lengths = list(lengths)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """See ``Runner.select``."""
        self._keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        if self.captured is not None:
            self.captured = self.captured.index_select(0, upload(list(rows), self.device))

    @abstractmethod
    def _keep_rows(self, rows: Sequence[int]) -> None:
        """``select`` on the cache's buffers."""

    @abstractmethod
    def wipe(self, row: int) -> None:
        """See ``Runner.wipe``."""

    @abstractmethod
    def _leading(self, ids: Tensor, counts: list[int]) -> Tensor:
        """``_pass`` with ``last`` for the first rows only, as many as ``ids`` has; the others stay as they are."""

    @abstractmethod
    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        """One forward pass behind ``lengths``: logits [B, T, V], or [B, 1, V] of each row's last real position."""

    @abstractmethod
    def reset(self, batch: int) -> None:
        """Forget everything and start ``batch`` empty rows."""

    @abstractmethod
    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """See ``Runner.keep_path``."""

    @abstractmethod
    def short(self, layers: int) -> RowRunner:
        """The first ``layers`` layers plus norm and head, on the same weights and cache. ValueError: cannot be cut."""


class ModelRunner(RowRunner):
    """A transformers causal model: the generic path, for any architecture with plain attention."""

    path = "eager"

    def __init__(self, model: Any, *, context: int, device: str, shared: KVCache | None = None) -> None:
        self.model = model
        self.context = context
        self.device = device
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.lengths = []
        self.kv = shared or KVCache(int(model.config.get_text_config().num_hidden_layers))
        # Newer transformers call the argument "cache", older ones "past_key_values".
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._batch = 0
        # Attention that is written out adds its mask to the scores; the fused kernel takes what is seen as it is.
        self._adds_mask = getattr(model.config, "_attn_implementation", "sdpa") == "eager"

    def reset(self, batch: int) -> None:
        if batch != self._batch:
            self.kv.clear()
            self._batch = batch
        self.lengths = [0] * batch

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        positions, mask = self._prepare(width, parents)
        if max(self.lengths) + width > self.context:
            # Padding behind a row that is nearly full has no position; models with a table of positions need one.
            positions = positions.clamp_max(self.context - 1)
        if mask is not None and self._adds_mask:
            mask = torch.zeros_like(mask, dtype=self.model.dtype).masked_fill(~mask, torch.finfo(self.model.dtype).min)
        # Rows of different length end in different columns; the head computes each of those columns once.
        ends = sorted({max(count - 1, 0) for count in counts})
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=upload(ends, self.device) if last else 0,
            output_hidden_states=bool(self.capture),
            **{self._cache_name: self.kv.cache},
        )
        self.captured = torch.cat([output.hidden_states[i] for i in self.capture], -1) if self.capture else None
        if not last or len(ends) == 1:
            return output.logits
        column = upload([ends.index(max(count - 1, 0)) for count in counts], self.device)
        return output.logits[torch.arange(batch, device=self.device), column][:, None]

    def _prepare(self, width: int, parents: Sequence[int | None] | None) -> tuple[Tensor, Tensor | None]:
        """Positions [B, T], the boolean mask [B, 1, T, S] (None where plain causality says it), and the write plan."""
        plan = self.kv.plan
        start = max(self.lengths)
        plan.start, plan.width, plan.end, plan.slots = start, width, start + width, None
        if parents is not None:
            return tree_mask(start, width, parents, self.device)
        positions, mask = chain_mask(self.lengths, width, self.device)
        if min(self.lengths) != start:
            plan.slots = positions
        return positions, mask

    @torch.inference_mode()
    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        sources = upload([start + node for node in nodes], self.device)
        if len(nodes) and list(nodes) != list(range(len(nodes))):
            for layer in self.kv.rows:
                layer.move(row, sources, start)
        self.lengths[row] = start + len(nodes)

    def _leading(self, ids: Tensor, counts: list[int]) -> Tensor:
        (rows, width), lengths = ids.shape, self.lengths
        whole = [layer.lead(rows, len(lengths), max(lengths) + width) for layer in self.kv.rows]
        self.lengths = lengths[:rows]
        try:
            return self._pass(ids, counts, True, None)
        finally:
            self.lengths = lengths
            for layer, (keys, values) in zip(self.kv.rows, whole, strict=True):
                layer.keys, layer.values = keys, values

    def _keep_rows(self, rows: Sequence[int]) -> None:
        for layer in self.kv.rows:
            layer.keep(rows)
        # The buffers still hold the rows that left: another batch, also one of this size, starts with new ones.
        self._batch = -1

    @torch.inference_mode()
    def wipe(self, row: int) -> None:
        for layer in self.kv.rows:
            if layer.keys is not None and layer.values is not None:
                layer.keys[row] = 0
                layer.values[row] = 0

    def short(self, layers: int) -> ModelRunner:
        # Shares every weight: only the module list is shorter.
        inner = getattr(self.model, "model", None)
        stack = getattr(inner, "layers", None)
        if inner is None or stack is None:
            raise ValueError("its layers are not where early exit expects them")
        check_exit(layers, len(stack))
        short_inner = copy.copy(inner)
        short_inner._modules = dict(inner._modules)
        short_inner._modules["layers"] = stack[:layers]
        short_inner.config = copy.copy(inner.config)
        short_inner.config.num_hidden_layers = layers
        short = copy.copy(self.model)
        short._modules = dict(self.model._modules)
        short._modules["model"] = short_inner
        runner = ModelRunner(short, context=self.context, device=self.device, shared=self.kv)
        runner._batch = self._batch
        return runner


def prefill_parts(counts: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Where to cut a pass over ``width`` columns, of which row b needs ``counts[b]``: bounded in size, and at the ends
    of rows where what they would pad is worth a pass of its own."""
    parts = []
    start = 0
    while start < width:
        rows = sum(count > start for count in counts) or 1
        end = min(width, start + min(PREFILL_CHUNK, max(WORTH_A_PASS, PREFILL_ROWS * PREFILL_CHUNK // rows)))
        for cut in sorted({count for count in counts if start < count < end}):
            if sum(count <= cut for count in counts) * (end - cut) >= WORTH_A_PASS:
                end = cut
                break
        parts.append((start, end))
        start = end
    return parts


def check_exit(layers: int, total: int) -> None:
    """Raise ValueError for an exit layer that the model does not have."""
    if not 1 <= layers < total:
        raise ValueError(f"it has {total} layers: exit after 1 to {total - 1}")


def chain_mask(lengths: Sequence[int], width: int, device: str) -> tuple[Tensor, Tensor | None]:
    """Positions [B, T] of ``width`` tokens behind rows of ``lengths`` and the mask [B or 1, 1, T, S] of what they see.

    The mask is None where causality alone says it: a single token behind rows of one length, or a prompt's start.
    """
    start = max(lengths)
    ahead = torch.arange(width, device=device)
    if min(lengths) == start:
        positions = (ahead + start).expand(len(lengths), width)
        if width == 1 or start == 0:
            return positions, None
        seen = torch.arange(start + width, device=device) <= positions[0, :, None]
        return positions, seen[None, None]
    positions = upload(list(lengths), device)[:, None] + ahead
    return positions, torch.arange(start + width, device=device) <= positions[:, None, :, None]


def tree_mask(start: int, width: int, parents: Sequence[int | None], device: str) -> tuple[Tensor, Tensor]:
    """Positions [1, T] and mask [1, 1, T, start + T] of a root and a tree of T - 1 nodes below it (one row)."""
    sees = torch.zeros(width, start + width, dtype=torch.bool)
    sees[:, : start + 1] = True
    depths = [0]
    for node, parent in enumerate(parents, start=1):
        above = 0 if parent is None else parent + 1
        sees[node, start:] |= sees[above, start:]
        sees[node, start + node] = True
        depths.append(depths[above] + 1)
    return upload([depths], device) + start, upload_tensor(sees[None, None], device)
