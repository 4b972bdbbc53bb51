"""Decoding with the kernel: every pass of up to ``WIDEST`` tokens of one row or of several."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from decoder import kernel, packages
from decoder.compiled import KERNEL, CompiledRunner, StepSet, failures
from decoder.fused import FusedRunner, Weights
from decoder.heads.layer import HeadLayer, Output
from decoder.kernel import WIDEST, Kernel, LayerKernel, Library, MatrixKernel
from decoder.loading import pick_dtype
from decoder.target import tree_mask
from decoder.transfer import upload

log = logging.getLogger(__name__)

REACH = 131_072
"""Positions that the kernel's rotary table has at most; longer texts go on eagerly."""


class KernelSet(StepSet):
    """The kernel on a model's weights, for every number of its layers: there, or to be built yet."""

    def __init__(self, weights: Weights, dtype: str, context: int, name: str = "") -> None:
        self.weights = weights
        command = f"python -m decoder models --compile {name}"
        if dtype != pick_dtype("auto", "cpu"):
            command += f" --dtype {dtype}"
        super().__init__([Library(dtype)], _blocked(), command, min(context, REACH))

    def _open(self, recipe: Any) -> Kernel | None:
        return _opened(recipe, lambda: Kernel(recipe.path, self.weights, self.reach))


def _blocked() -> str | None:
    return "compiling is switched off (REDLINE_COMPILE=0)" if packages.switched_off() else None


T = TypeVar("T")
_broken: set[Path] = set()
"""Libraries that could not be loaded."""


def _opened(library: Any, make: Callable[[], T]) -> T | None:
    """What ``make`` makes of a built library, or None where the file is broken: it is built again then, once."""
    try:
        made = make()
    except (OSError, AttributeError) as error:
        log.warning("the kernel %s cannot be used: %s", library.path, error)
        if library.path in _broken:
            failures[library.path] = f"it cannot be loaded: {error}"
        _broken.add(library.path)
        library.path.unlink(missing_ok=True)
        return None
    packages.in_use(library.path)
    return made


class PartSet(StepSet):
    """The kernel on a part of a head, as ``make`` (library, part) sets it up: there, or to be built yet."""

    def __init__(self, part: HeadLayer | Output, dtype: str, make: Callable[[Path, Any], Any]) -> None:
        self.part, self.make = weakref.ref(part), make  # the part holds this
        super().__init__([Library(dtype)], _blocked())

    def _open(self, recipe: Any) -> Any:
        part = self.part()
        return None if part is None else _opened(recipe, lambda: self.make(recipe.path, part))


def give_layers(head: nn.Module, dtype: str) -> None:
    """Let the layers and the output matrices of a head on the CPU use the kernel, where there can be one."""
    for part in head.modules():
        if isinstance(part, HeadLayer) and kernel.why_not_dtype(part.down.weight.dtype) is None:
            part.held = PartSet(part, dtype, LayerKernel)
        elif isinstance(part, Output) and part.why_not_fast() is None:
            part.held = PartSet(part, dtype, MatrixKernel)


class KernelRunner(CompiledRunner):
    """The lean path, with the kernel once it is built; longer passes run eagerly as before."""

    compiled_path = KERNEL

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        start = max(self.lengths)
        end = start + width
        if WIDEST not in self.steps.steps or width > WIDEST or end > self.reach:
            return FusedRunner._pass(self, ids, counts, last, parents)
        self.buffers.reserve(batch, end)
        if parents is not None:
            slots = torch.arange(start, end)[None]
            positions, sees = tree_mask(start, width, parents, "cpu")
            mask = sees[0, 0]
        else:
            slots = positions = upload(self.lengths, "cpu")[:, None] + torch.arange(width)
            mask = torch.arange(end) <= slots.view(-1, 1)
        single = max(counts[0] - 1, 0) if last and batch == 1 else None
        # Many rows go in parts: what a row computes does not depend on who else is in it.
        rows = WIDEST // width
        parts = [self._rows(b, b + rows, ids, positions, slots, mask, single) for b in range(0, batch, rows)]
        logits = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts])
        states = [state for _, state in parts if state is not None]
        self.captured = torch.cat(states) if states else None
        if last and single is None:
            return logits[torch.arange(batch), upload([max(count - 1, 0) for count in counts], "cpu")][:, None]
        return logits

    def _rows(
        self, a: int, b: int, ids: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, single: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and captured states of the rows from ``a`` to ``b``."""
        width, keys, values = ids.shape[1], self.buffers.keys, self.buffers.values
        assert keys is not None
        assert values is not None
        logits, states = self.steps.steps[WIDEST](
            ids[a:b],
            positions[a:b],
            slots[a:b],
            mask[a * width : b * width],
            keys[:, a:b],
            values[:, a:b],
            layers=self.layers,
            taps=self.capture,
            only=single,
        )
        return logits, torch.cat(states, -1) if states else None
