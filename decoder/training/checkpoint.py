"""Checkpoints without pickle: tensors as safetensors, everything else as JSON, replaced as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from decoder.errors import ModelError


def save_weights(path: Path, model: torch.nn.Module) -> None:
    """The parameters of ``model`` (a tied head only once) in their own dtype."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, partial, {"format": "pt"})
    os.replace(partial, path)


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Read what save_weights wrote. Raises ModelError when a parameter is missing, unknown or of another shape."""
    tensors, wanted = load_file(path), dict(model.named_parameters())
    if tensors.keys() != wanted.keys():
        raise ModelError(f"{path} holds other parameters: {sorted(tensors.keys() ^ wanted.keys())[:3]}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            if tensors[name].shape != parameter.shape:
                raise ModelError(f"{path}: {name} is {list(tensors[name].shape)}, expected {list(parameter.shape)}")
            parameter.copy_(tensors[name])


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]
) -> None:
    """Write model, optimizer states and ``state`` (JSON); an earlier checkpoint stays until this one is whole."""
    partial, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_weights(partial / "model.safetensors", model)
    tensors = {}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                tensors[f"{number}/{index}/{name}"] = torch.as_tensor(value).contiguous()
    save_file(tensors, partial / "optimizer.safetensors")
    (partial / "state.json").write_text(json.dumps(state))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any] | None:
    """Restore model and optimizers from ``folder``; gives the saved state, or None where there is no checkpoint."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():  # stopped between the two renames
        os.replace(old, folder)
    if not (folder / "state.json").is_file():
        return None
    load_weights(folder / "model.safetensors", model)
    tensors = load_file(folder / "optimizer.safetensors")
    for number, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        whole["state"] = {}
        for key, value in tensors.items():
            owner, index, name = key.split("/")
            if int(owner) == number:
                whole["state"].setdefault(int(index), {})[name] = value
        optimizer.load_state_dict(whole)
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state
