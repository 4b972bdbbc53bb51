"""Compiled steps of the tiny Llama, built once a test session and kept in pytest's own cache folder.

Building takes some seconds a width, so there is one model (seed 0, three layers) with two widths as a target, and one
width of its first two layers for early exit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from decoder import kernel, loading, packages
from decoder.compiled import StepSet, model_steps
from decoder.fused import Weights
from decoder.kernel_runner import KernelSet
from decoder.steps import EXIT_WIDTHS

CACHE = Path(__file__).resolve().parents[1] / ".pytest_cache" / "redline"
CONTEXT = 8192
"""More than any test asks for: a step only knows the positions that it was built for."""
WIDTHS = (1, 5)
SHORT_LAYERS = 2
needs_compiler = pytest.mark.skipif(packages.compiler() is None, reason="there is no C++ compiler here")


@contextmanager
def compiling(*, kernel: bool = False) -> Iterator[None]:
    """Compiled steps are on, or the kernel, in the session's cache folder; elsewhere in the tests they are off."""
    before = {name: os.environ.get(name) for name in ("REDLINE_CACHE", "REDLINE_COMPILE", "REDLINE_KERNEL")}
    os.environ |= {"REDLINE_CACHE": str(CACHE), "REDLINE_COMPILE": "1", "REDLINE_KERNEL": "1" if kernel else "0"}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@lru_cache
def tiny_folder() -> Path:
    """The tiny Llama as a folder that stays: its path and its weights are the same in every session."""
    from tests.tiny import save_tiny

    folder = CACHE / f"tiny-{CONTEXT}"
    if not (folder / "config.json").is_file():
        save_tiny(folder)
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    return folder


@lru_cache
def tiny_steps(layers: int = 0) -> StepSet:
    """The built steps of the tiny Llama, or of its first layers."""
    torch.set_num_threads(1)  # as in every test: the number is written into the steps
    with compiling():
        loaded = loading.load(str(tiny_folder()), "float32", "cpu")
        steps = model_steps(loaded, EXIT_WIDTHS if layers else WIDTHS, layers)
        steps.settle()
    assert steps.steps, steps.note()
    return steps


@lru_cache
def built_kernel(weights: Weights) -> KernelSet:
    """The kernel on ``weights``, built once a session for each dtype."""
    with compiling(kernel=True):
        assert kernel.why_not(weights) is None
        held = KernelSet(weights, str(weights.embedding.dtype).removeprefix("torch."), CONTEXT)
        held.settle()
    assert held.steps, held.note()
    return held
