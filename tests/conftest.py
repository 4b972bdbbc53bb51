"""Set-up of every test: small models run on one thread, so that several test processes share a machine in peace."""

from __future__ import annotations

import os

# Before torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Nothing is compiled behind a test's back; tests of compiled steps say that they want them (tests/compiled_steps.py).
os.environ.setdefault("REDLINE_COMPILE", "0")

import pytest
import torch

_ALL_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(_ALL_THREADS if request.node.get_closest_marker("real_model") else 1)
