"""The mean of two runs' weights, where the second started from the first.

A draft that goes on learning from other rows forgets some of the first ones. Between both sets of weights lie ones that
are better on either kind of rows than both ends (arXiv 2109.01903 says so of fine-tuning; ``docs/training.md`` has our
numbers). ``share`` is best chosen on validation rows.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decoder.errors import ModelError
from decoder.training.heads import saved_vocabulary, shared_rows

OUTPUT = re.compile(r"(lm_head|\d+\.1)\.weight")
"""Matrices of EAGLE-3 and Medusa heads with a row for each id of the draft vocabulary."""


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write the run ``out``: ``share`` of the best weights of ``second``, the rest of ``first``'s.

    Output rows of a head go by their ids; those that ``first`` does not have stay ``second``'s. Plan, vocabulary and
    learning curve are ``second``'s. Raises ModelError where the two do not fit.
    """
    try:
        old, new = (load_file(run / "best.safetensors") for run in (first, second))
        plan = json.loads((second / "plan.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{first} and {second} are not two trained runs: {error}") from None
    if old.keys() != new.keys():
        raise ModelError(f"{first} and {second} hold drafts of different kinds")
    theirs, mine = (saved_vocabulary(run) if (run / "vocabulary.npy").is_file() else None for run in (first, second))
    mixed = {}
    for name, tensor in new.items():
        other = old[name]
        if OUTPUT.fullmatch(name) and theirs is not None and mine is not None:
            at, there = shared_rows(mine, theirs)
            aligned = tensor.clone()
            aligned[at] = other[there]
            other = aligned
        if other.shape != tensor.shape:
            raise ModelError(f"{name} is {list(other.shape)} in {first}, {list(tensor.shape)} in {second}")
        mixed[name] = torch.lerp(other, tensor, share)
    out.mkdir(parents=True, exist_ok=True)
    save_file(mixed, out / "best.safetensors", {"format": "pt"})
    for name in ("config.json", "curve.jsonl", "vocabulary.npy"):
        if (second / name).is_file():
            shutil.copyfile(second / name, out / name)
    (out / "plan.json").write_text(json.dumps(plan | {"averaged": share}))
