"""The floor: one token cannot take less time than reading the target's weights once does.

Bytes are those of the weights as they lie in memory; keys and values come on top and are left out. The read
bandwidth is measured on this machine, in this process, with the threads that torch uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

CPU_BYTES = 512 << 20
"""Many times a last-level cache, so that no pass finds the buffer there."""
CUDA_BYTES = 4 << 30
PASSES = 7


@dataclass(frozen=True, slots=True)
class Floor:
    """``bytes_per_token`` over ``bandwidth`` (bytes per second) is the floor in ms."""

    bytes_per_token: int
    bandwidth: float
    threads: int
    method: str
    buffer_bytes: int

    @property
    def ms(self) -> float:
        """Least time per token in ms."""
        return 1000 * self.bytes_per_token / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict, with ``ms``."""
        return {**asdict(self), "ms": self.ms}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Floor:
        """Read what ``to_json`` wrote."""
        return cls(**{name: value for name, value in data.items() if name != "ms"})


def bytes_per_token(model: Any) -> int:
    """Bytes of weights that one decoded token must read: every parameter once, a tied table once (as the head); of an
    embedding table that is not tied only a row is read, so it does not count."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if table is not head and table.data_ptr() != head.data_ptr():
        total -= table.numel() * table.element_size()
    return int(total)


def measure_floor(model: Any, device: str, *, buffer_bytes: int | None = None, passes: int = PASSES) -> Floor:
    """Measure the read bandwidth now and set it beside the model's bytes."""
    bandwidth, method, size = read_bandwidth(device, buffer_bytes, passes)
    return Floor(bytes_per_token(model), bandwidth, torch.get_num_threads(), method, size)


def better(a: Floor, b: Floor) -> Floor:
    """The faster of two measurements: whatever else runs can only make reading slower."""
    return a if a.bandwidth >= b.bandwidth else b


@torch.inference_mode()
def read_bandwidth(device: str, buffer_bytes: int | None = None, passes: int = PASSES) -> tuple[float, str, int]:
    """(bytes per second, how, buffer size): the best pass of the best of several kernels that only read.

    The best and not the median, because this is a bound: what the memory can do, not what it usually does.
    """
    cuda = device.startswith("cuda")
    # A model may have left little room: still far more than a GPU's caches hold.
    size = buffer_bytes or (min(CUDA_BYTES, torch.cuda.mem_get_info(device)[0] // 4) if cuda else CPU_BYTES)
    columns = 4096
    rows = max(1, size // (4 * columns))
    # Filled, not only reserved: untouched pages would all be one page of zeros.
    buffer = torch.full((rows, columns), 0.5, device=device)
    kernels: dict[str, tuple[Callable[[], object], int]] = {
        "sum": (buffer.sum, 1),
        "matrix-vector product": (partial(torch.mv, buffer, torch.ones(columns, device=device)), 1),
        "maximum": (buffer.amax, 1),
    }
    if cuda:
        other = torch.empty_like(buffer)
        kernels["copy (read and write)"] = (lambda: other.copy_(buffer), 2)
    best, method = 0.0, ""
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for turn in range(passes + 1):
        for name, (kernel, _) in kernels.items():
            seconds = _timed(kernel, device)
            if turn:
                times[name].append(seconds)
    for name, (_, factor) in kernels.items():
        speed = factor * buffer.numel() * buffer.element_size() / min(times[name])
        if speed > best:
            best, method = speed, name
    return best, method, buffer.numel() * buffer.element_size()


def _timed(kernel: Callable[[], object], device: str) -> float:
    wait(device)
    begin = time.perf_counter()
    kernel()
    wait(device)
    return max(time.perf_counter() - begin, 1e-9)


def wait(device: str) -> None:
    """Let the host wait for everything that was asked of the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()
