"""Decoding with the kernel: every pass of up to ``WIDEST`` tokens of one row or of several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from decoder import kernel, packages
from decoder.compiled import KERNEL, CompiledRunner, StepSet
from decoder.fused import FusedRunner, Weights
from decoder.heads.layer import HeadLayer
from decoder.kernel import WIDEST, Kernel, LayerKernel, Library
from decoder.target import tree_mask
from decoder.transfer import upload

log = logging.getLogger(__name__)


class KernelSet(StepSet):
    """The kernel on a model's weights, for every number of its layers: there, or to be built yet."""

    def __init__(self, weights: Weights, dtype: str, context: int, name: str = "") -> None:
        self.weights = weights
        super().__init__([Library(dtype)], _blocked(), f"python -m decoder models --compile {name}", context)

    def _open(self, recipe: Any) -> Kernel | None:
        return _opened(recipe, lambda: Kernel(recipe.path, self.weights, self.reach))


def _blocked() -> str | None:
    return "compiling is switched off (REDLINE_COMPILE=0)" if packages.switched_off() else None


T = TypeVar("T")


def _opened(library: Any, make: Callable[[], T]) -> T | None:
    """What ``make`` makes of a built library, or None where the file is broken: it is built again then."""
    try:
        return make()
    except OSError as error:
        log.warning("the kernel %s cannot be used: %s", library.path, error)
        library.path.unlink(missing_ok=True)
        return None


class LayerSet(StepSet):
    """The kernel on a head's layer: there, or to be built yet."""

    def __init__(self, layer: HeadLayer, dtype: str) -> None:
        self.layer = layer
        super().__init__([Library(dtype)], _blocked())

    def _open(self, recipe: Any) -> LayerKernel | None:
        return _opened(recipe, lambda: LayerKernel(recipe.path, self.layer))


def give_layers(head: nn.Module, dtype: str) -> None:
    """Let the layers of a head on the CPU use the kernel, where there can be one."""
    for layer in head.modules():
        if isinstance(layer, HeadLayer) and kernel.why_not_dtype(layer.down.weight.dtype) is None:
            layer.held = LayerSet(layer, dtype)


class KernelRunner(CompiledRunner):
    """The lean path, with the kernel once it is built; longer passes run eagerly as before."""

    compiled_path = KERNEL

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        start, computed = max(self.lengths), self.steps.steps.get(WIDEST)
        if computed is None or batch * width > WIDEST or start + width > self.reach:
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
        logits, states = computed(
            ids, positions, slots, mask, keys, values, layers=self.layers, taps=self.capture, only=single
        )
        self.captured = torch.cat(states, -1) if states else None
        if last and single is None:
            return logits[torch.arange(batch), upload([max(count - 1, 0) for count in counts], "cpu")][:, None]
        return logits
