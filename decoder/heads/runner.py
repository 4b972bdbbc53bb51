"""A recurrent head with a cache of its own: it takes in committed text with the target's states, then drafts on.

``lengths[b]`` counts row b's entries that were made from the target's states. What the head drafts is written behind
them and overwritten by the next ``take_in``, so that rolling back needs nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.compiled import EAGER, KERNEL
from decoder.heads.layer import HeadLayer
from decoder.heads.models import RecurrentHead
from decoder.kv_cache import KVCache
from decoder.sampling import spread
from decoder.target import PREFILL_CHUNK, chain_mask
from decoder.transfer import upload, upload_tensor


class HeadRunner:
    """B rows, each with its own length. ``vocab_size`` is the target's; logits have that width everywhere."""

    def __init__(self, head: RecurrentHead, *, vocab_size: int, device: str, logits_device: str | None = None) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self.context = head.context
        self.device = device
        self.logits_device = logits_device or device
        self.lengths: list[int] = []
        self.cache = KVCache(head.depth)
        self._batch = 0
        self._out: Tensor | None = None
        """[B, 1, hidden]: what each row's newest entry gave."""
        self._ahead = 0
        """Entries of the chain that is being drafted."""
        self._tree: list[list[bool]] = []
        """Of the tree that is being drafted: which entries each entry sees, itself included."""
        self._tree_out: list[Tensor] = []

    @property
    def path(self) -> str:
        """Which implementation computes the layers."""
        held = [layer.held for layer in self.head.modules() if isinstance(layer, HeadLayer)]
        return KERNEL if held and all(one is not None and one.steps for one in held) else EAGER

    def reset(self, batch: int) -> None:
        """Forget everything and start ``batch`` empty rows."""
        if batch != self._batch:
            self.cache.clear()
            self._batch = batch
        self.lengths = [0] * batch
        self._out = None

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows`` (increasing indices) with their cache."""
        for layer in self.cache.rows:
            layer.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]
        # The buffers still hold the rows that left: another batch, also one of this size, starts with new ones.
        self._batch = -1

    @torch.inference_mode()
    def take_in(self, ids: Tensor, states: Tensor, counts: Sequence[int]) -> Tensor:
        """Append entries ids [B, T] with the target's states [B, T, n * H], ``counts[b]`` of them for row b.

        Returns logits [B, 1, V] of what follows each row's last one. A long text is taken in by parts.
        """
        self._ahead, self._tree, self._tree_out = 0, [], []
        out: Tensor | None = None
        for start in range(0, ids.shape[1], PREFILL_CHUNK):
            part = ids[:, start : start + PREFILL_CHUNK]
            here = [min(max(count - start, 0), part.shape[1]) for count in counts]
            entered = self.head.enter(states[:, start : start + PREFILL_CHUNK])
            every = self._pass(part, entered, self.lengths)
            self.lengths = [length + n for length, n in zip(self.lengths, here, strict=True)]
            if min(here) == part.shape[1]:
                out = every[:, -1:]
                continue
            at = upload([max(n - 1, 0) for n in here], self.device)
            last = every[torch.arange(len(here), device=self.device), at][:, None]
            alive = upload([n > 0 for n in here], self.device, torch.bool)[:, None, None]
            out = last if out is None else torch.where(alive, last, out)
        assert out is not None
        self._out = out
        return self._logits(out)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """One more draft per row, ids [B, 1] -> logits [B, 1, V] of what follows it; from the head's own output."""
        assert self._out is not None
        starts = [length + self._ahead for length in self.lengths]
        self._out = self._pass(ids.to(self.device), self._out, starts)
        self._ahead += 1
        return self._logits(self._out)

    @torch.inference_mode()
    def branch(self, ids: Sequence[int], parents: Sequence[int | None]) -> Tensor:
        """Entries for n nodes of a tree (one row only), each below an earlier entry of it or the text (None).

        Returns logits [n, V] of what follows each.
        """
        assert self._out is not None
        if self._batch != 1 and len(self.lengths) != 1:
            raise ValueError("trees are drafted one row at a time")
        old, start = len(self._tree), self.lengths[0]
        new = len(ids)
        for parent in parents:
            above = self._tree[parent] if parent is not None else []
            self._tree.append([*above, *([False] * (len(self._tree) - len(above))), True])
        depths = [sum(sees) - 1 for sees in self._tree[old:]]
        states = [self._out[0, 0] if parent is None else self._tree_out[parent] for parent in parents]
        size = start + old + new
        mask = torch.zeros(new, size, dtype=torch.bool)
        mask[:, :start] = True
        for i, sees in enumerate(self._tree[old:]):
            mask[i, start : start + len(sees)] = torch.tensor(sees)
        positions = torch.tensor([depths]) + start
        out = self._run(
            upload([list(ids)], self.device),
            torch.stack(states)[None],
            upload_tensor(positions, self.device),
            upload_tensor(mask[None, None], self.device),
            None,
            start + old,
        )
        self._tree_out += list(out[0])
        return self._logits(out)[0]

    def _pass(self, ids: Tensor, states: Tensor, starts: Sequence[int]) -> Tensor:
        """Entries [B, T] behind ``starts`` -> what they feed back [B, T, hidden]."""
        positions, mask = chain_mask(starts, ids.shape[1], self.device)
        slots = None if min(starts) == max(starts) else positions
        return self._run(ids, states, positions, mask, slots, max(starts))

    def _run(
        self, ids: Tensor, states: Tensor, positions: Tensor, mask: Tensor | None, slots: Tensor | None, start: int
    ) -> Tensor:
        plan, width = self.cache.plan, ids.shape[1]
        plan.start, plan.width, plan.slots, plan.end = start, width, slots, start + width
        return self.head.run(ids, states, positions, start + width, mask, self.cache)

    def _logits(self, out: Tensor) -> Tensor:
        """What is fed back [B, T, hidden] -> logits [B, T, V]; -inf where the head has no such token."""
        logits = spread(self.head.score(out), self.head.ids, self.vocab_size)
        return logits if self.logits_device == self.device else logits.to(self.logits_device)
