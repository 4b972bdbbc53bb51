"""A draft head's files: config.json and the headers of its safetensors, without loading any weight.

Safetensors only: a head that exists only as a pickle is refused, and no code of the checkpoint is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decoder.errors import ModelError

_FLOATS = {"F32", "BF16", "F16"}
_PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json"]


@dataclass(frozen=True)
class HeadFiles:
    """``shapes`` and ``kinds`` (safetensors' dtype names) by tensor name; empty when only the config was fetched."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Path] = field(default_factory=dict)
    """The file of each tensor."""
    folder: Path | None = None
    revision: str = "local"

    def tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """The tensors ``names`` on the CPU, in their own dtype."""
        return self._read(names, "pt")

    def arrays(self, names: Iterable[str]) -> dict[str, Any]:
        """The integer or boolean tensors ``names`` as numpy arrays (numpy knows no bfloat16)."""
        return self._read(names, "np")

    def _read(self, names: Iterable[str], framework: str) -> dict[str, Any]:
        from safetensors import safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.where[name], []).append(name)
        found = {}
        for path, wanted in by_file.items():
            with safe_open(path, framework=framework) as file:
                for name in wanted:
                    found[name] = file.get_tensor(name)
        return found

    def inside(self, *prefixes: str) -> HeadFiles:
        """Only the tensors whose names begin so: a head inside its target's own checkpoint."""
        shapes = {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}
        return replace(self, shapes=shapes)

    def not_floats(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are quantised or otherwise no plain floating-point tensors."""
        return [name for name in names if self.kinds[name] not in _FLOATS]


def open_files(name: str, *, weights: bool = True, role: str = "draft") -> HeadFiles:
    """Open a catalog name, folder or Hub id. ``weights`` False fetches only the config of a Hub id that is not here.

    Raises ModelError with one sentence.
    """
    from decoder import loading  # it imports torch, which reading a layout does not need

    place = loading.locate(name, role=role)
    if place.local is not None:
        return _from_folder(name, place.local, place.revision)
    return loading.guarded(name, role, lambda: _from_hub(name, place.where, weights))


def _from_hub(name: str, repository: str, weights: bool) -> HeadFiles:
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache

    if not weights and not isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        config = Path(hf_hub_download(repository, "config.json"))
        return HeadFiles(name, _config(name, config), revision=config.parent.name)
    folder = Path(snapshot_download(repository, allow_patterns=_PATTERNS))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"the draft {name} has no .safetensors weights on the Hub; Redline never loads a pickle")
    return _from_folder(name, folder, folder.name)


def _from_folder(name: str, folder: Path, revision: str) -> HeadFiles:
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            entries = header(path)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"cannot load the draft {name}: {path.name} is no readable safetensors file ({error})"
            ) from None
        for key, (shape, kind) in entries.items():
            shapes[key], kinds[key], where[key] = shape, kind, path
    return HeadFiles(name, _config(name, folder / "config.json"), shapes, kinds, where, folder, revision)


def header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor names of a safetensors file with shape and dtype. Raises ValueError where it has no such header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("it has no header")
        entries = json.loads(file.read(size))
    try:
        return {k: (tuple(v["shape"]), str(v["dtype"])) for k, v in entries.items() if k != "__metadata__"}
    except (AttributeError, KeyError, TypeError):
        raise ValueError("its header names no tensors") from None


def _config(name: str, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the draft {name} has no readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"the draft {name}: config.json is not a JSON object")
    return config
