"""The target's hidden states over the rows, computed once and kept on disk: what heads such as EAGLE-3 read.

Files are plain ``.npy`` (memory-mapped); work can stop and go on at any row. A row that was not computed yet is
computed when it is first asked for, so that training can begin at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder.errors import ModelError
from decoder.training.rows import Rows


@dataclass(frozen=True, slots=True)
class FeatureCache:
    """``states``: bfloat16 bits as int16 [R, L, n, H], the hidden states ``layers`` of every position (numbered as
    transformers' ``hidden_states``: the last is behind the final norm); ``done``: uint8 [R]."""

    folder: Path
    states: np.memmap[Any, np.dtype[np.int16]]
    done: np.memmap[Any, np.dtype[np.uint8]]
    layers: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path, rows: Rows, *, target: str, layers: Sequence[int], hidden: int) -> FeatureCache:
        """Open the cache in ``folder``, or make an empty one. Raises ModelError when it belongs to something else."""
        about = {"rows": rows.digest, "target": target, "layers": list(layers), "hidden": hidden}
        meta = folder / "meta.json"
        if not meta.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shape = (len(rows.tokens), rows.length, len(layers), hidden)
            np.lib.format.open_memmap(folder / "states.npy", mode="w+", dtype=np.int16, shape=shape)
            np.lib.format.open_memmap(folder / "done.npy", mode="w+", dtype=np.uint8, shape=shape[:1]).flush()
            meta.write_text(json.dumps(about))
        found = json.loads(meta.read_text())
        if found != about:
            raise ModelError(f"the states in {folder} were made for {found}, not for {about}; choose another folder")
        states, done = (np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ("states", "done"))
        return cls(folder, states, done, tuple(layers))

    def get(self, rows: Rows, chosen: Sequence[int] | npt.NDArray[np.int64], model: Any, batch: int = 8) -> Tensor:
        """States of the rows ``chosen``: bfloat16 [B, L, n, H] on the CPU; missing ones are computed with ``model``."""
        missing = [int(row) for row in chosen if not self.done[row]]
        for start in range(0, len(missing), batch):
            part = missing[start : start + batch]
            self.states[part] = self._compute(rows, part, model).view(torch.int16).numpy()
            # The flag goes last, so that a row cut off by a crash is simply made again.
            self.done[part] = 1
        return torch.from_numpy(self.states[list(map(int, chosen))]).view(torch.bfloat16)

    @torch.no_grad()
    def _compute(self, rows: Rows, part: Sequence[int], model: Any) -> Tensor:
        tokens = torch.from_numpy(rows.tokens[part]).long().to(model.device)
        output = model.base_model(tokens, use_cache=False, output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer] for layer in self.layers], 2)
        return states.to(torch.bfloat16).cpu().contiguous()


def eagle3_layers(layers: int) -> tuple[int, int, int]:
    """The three states that EAGLE-3 reads unless its config says otherwise (``eagle_aux_hidden_state_layer_ids``)."""
    return 2, layers // 2, layers - 3
