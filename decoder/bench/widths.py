"""What a forward pass of several tokens costs beside one of a single token: is verification nearly free?

Directly on the runner at a fixed context: a pass of each width in turn, rolled back after, so that nothing else is on
the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decoder.bench.floor import wait
from decoder.bench.summary import Spread, spread
from decoder.target import Runner

WIDTHS = (1, 2, 3, 5, 9)


@dataclass(frozen=True, slots=True)
class Width:
    """Milliseconds of a pass of ``width`` tokens; ``device_ms`` is the device's own time (None on the CPU)."""

    width: int
    ms: Spread
    device_ms: Spread | None
    ratio: float
    """Median over the median of the narrowest width."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Width:
        """Read what ``to_json`` wrote."""
        device = data["device_ms"]
        return cls(data["width"], Spread(**data["ms"]), None if device is None else Spread(**device), data["ratio"])


@torch.inference_mode()
def measure_widths(
    runner: Runner, *, context: int = 256, rounds: int = 30, widths: Sequence[int] = WIDTHS, batch: int = 1
) -> list[Width]:
    """Time ``rounds`` passes of every width, taking turns, behind ``context`` tokens. Leaves the runner empty."""
    context = min(context, runner.context - max(widths) - 1)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, runner.vocab_size, (batch, context + max(widths)), generator=generator).to(runner.device)
    runner.reset(batch)
    runner.forward(text[:, :context], last=True)
    host: dict[int, list[float]] = {w: [] for w in widths}
    device: dict[int, list[float]] = {w: [] for w in widths}
    warm_up = 3
    for turn in range(rounds + warm_up):
        for width in widths:
            ms, device_ms = _one(runner, text[:, context : context + width])
            runner.rollback([context] * batch)
            if turn >= warm_up:
                host[width].append(ms)
                if device_ms is not None:
                    device[width].append(device_ms)
    runner.reset(1)
    found: list[Width] = []
    for width in sorted(widths):
        own = spread(host[width])
        assert own is not None
        base = found[0].ms.median if found else own.median
        found.append(Width(width, own, spread(device[width]), own.median / base if base > 0 else 1.0))
    return found


def _one(runner: Runner, ids: torch.Tensor) -> tuple[float, float | None]:
    """(wall ms, device ms) of one pass."""
    wait(runner.device)
    begin = time.perf_counter()
    if not runner.device.startswith("cuda"):
        runner.forward(ids)
        wait(runner.device)
        return 1000 * (time.perf_counter() - begin), None
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(runner.device)
    first.record(stream)
    runner.forward(ids)
    last.record(stream)
    last.synchronize()
    return 1000 * (time.perf_counter() - begin), first.elapsed_time(last)
