"""Decode steps compiled ahead of time (AOTInductor), for one row on the CPU.

A package holds the fused forward for one width (tokens per pass) over a cache of fixed capacity, weights prepacked.
Building takes a minute or two per width (``python -m decoder models --compile NAME``); loading takes about a second at
any later start. Packages are kept in the cache folder by weights, torch version and processor. Where there is no C++
compiler, or a copy per width would not fit into memory, ``why_not`` says so and everything runs eagerly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoder.errors import ModelError
from decoder.fused import FusedRunner, Weights, mix
from decoder.loading import LoadedModel, cache_dir

log = logging.getLogger(__name__)

CAPACITY = 1024
"""Tokens of context that a compiled step attends over; longer texts go on eagerly."""
TARGET_WIDTHS = (1, 5, 9)
"""Tokens per pass of the target: plain decoding, k up to 4, k up to 8. Widths between are padded up."""
DRAFT_WIDTHS = (1, 2)
"""A draft takes one token per pass, and two after a full accept."""
_OPTIONS = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}

Step = Callable[[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]], Tensor]
"""ids [1, T], positions [T], mask [T * group, S], keys and values per layer [1, kv_heads, S, d] -> logits [1, T, V]"""


class StepModule(nn.Module):
    """The fused forward of ``width`` tokens over a cache of ``capacity`` slots, for export."""

    cos: Tensor
    sin: Tensor

    def __init__(self, weights: Weights, capacity: int) -> None:
        super().__init__()
        self.weights = weights
        cos, sin = weights.rotary(weights.embedding[:1], torch.arange(capacity)[None])
        self.register_buffer("cos", cos[0].clone())
        self.register_buffer("sin", sin[0].clone())

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        w = self.weights

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer].index_copy_(2, positions, k.transpose(1, 2))
            values[layer].index_copy_(2, positions, v.transpose(1, 2))
            return mix(w, q, keys[layer], values[layer], mask[None, None])

        cos, sin = self.cos[positions][None, :, None], self.sin[positions][None, :, None]
        return w.logits(w.run(ids, cos, sin, len(w.stack), attend))


def why_not(loaded: LoadedModel, widths: Sequence[int]) -> str | None:
    """Why steps of this model are not compiled here, or None when they can be."""
    if loaded.device != "cpu":
        return f"compiled steps are for the CPU, this is {loaded.device}"
    if loaded.folder is None:
        return "the model has no local folder"
    if not compiler():
        return "there is no C++ compiler here (g++ or clang++)"
    size = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    copies = size * (len(widths) + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if copies > memory / 4:
        return f"a copy of its weights for each of {len(widths)} widths would take {copies / 1e9:.1f} GB"
    return None


def compiler() -> str | None:
    """The C++ compiler that would be used."""
    return next(
        (found for name in (os.environ.get("CXX", ""), "g++", "clang++") if (found := shutil.which(name))), None
    )


def root() -> Path:
    """Where packages are kept."""
    return cache_dir() / "compiled"


def package_path(loaded: LoadedModel, width: int) -> Path:
    """The package of one width: keyed by weights, dtype, torch and processor."""
    about = [loaded.fingerprint, loaded.dtype, torch.__version__, _processor(), str(CAPACITY), _source_key()]
    key = hashlib.sha256("|".join(about).encode()).hexdigest()[:16]
    return root() / f"{loaded.family}-{key}" / f"w{width}.pt2"


def _processor() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    bf16, amx = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
    return f"{platform.machine()}-{capability}-{bf16}-{amx}"


def _source_key() -> str:
    """Changes whenever the computation may have changed."""
    here = Path(__file__).parent
    return hashlib.sha256((here / "fused.py").read_bytes() + Path(__file__).read_bytes()).hexdigest()[:8]


def cache_size() -> int:
    """Bytes of all packages."""
    return sum(path.stat().st_size for path in root().rglob("*") if path.is_file()) if root().is_dir() else 0


def clear_cache() -> int:
    """Delete all packages; returns the bytes that were freed."""
    freed = cache_size()
    shutil.rmtree(root(), ignore_errors=True)
    return freed


def load_step(path: Path) -> Step | None:
    """The compiled step of a package, or None where there is none or it cannot be used."""
    if not path.is_file():
        return None
    try:
        loaded: Any = torch._inductor.aoti_load_package(str(path))
    except Exception as error:  # a package of another machine or a broken file: decode eagerly
        log.warning("the compiled step %s cannot be used: %s", path, error)
        path.unlink(missing_ok=True)
        return None

    def run(ids: Tensor, positions: Tensor, mask: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return loaded(ids, positions, mask, keys, values)

    return run


def compiled_steps(loaded: LoadedModel) -> dict[int, Step]:
    """The compiled steps that are in the cache folder for a model, by width; empty when it runs eagerly."""
    if loaded.device != "cpu" or os.environ.get("REDLINE_COMPILE") == "0":
        return {}
    folder = package_path(loaded, 1).parent
    found = {int(path.stem[1:]): load_step(path) for path in sorted(folder.glob("w*.pt2"))}
    return {width: step for width, step in found.items() if step is not None}


def build(folder: Path, dtype: str, width: int, out: Path) -> None:
    """Compile one width of the model in ``folder`` into the package ``out`` (in this process)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    weights = Weights(model.eval().requires_grad_(False))
    layers, group = len(weights.stack), weights.heads // weights.kv_heads
    shape = (1, weights.kv_heads, CAPACITY, weights.head_dim)
    keys = [torch.zeros(shape, dtype=weights.embedding.dtype) for _ in range(layers)]
    values = [torch.zeros_like(k) for k in keys]
    example = (
        torch.zeros(1, width, dtype=torch.long),
        torch.arange(width),
        torch.ones(width * group, CAPACITY, dtype=torch.bool),
        keys,
        values,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(f".{os.getpid()}.partial.pt2")
    try:
        with torch.no_grad():
            exported = torch.export.export(StepModule(weights, CAPACITY).eval(), example)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(partial), inductor_configs=dict(_OPTIONS)
            )
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def build_apart(loaded: LoadedModel, width: int) -> None:
    """Build one width in a process of its own, so that its memory goes when it ends. Raises ModelError."""
    path = package_path(loaded, width)
    arguments = [str(loaded.folder), loaded.dtype, str(width), str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "decoder.compiled", *arguments],
        cwd=Path(__file__).resolve().parent.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode or not path.is_file():
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["the compiler was stopped"]
        raise ModelError(f"{loaded.name} could not be compiled for {width} tokens per pass: {last[0][:200]}")


class CompiledRunner(FusedRunner):
    """The lean path with compiled steps for the widths that have one; everything else runs eagerly as before."""

    path = "compiled"

    def __init__(self, weights: Weights, steps: dict[int, Step], *, context: int, device: str) -> None:
        super().__init__(weights, context=context, device=device)
        self.steps = steps
        self._slots = torch.arange(CAPACITY)

    def reset(self, batch: int) -> None:
        super().reset(batch)
        if batch == 1:
            self.buffers.shape_to(1, CAPACITY)

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        padded = min((w for w in self.steps if w >= width), default=0)
        start = max(self.lengths)
        keys, values = self.buffers.keys, self.buffers.values
        fits = keys is not None and keys.shape[1] == 1 and keys.shape[3] == CAPACITY
        if batch > 1 or parents is not None or not padded or start + padded > CAPACITY or not fits:
            return super()._pass(ids, counts, last, parents)
        assert keys is not None
        assert values is not None
        if padded > width:
            # What is written behind the real tokens is overwritten before anything sees it, as after a rollback.
            ids = torch.cat([ids, ids.new_zeros(1, padded - width)], 1)
        positions = torch.arange(start, start + padded)
        group = self.weights.heads // self.weights.kv_heads
        mask = (self._slots <= positions[:, None]).repeat(group, 1)
        logits = self.steps[padded](ids, positions, mask, list(keys.unbind(0)), list(values.unbind(0)))
        return logits[:, counts[0] - 1 : counts[0]] if last else logits[:, :width]


def main() -> None:
    """``python -m decoder.compiled FOLDER DTYPE WIDTH OUT``: build one package (used by ``Builder``)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("width", type=int)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if hasattr(os, "nice"):
        os.nice(15)
    build(arguments.folder, arguments.dtype, arguments.width, arguments.out)
    print(json.dumps({"built": str(arguments.out)}))


if __name__ == "__main__":
    main()
