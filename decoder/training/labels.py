"""The target's next-token distributions over the rows, computed once and kept on disk.

At every position behind the prefix the cache keeps the ``k`` likeliest ids and their log-probabilities at temperature
1; what they leave is the rest mass. Files are plain ``.npy`` (memory-mapped); work can stop and go on at any row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoder.errors import ModelError
from decoder.training.rows import Rows

Progress = Callable[[int, int, float], None]
"""Called with rows done, rows wanted, and rows per second."""


@dataclass(frozen=True, slots=True)
class LabelCache:
    """``ids``: uint16 or int32 [R, P, k], likeliest first; ``logp``: float16 [R, P, k]; ``done``: uint8 [R].

    Entry [r, i] belongs to position prefix - 1 + i of row r and foretells the id at position prefix + i, so
    P = length - prefix + 1. Rows that are not done hold nothing.
    """

    folder: Path
    ids: np.memmap[Any, Any]
    logp: np.memmap[Any, np.dtype[np.float16]]
    done: np.memmap[Any, np.dtype[np.uint8]]
    k: int

    @classmethod
    def open(cls, folder: Path, rows: Rows, *, target: str, vocab_size: int, k: int = 64) -> LabelCache:
        """Open the cache in ``folder``, or make an empty one. Raises ModelError when it belongs to other rows."""
        about = {"rows": rows.digest, "target": target, "k": k, "prefix": rows.prefix, "vocab_size": vocab_size}
        meta = folder / "meta.json"
        shape = (len(rows.tokens), rows.length - rows.prefix + 1, k)
        if not meta.exists():
            folder.mkdir(parents=True, exist_ok=True)
            id_type = np.uint16 if vocab_size <= 1 << 16 else np.int32
            for name, dtype, size in (
                ("ids", id_type, shape),
                ("logp", np.float16, shape),
                ("done", np.uint8, shape[:1]),
            ):
                np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=size).flush()
            meta.write_text(json.dumps(about))
        found = json.loads(meta.read_text())
        if found != about:
            differ = ", ".join(
                f"{key} {found.get(key)} instead of {about[key]}" for key in about if found.get(key) != about[key]
            )
            raise ModelError(f"the labels in {folder} were made for something else: {differ}; choose another folder")
        ids, logp, done = (np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ("ids", "logp", "done"))
        return cls(folder, ids, logp, done, k)

    def missing(self, order: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
        """Those of the rows ``order`` that have no labels yet, in that order."""
        return [int(row) for row in order if not self.done[row]]


def make_labels(
    rows: Rows,
    order: Sequence[int] | npt.NDArray[np.int64],
    model: Any,
    cache: LabelCache,
    *,
    batch: int = 4,
    progress: Progress | None = None,
) -> None:
    """Label the rows ``order`` that lack labels with ``model``, a causal language model of transformers."""
    todo = cache.missing(order)
    head, device = model.get_output_embeddings(), model.device
    began = time.monotonic()
    for start in range(0, len(todo), batch):
        chosen = todo[start : start + batch]
        tokens = torch.from_numpy(rows.tokens[chosen]).long().to(device)
        with torch.inference_mode():
            hidden = model.base_model(tokens, use_cache=False).last_hidden_state[:, rows.prefix - 1 :]
            for row, states in zip(
                chosen, hidden, strict=True
            ):  # a row at a time: logits of a batch do not fit a cache
                cache.ids[row], cache.logp[row] = top_k(head(states), cache.k)
        # The flag goes last, so that a row cut off by a crash is simply made again.
        cache.done[chosen] = 1
        if progress:
            made = start + len(chosen)
            progress(made, len(todo), made / (time.monotonic() - began))
    for array in (cache.ids, cache.logp, cache.done):
        array.flush()


def top_k(logits: torch.Tensor, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """The k likeliest ids and their log-probabilities: logits [P, V] -> int32 [P, k], float16 [P, k]."""
    logits = logits.float()
    values, ids = logits.topk(k, dim=-1)
    logp = values - logits.logsumexp(-1, keepdim=True)
    return ids.to(torch.int32).cpu().numpy(), logp.to(torch.float16).cpu().numpy()
