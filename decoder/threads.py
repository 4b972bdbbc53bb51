"""How many threads small work takes.

PyTorch shares out every operation on more than 32,768 numbers among its threads, and a row of a vocabulary is more.
For a handful of rows that gains some microseconds, and each such operation waits for all threads: on a machine whose
cores are also wanted elsewhere, by a browser on the same computer say, one wait lasts until the other program's turn is
over, 8 ms instead of 0.02. So what looks at a few rows runs on one thread; passes of models keep theirs.
"""

from __future__ import annotations

from types import TracebackType

import torch

FEW = 1 << 19
"""Numbers up to which one thread does the work: ten rows of 49,152."""


class alone:
    """Operations inside run on one thread where they look at no more than ``FEW`` ``numbers``. No model runs inside."""

    __slots__ = ("_before", "_few")

    def __init__(self, numbers: int) -> None:
        self._few = numbers <= FEW

    def __enter__(self) -> None:
        if self._few:
            self._before = torch.get_num_threads()
            torch.set_num_threads(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._few:
            torch.set_num_threads(self._before)
