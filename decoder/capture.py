"""Recording work on fixed buffers and running it again: CUDA graphs, and a stand-in for devices that have none.

Rules of a recording (they are CUDA's): the work reads and writes only tensors that live as long as the recording, takes
nothing else from the host, never waits, and its outputs are overwritten whenever it, or any other recording of the same
capture, runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Outputs = tuple[Tensor, ...]
Work = Callable[[], Outputs]

WARM_UP = 2
"""Runs before a recording: at first use libraries choose kernels and take workspaces, which cannot be recorded."""


class Capture(Protocol):
    """How work is recorded."""

    path: str
    """What it is called in the record of a run."""

    def record(self, work: Work) -> Work:
        """Run ``work`` at least once and return what runs it again. RuntimeError: it cannot be recorded."""

    def forget(self) -> None:
        """Nothing that was recorded so far is used any more."""


class RerunCapture:
    """No recording: calls the work again. For rehearsing on the CPU."""

    path = "CUDA graph, rehearsed"

    def record(self, work: Work) -> Work:
        """See ``Capture.record``. Like a graph's, the outputs are the same tensors every time."""
        outputs = work()

        def replay() -> Outputs:
            for kept, new in zip(outputs, work(), strict=True):
                kept.copy_(new)
            return outputs

        return replay

    def forget(self) -> None:
        """See ``Capture.forget``."""


class CudaCapture:
    """CUDA graphs. All share one memory pool: whoever runs one takes its outputs before the next one runs."""

    path = "CUDA graph"

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        # Warm-up and recording share this stream, so that its library workspaces exist before and outlast a recording.
        self._stream = torch.cuda.Stream(self.device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        """See ``Capture.record``."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process (a page that loads a model) may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = work()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def forget(self) -> None:
        """See ``Capture.forget``. A pool dies with its last graph, so the next one needs another."""
        self._pool = torch.cuda.graph_pool_handle()


def masked_attention(device: str) -> AbstractContextManager[object]:
    """One attention kernel for recorded passes of every width: the flash kernel takes no mask, and cuDNN's makes a plan
    for each shape. So rounding does not depend on the width."""
    if not device.startswith("cuda"):
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
