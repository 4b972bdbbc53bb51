"""The lean path with recorded passes (CUDA graphs), so that the host launches one thing a pass instead of hundreds.

Recorded for passes behind a prompt: one token (decode), two (a draft that catches up), and verification, for up to 32
rows; widths and batches between are padded up. Prompts, trees and whatever is wider run eagerly on the same cache.

A recording is fixed to addresses and shapes: ids and places are copied into buffers of its own before each run, keys
and values lie in layouts of a few capacities (``GraphBuffers``), and attention reads a whole layout under a mask.
Rolling back moves a counter, as on every path. Not run on a GPU so far: the CPU tests exercise everything but CUDA.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.capture import Capture, CudaCapture, Outputs, RerunCapture, Work, masked_attention
from decoder.fused import Buffers, FusedRunner, Weights, mix
from decoder.kv_cache import move_rows
from decoder.target import check_exit
from decoder.transfer import staged

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 5, 9, 17, 33)
"""Tokens per pass: decode, a draft's catch-up, and verification of up to 2, 4, 8, 16 and 32 drafts."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Rows per pass."""
FIRST_CAPACITY = 512
LIMIT = 48
"""Recordings kept; the one that was not used for longest goes first."""


def pad(size: int, sizes: Sequence[int]) -> int:
    """The least of ``sizes`` (increasing) that ``size`` fits into; 0 when it is larger than all."""
    return next((s for s in sizes if s >= size), 0)


def capacity_for(tokens: int) -> int:
    """Slots per row for ``tokens``: 512, 768, 1024, 1536, 2048, 3072, ... A third is unused at most, and a long text
    changes its recordings a few times only."""
    capacity = FIRST_CAPACITY
    while capacity < tokens:
        capacity = capacity * 3 // 2 if capacity & (capacity - 1) == 0 else capacity // 3 * 4
    return capacity


@dataclass(frozen=True, slots=True)
class Key:
    """What a recording is fixed to. ``layers`` is less than the model's for an early exit."""

    layers: int
    rows: int
    width: int
    capacity: int
    capture: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """``replay`` runs it; ``work`` is kept because it holds every tensor whose address was recorded."""

    replay: Work
    work: Work


class Recordings:
    """The recordings over one memory, with the buffers that feed them; a target and its early exit share them."""

    def __init__(self, capture: Capture, device: str, limit: int = LIMIT) -> None:
        self.capture, self.device, self.limit = capture, device, limit
        self.why_off: str | None = None
        """Why nothing is recorded any more."""
        self._kept: OrderedDict[Key, Recording] = OrderedDict()
        self._inputs: dict[tuple[int, int], Inputs] = {}

    def inputs(self, rows: int, width: int) -> Inputs:
        """The buffers that a pass of this size reads."""
        if (rows, width) not in self._inputs:
            self._inputs[rows, width] = Inputs.empty(rows, width, self.device)
        return self._inputs[rows, width]

    def run(self, key: Key, work: Callable[[], Work]) -> Outputs | None:
        """The outputs of a pass, recorded at first; they last until the next one. None: it cannot be recorded, and
        from now on nothing is."""
        recording = self._kept.get(key)
        if recording is None:
            made = work()
            try:
                recording = Recording(self.capture.record(made), made)
            except RuntimeError as error:  # out of memory, or something in the pass that a graph cannot hold
                self._give_up(error)
                return None
            self._kept[key] = recording
            if len(self._kept) > self.limit:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return recording.replay()

    def clear(self) -> None:
        """Drop everything that was recorded, because its memory moves."""
        if self._kept:
            self._kept.clear()
            self.capture.forget()

    def __len__(self) -> int:
        return len(self._kept)

    def _give_up(self, error: RuntimeError) -> None:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        memory = isinstance(error, torch.OutOfMemoryError)
        self.why_off = "there was no memory left to record one" if memory else first[0][:200]
        log.warning("decoding goes on without CUDA graphs: %s", self.why_off)
        self.clear()
        self._inputs.clear()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What changes between two runs of a recording. ``ids`` [R, W]; ``place`` [R, 2]: tokens in the row's cache, and
    the column of its last real token."""

    ids: Tensor
    place: Tensor
    row: Tensor
    """0, 1, ..., R - 1."""

    @classmethod
    def empty(cls, rows: int, width: int, device: str) -> Inputs:
        """Zeros: any id and any place are safe to compute."""
        ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        return cls(ids, ids.new_zeros(rows, 2), torch.arange(rows, device=device))

    def fill(self, ids: Tensor, lengths: Sequence[int], counts: Sequence[int], device: str) -> None:
        """Take over ids [B, T] and where they go; rows and columns beyond are padding that nobody reads."""
        batch, width = ids.shape
        self.ids[:batch, :width].copy_(ids)
        place = [[length, max(count - 1, 0)] for length, count in zip(lengths, counts, strict=True)]
        place += [[0, 0]] * (self.place.shape[0] - batch)
        self.place.copy_(staged(place, device), non_blocking=True)


class GraphBuffers(Buffers):
    """Keys and values in layouts [layers, R, kv_heads, capacity, head_dim] over one memory, which only ever grows.

    A layout lies at the same addresses whenever it comes back, so its recordings stay good. ``keys`` and ``values`` are
    the first B of its R rows. Slots that were not written are zeros: they are read with weight 0, and 0 * NaN is NaN.
    """

    def __init__(self, weights: Weights, recordings: Recordings) -> None:
        super().__init__(weights)
        self.recordings = recordings
        self.layout: tuple[Tensor, Tensor] | None = None
        self._memory: tuple[Tensor, Tensor] | None = None

    def reserve(self, batch: int, tokens: int) -> None:
        """See ``Buffers.reserve``; a row gets one of the capacities."""
        keys, values = self.keys, self.values
        if keys is None or values is None or keys.shape[1] != batch:
            self._lay_out(batch, capacity_for(tokens), None)
        elif keys.shape[3] < tokens:
            self._lay_out(batch, capacity_for(tokens), (keys.clone(), values.clone()))

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Buffers.keep``; the layout shrinks once fewer rows fit a smaller batch."""
        if self.keys is None or self.values is None:
            return
        move_rows(self.keys, self.values, rows, dim=1)
        before = self.keys.shape[1]
        keys, values = self.keys[:, : len(rows)], self.values[:, : len(rows)]
        if pad(len(rows), BATCHES) != pad(before, BATCHES):
            self._lay_out(len(rows), keys.shape[3], (keys.clone(), values.clone()))
        else:
            self.keys, self.values = keys, values

    def restart(self, batch: int) -> None:
        """See ``Buffers.restart``: the next pass chooses a layout."""
        self.keys = self.values = self.layout = None

    def _lay_out(self, batch: int, capacity: int, content: tuple[Tensor, Tensor] | None) -> None:
        w = self.weights
        shape = (len(w.stack), pad(batch, BATCHES) or batch, w.kv_heads, capacity, w.head_dim)
        size = torch.Size(shape).numel()
        self.keys = self.values = self.layout = None
        if self._memory is None or self._memory[0].numel() < size:
            self.recordings.clear()
            self._memory = None  # given back before more is asked for
            flat = torch.empty(size, dtype=w.embedding.dtype, device=w.embedding.device)
            self._memory = (flat, torch.empty_like(flat))
        keys, values = (memory[:size].view(shape).zero_() for memory in self._memory)
        if content is not None:
            had = content[0].shape[3]
            keys[:, :batch, :, :had], values[:, :batch, :, :had] = content
        self.layout = (keys, values)
        self.keys, self.values = keys[:, :batch], values[:, :batch]


class GraphRunner(FusedRunner):
    """The lean path with recorded passes; ``recordings`` and ``buffers`` are another runner's for an early exit."""

    def __init__(
        self,
        weights: Weights,
        recordings: Recordings,
        *,
        context: int,
        device: str,
        buffers: GraphBuffers | None = None,
        layers: int | None = None,
    ) -> None:
        self.store = buffers or GraphBuffers(weights, recordings)
        super().__init__(weights, context=context, device=device, buffers=self.store, layers=layers)
        self.recordings = recordings
        self._rope: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def path(self) -> str:  # type: ignore[override]
        """What computes the passes; changes once, should recording turn out to be impossible."""
        return FusedRunner.path if self.recordings.why_off else self.recordings.capture.path

    def path_note(self) -> str | None:
        """Why passes are not recorded, or None while they are."""
        off = self.recordings.why_off
        return None if off is None else f"CUDA graphs are off: {off}"

    def short(self, layers: int) -> GraphRunner:
        check_exit(layers, len(self.weights.stack))
        return GraphRunner(
            self.weights,
            self.recordings,
            context=self.context,
            device=self.device,
            buffers=self.store,
            layers=layers,
        )

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        (batch, width), start = ids.shape, max(self.lengths)
        padded, rows = pad(width, WIDTHS), pad(batch, BATCHES)
        if start == 0 or parents is not None or not padded or not rows or self.recordings.why_off:
            return super()._pass(ids, counts, last, parents)
        self.store.reserve(batch, start + padded)
        assert self.store.layout is not None
        keys, values = self.store.layout
        inputs = self.recordings.inputs(rows, padded)
        inputs.fill(ids, self.lengths, counts, self.device)
        key = Key(self.layers, rows, padded, keys.shape[3], self.capture)
        outputs = self.recordings.run(key, lambda: self._work(inputs, keys, values))
        if outputs is None:
            return super()._pass(ids, counts, last, parents)
        # Copies: the next pass of any runner may overwrite what this one left.
        logits, *states = outputs
        self.captured = states[0][:batch, :width].clone() if states else None
        if not last:
            return logits[:batch, :width].clone()
        return logits[inputs.row[:batch], inputs.place[:batch, 1]][:, None]

    def _work(self, inputs: Inputs, keys: Tensor, values: Tensor) -> Work:
        """The pass over fixed buffers: (logits [R, W, V],) and, where states are captured, [R, W, n * H]."""
        w, layers, capture = self.weights, self.layers, self.capture
        rows, width = inputs.ids.shape
        capacity = keys.shape[3]
        group = w.heads // w.kv_heads
        cos, sin = self._tables(capacity)
        ahead = torch.arange(width, device=self.device)
        slots = torch.arange(capacity, device=self.device)
        device = self.device

        def work() -> Outputs:
            positions = inputs.place[:, :1] + ahead
            unseen = slots > positions[:, None, :, None]
            mask = torch.zeros_like(unseen, dtype=w.embedding.dtype).masked_fill_(unseen, -torch.inf)
            mask = mask.repeat(1, 1, group, 1)
            index = positions[:, None, :, None].expand(rows, w.kv_heads, width, w.head_dim)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys[layer].scatter_(2, index, k.transpose(1, 2))
                values[layer].scatter_(2, index, v.transpose(1, 2))
                return mix(w, q, keys[layer], values[layer], mask)

            taps = dict.fromkeys((i for i in capture if i != layers), positions)
            with masked_attention(device):
                hidden = w.run(inputs.ids, cos[positions][:, :, None], sin[positions][:, :, None], layers, attend, taps)
            normed = w.normed(hidden)
            states = [normed if i == layers else taps[i] for i in capture]
            return (w.score(normed), torch.cat(states, -1)) if states else (w.score(normed),)

        return work

    def _tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines [capacity, head_dim] of every slot."""
        if capacity not in self._rope:
            at = torch.arange(capacity, device=self.device)[None]
            cos, sin = self.weights.rotary(self.weights.embedding[:1], at)
            self._rope = {capacity: (cos[0].clone(), sin[0].clone())}
        return self._rope[capacity]


def graph_runner(weights: Weights, *, context: int, device: str) -> GraphRunner | None:
    """A runner with recorded passes, or None on a device that has none. ``REDLINE_GRAPHS=0`` switches them off;
    ``rehearse`` goes through all of it on any device, only that nothing is recorded."""
    setting = os.environ.get("REDLINE_GRAPHS", "")
    if setting == "rehearse":
        recordings = Recordings(RerunCapture(), device)
    elif device.startswith("cuda"):
        recordings = Recordings(CudaCapture(device), device)
        if setting == "0":
            recordings.why_off = "REDLINE_GRAPHS=0"
    else:
        return None
    return GraphRunner(weights, recordings, context=context, device=device)
