"""Decoding with the kernel: every pass of up to ``WIDEST`` tokens of one row or of several."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoder import packages
from decoder.compiled import CompiledRunner, StepSet
from decoder.fused import FusedRunner, Weights
from decoder.kernel import WIDEST, Kernel, Library
from decoder.target import tree_mask
from decoder.transfer import upload

log = logging.getLogger(__name__)


class KernelSet(StepSet):
    """The kernel on a model's weights, for every number of its layers: there, or to be built yet."""

    def __init__(self, weights: Weights, dtype: str, context: int, name: str = "") -> None:
        self.weights = weights
        blocked = "compiling is switched off (REDLINE_COMPILE=0)" if packages.switched_off() else None
        super().__init__([Library(dtype)], blocked, f"python -m decoder models --compile {name}", context)

    def _open(self, recipe: Any) -> Kernel | None:
        try:
            return Kernel(recipe.path, self.weights, self.reach)
        except OSError as error:  # a broken file
            log.warning("the kernel %s cannot be used: %s", recipe.path, error)
            recipe.path.unlink(missing_ok=True)
            return None


class KernelRunner(CompiledRunner):
    """The lean path, with the kernel once it is built; longer passes run eagerly as before."""

    compiled_path = "compiled kernel"

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        start, kernel = max(self.lengths), self.steps.steps.get(WIDEST)
        if kernel is None or batch * width > WIDEST or start + width > self.reach:
            return FusedRunner._pass(self, ids, counts, last, parents)
        end = start + width
        self.buffers.reserve(batch, end)
        keys, values = self.buffers.keys, self.buffers.values
        assert keys is not None
        assert values is not None
        if parents is not None:
            slots = torch.arange(start, end)[None]
            positions, sees = tree_mask(start, width, parents, "cpu")
            mask = sees[0, 0]
        else:
            slots = positions = upload(self.lengths, "cpu")[:, None] + torch.arange(width)
            mask = torch.arange(end) <= slots.view(-1, 1)
        single = counts[0] - 1 if last and batch == 1 else None
        logits, states = kernel(
            ids, positions, slots, mask, keys, values, layers=self.layers, taps=self.capture, only=single
        )
        self.captured = torch.cat(states, -1) if states else None
        if last and single is None:
            return logits[torch.arange(batch), upload([max(count - 1, 0) for count in counts], "cpu")][:, None]
        return logits
