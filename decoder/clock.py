"""Time on the clock: spans of device work, split into draft, verify and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Measures one step at a time: ``start``, ``span("draft")``, ``span("verify")``, ``stop``.

    A step's time is the host's, from ``start`` to ``stop``. On the CPU a span is the host's time too. On CUDA it is the
    device's, from when the device comes to the span to when it has done it: two events on the stream, which are read
    in ``stop``. So measuring never makes the host wait; the step's own reading of its verdicts, which lies behind every
    span, is the only wait. What is left of the step is overhead: launching, judging, reading, committing. Work that a
    step leaves to the device behind that reading counts where it is waited for, in the next step's overhead.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._cuda = device.startswith("cuda")
        self._mps = device == "mps"
        self._spans: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = 0.0

    def now(self) -> float:
        """Seconds, after everything that was asked of the device is done. It waits: not for use within a step."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        elif self._mps:
            torch.mps.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin a step."""
        self._spans = {"draft": 0.0, "verify": 0.0}
        self._events = []
        self._start = self._moment()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the work inside as ``name``."""
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # On the stream of this device, which need not be the current one.
            begin.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((name, begin, end))
        else:
            begin_s = self.now()
            yield
            self._spans[name] += self.now() - begin_s

    def stop(self) -> tuple[float, float, float]:
        """(draft, verify, overhead) of the step in milliseconds; they sum to its time."""
        total = 1000 * (self._moment() - self._start)
        for name, begin, end in self._events:
            end.synchronize()  # long done: the verdicts that were read come after it
            self._spans[name] += begin.elapsed_time(end) / 1000
        draft, verify = 1000 * self._spans["draft"], 1000 * self._spans["verify"]
        # Two clocks, the host's and the device's: the parts never exceed the whole.
        scale = min(1.0, total / (draft + verify)) if draft + verify > 0 else 1.0
        draft, verify = draft * scale, verify * scale
        return draft, verify, max(0.0, total - draft - verify)

    def _moment(self) -> float:
        """Seconds on the host; on CUDA without waiting for the device."""
        return time.perf_counter() if self._cuda else self.now()
