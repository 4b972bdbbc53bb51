"""Time on the clock: spans of device work, split into draft, verify and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Measures one step at a time: ``start``, ``span("draft")``, ``span("verify")``, ``stop``.

    On CUDA, spans are events on the stream, so that measuring does not make the host wait; ``stop`` waits once.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._mps = device == "mps"
        self._spans: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = 0.0

    def now(self) -> float:
        """Seconds, after everything that was asked of the device is done."""
        if self._cuda:
            torch.cuda.synchronize()
        elif self._mps:
            torch.mps.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin a step."""
        self._spans = {"draft": 0.0, "verify": 0.0}
        self._events = []
        self._start = self.now()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the work inside as ``name``."""
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_s = self.now()
            yield
            self._spans[name] += self.now() - begin_s

    def stop(self) -> tuple[float, float, float]:
        """(draft, verify, overhead) of the step in milliseconds; they sum to its wall time."""
        total = 1000 * (self.now() - self._start)
        for name, begin, end in self._events:
            self._spans[name] += begin.elapsed_time(end) / 1000
        draft, verify = 1000 * self._spans["draft"], 1000 * self._spans["verify"]
        # Device spans may overlap the host's own work; the parts never exceed the whole.
        scale = min(1.0, total / (draft + verify)) if draft + verify > 0 else 1.0
        draft, verify = draft * scale, verify * scale
        return draft, verify, max(0.0, total - draft - verify)
