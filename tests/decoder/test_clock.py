"""The clock of a step: what it measures, and that measuring on a GPU never makes the host wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decoder import clock as module
from decoder.clock import Clock


class Gpu:
    """A device with a timeline of its own: work is queued at the host's time and done later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.busy_until = 0.0
        self.waits = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "the stream of cuda"
                self.at = max(gpu.host, gpu.busy_until)

            def synchronize(self) -> None:
                assert self.at <= gpu.host, "the host had to wait for an event"

            def elapsed_time(self, end: Any) -> float:
                return 1000 * (end.at - self.at)

        cuda = SimpleNamespace(
            Event=Event, synchronize=lambda device: self.wait(), current_stream=lambda device: f"the stream of {device}"
        )
        monkeypatch.setattr(module.torch, "cuda", cuda)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.host)

    def launch(self, host: float, device: float) -> None:
        """Queue work that takes the host ``host`` seconds to launch and the device ``device`` seconds to do."""
        self.host += host
        self.busy_until = max(self.host, self.busy_until) + device

    def wait(self) -> None:
        """What reading a result does."""
        self.waits += 1
        self.host = max(self.host, self.busy_until)


def test_spans_are_the_devices_and_the_rest_is_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    clock = Clock("cuda")
    clock.start()
    gpu.host += 0.001
    with clock.span("draft"):
        gpu.launch(0.002, 0.010)
    with clock.span("verify"):
        gpu.launch(0.001, 0.020)
    gpu.launch(0.001, 0.003)
    gpu.wait()
    gpu.host += 0.001
    draft, verify, overhead = clock.stop()
    assert gpu.waits == 1
    # The device came to the draft at once and had to wait 2 ms for it to be launched; verification it found queued.
    assert (draft, verify) == (pytest.approx(12), pytest.approx(20))
    assert overhead == pytest.approx(1 + 3 + 1)
    assert draft + verify + overhead == pytest.approx(1000 * gpu.host)


def test_work_that_a_step_leaves_behind_counts_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    clock = Clock("cuda")
    clock.start()
    gpu.wait()
    gpu.launch(0.0, 0.005)
    assert clock.stop() == (0, 0, 0)
    clock.start()
    with clock.span("verify"):
        gpu.launch(0.0, 0.020)
    gpu.wait()
    assert clock.stop() == (0, pytest.approx(20), pytest.approx(5))


def test_elsewhere_spans_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    clock = Clock("cpu")
    clock.start()
    for name, seconds in (("draft", 0.25), ("", 0.5), ("verify", 1.0), ("draft", 0.25)):
        if name:
            with clock.span(name):
                now[0] += seconds
        else:
            now[0] += seconds
    assert clock.stop() == (500, 1000, 500)
