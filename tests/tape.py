"""A CUDA graph on the CPU: the operations of the work are written down with their tensors, and run again on those.

What a graph would bake in is baked in here: shapes, numbers taken from the host, and where every tensor lies. So a pass
that reads the host again, keeps an output too long or has its buffers moved comes out wrong, as it would on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decoder.capture import Outputs, Work


class Tape(TorchDispatchMode):
    """Records while it is active; ``play`` runs the operations again into the tensors that they gave at first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        # A view of what it was given needs no second run; what was written in place does.
        alias = bool(made) and all(t.untyped_storage().data_ptr() in read for t in made)
        if func._schema.is_mutable or not alias:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        """Run everything again."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)


class TapeCapture:
    """A ``Capture`` for tests. ``recorded`` counts; ``fail_at`` makes that recording fail, as for want of memory."""

    path = "CUDA graph"

    def __init__(self, fail_at: int | None = None) -> None:
        self.recorded = self.forgotten = 0
        self.fail_at = fail_at
        self._outputs: list[Outputs] = []

    def record(self, work: Work) -> Work:
        self.recorded += 1
        if self.recorded == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate more.")
        work()
        tape = Tape()
        with tape:
            outputs = work()
        self._outputs.append(outputs)

        def replay() -> Outputs:
            # They share one memory pool: whatever another recording had left is gone.
            for other in self._outputs:
                for tensor in other:
                    tensor.fill_(torch.nan)
            tape.play()
            return outputs

        return replay

    def forget(self) -> None:
        self.forgotten += 1
        self._outputs.clear()
