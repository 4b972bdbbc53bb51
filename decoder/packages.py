"""Compiled steps as files: what identifies one, where it lies, how it is built and loaded.

A ``Recipe`` names a maker (``module:function``) of a module, its example inputs and which of their sizes may change;
AOTInductor turns that into a shared library with the weights inside, prepacked. Building takes a minute or so per
width, in a process of its own (``python -m decoder.packages``); loading maps a file. Files are kept in the cache folder
by weights, dtype, options, threads, source, torch version and processor, so that a stale one is never found, and
appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from decoder.cache import compiled_dir
from decoder.child import be_modest
from decoder.errors import ModelError

log = logging.getLogger(__name__)

_KEPT_SECONDS = 60 * 24 * 3600
_DISK_COPIES = 4
"""Copies of the weights on the disk while a step is built: object file, library, archive, the library again."""


@dataclass(frozen=True)
class Recipe:
    """One step to be compiled: ``maker(source, dtype, width=width, **options)`` gives (module, example inputs,
    dynamic shapes).

    ``options`` must be JSON. ``fingerprint`` identifies the weights, ``size`` is what they take in bytes. The number of
    ``threads`` is written into the compiled loops.
    """

    maker: str
    source: str
    dtype: str
    width: int
    fingerprint: str
    name: str = "model"
    size: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def path(self) -> Path:
        """Where its library is, or would be."""
        options = json.dumps(self.options, sort_keys=True)
        about = [self.fingerprint, self.dtype, self.maker, options, str(self.threads), *_surroundings()]
        key = hashlib.sha256("|".join([*about, _source_key(self.maker.split(":")[0])]).encode()).hexdigest()[:16]
        label = re.sub(r"[^\w.-]+", "-", Path(self.name).name)[:60] or "model"
        return compiled_dir() / f"{label}-{key}" / f"w{self.width}.so"

    @property
    def built(self) -> bool:
        """True when its library is there."""
        return self.path.is_file()

    def command(self) -> list[str]:
        """See ``Library``."""
        return [sys.executable, "-m", "decoder.packages", json.dumps(asdict(self)), str(self.path)]


def compiler() -> str | None:
    """The C++ compiler that would be used."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def switched_off() -> bool:
    """True when nothing is to be compiled, nor used that was (``REDLINE_COMPILE=0``)."""
    return os.environ.get("REDLINE_COMPILE") == "0"


def why_no_build(size: int, widths: int, loaded: int = 0) -> str | None:
    """Why steps with weights of ``size`` bytes are not built here for so many widths, or None when they can be.

    ``loaded``: bytes that the steps of other models take in this process already.
    """
    if not compiler():
        return "there is no C++ compiler here (g++ or clang++)"
    copies = size * (widths + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 33
    if copies + loaded > memory / 4:
        beside = f" beside {loaded / 1e9:.1f} GB of other steps" if loaded else ""
        return f"a copy of its weights for each of {widths} widths would take {copies / 1e9:.1f} GB{beside}"
    place = next(folder for folder in (compiled_dir(), *compiled_dir().parents) if folder.is_dir())
    free, needed = shutil.disk_usage(place).free, size * (_DISK_COPIES + widths)
    if free < needed:
        return f"compiling it takes {needed / 1e9:.1f} GB of disk and {place} has {free / 1e9:.1f} GB left"
    return None


def _options() -> dict[str, Any]:
    """How inductor compiles. Its own matrix kernels win where it can write them for AMX; elsewhere oneDNN's prepacked
    ones are several times faster, but autotuning does not see it, since it times one weight that stays in the cache."""
    tiles = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    return {"freezing": True} | (tiles if torch.cpu._is_amx_tile_supported() else {})


@lru_cache(maxsize=1)
def _surroundings() -> tuple[str, ...]:
    """What besides the recipe decides whether a library fits: libraries, options, the exact processor."""
    return torch.__version__, version("transformers"), json.dumps(_options()), processor()


@lru_cache(maxsize=1)
def processor() -> str:
    """Identifies this very processor: a library is compiled for it, and another of the same kind may lack an
    instruction."""
    capability = torch.backends.cpu.get_cpu_capability()
    about = [platform.machine(), capability, torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        about.append(platform.processor())
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


@lru_cache
def _source_key(maker: str) -> str:
    """Changes whenever the computation may have changed."""
    here = Path(__file__).parent
    spec = importlib.util.find_spec(maker)
    files = {here / "fused.py", here / "steps.py", *([Path(spec.origin)] if spec and spec.origin else [])}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]


class Step:
    """A loaded library: flat input tensors -> flat outputs; keys and values change in place."""

    def __init__(self, path: Path) -> None:
        runner: Any = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
        self._run = runner.run

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        return self._run(inputs)


def in_use(path: Path) -> None:
    """Note that a library is used: see ``_forget_old``."""
    with contextlib.suppress(OSError):
        os.utime(path.parent)


def load(path: Path) -> Step | None:
    """The step in a library, or None where there is none or it cannot be used."""
    if not path.is_file():
        return None
    try:
        step = Step(path)
        in_use(path)
        return step
    except Exception as error:  # a library of another machine or a broken file: decode eagerly
        log.warning("the compiled step %s cannot be used: %s", path, error)
        path.unlink(missing_ok=True)
        return None


# --- building ---------------------------------------------------------------------------------------------------------


HOME = Path(__file__).resolve().parent.parent
"""Where a library's ``command`` is run."""


class Library(Protocol):
    """What can be built apart: a ``Recipe``, or the kernel."""

    @property
    def name(self) -> str:
        """Of the model, or what it is."""

    @property
    def width(self) -> int:
        """Tokens per pass."""

    @property
    def size(self) -> int:
        """Bytes of weights inside."""

    @property
    def path(self) -> Path:
        """Where its library is, or would be."""

    @property
    def built(self) -> bool:
        """True when it is there."""

    def command(self) -> list[str]:
        """What builds it in a process of its own; with "modest" behind it leaves the processor to others."""


def build_apart(library: Library) -> None:
    """Build in a process of its own, so that its memory goes when it ends. Raises ModelError."""
    done = subprocess.run(library.command(), cwd=HOME, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode or not library.built:
        said = failure(done.returncode, done.stderr.decode(errors="replace"))
        raise ModelError(f"{library.name} could not be compiled for {library.width} tokens per pass: {said}")


def failure(code: int, errors: str) -> str:
    """Why a build failed, in a few words, from its exit code and what it wrote to stderr."""
    if "No space left" in errors:
        return "the disk is full"
    if code < 0:
        return f"the compiler was stopped (signal {-code})"
    return (errors.strip().splitlines() or ["the compiler ended without a word"])[-1][:200]


def build(recipe: Recipe) -> None:
    """Compile ``recipe`` in this process."""
    with building(recipe.path) as work:
        if work is None:
            return
        # Whatever the compiler leaves behind lies here and goes at the end; also the temporary files of g++.
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TMPDIR"] = str(work / "inductor"), str(work)
        tempfile.tempdir = None
        _compile(recipe, work / "step.pt2").replace(recipe.path)


@contextlib.contextmanager
def building(path: Path) -> Iterator[Path | None]:
    """Yields a folder to build ``path`` in, which goes at the end; None where it is there already. A second builder of
    the same library waits for the first and finds it done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    in_use(path)
    _forget_old()
    with _locked(path.with_suffix(".lock")):
        if path.is_file():
            yield None
            return
        work = path.with_suffix(".work")
        shutil.rmtree(work, ignore_errors=True)  # of a builder that was killed
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _forget_old() -> None:
    """Delete what no program has loaded for long (former versions, models that are gone), and what builders that were
    killed left behind."""
    for folder in compiled_dir().iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    for work in compiled_dir().glob("*/*.work"):
        with _locked(work.with_suffix(".lock"), wait=False) as ours:
            if ours:
                shutil.rmtree(work, ignore_errors=True)


def _compile(recipe: Recipe, package: Path) -> Path:
    """The library, beside ``package``."""
    import zipfile

    module, _, function = recipe.maker.partition(":")
    maker = getattr(importlib.import_module(module), function)
    torch.set_num_threads(recipe.threads)
    step, example, dynamic = maker(recipe.source, recipe.dtype, width=recipe.width, **recipe.options)
    with torch.no_grad():
        exported = torch.export.export(step, example, dynamic_shapes=dynamic)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=_options())
    with zipfile.ZipFile(package) as archive:
        # The library alone is kept: it can be mapped where it lies, whereas a package is unpacked at every start.
        libraries = [name for name in archive.namelist() if name.endswith((".so", ".dylib"))]
        if len(libraries) != 1:
            raise RuntimeError(f"expected one library in the package, found {len(libraries)}")
        out = package.with_suffix(".so")
        with archive.open(libraries[0]) as source, out.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)
    return out


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that goes with this process, however it ends. Yields whether it is held: not without ``wait`` while
    somebody else has it, nor where the system has no locks (the rename still keeps files whole)."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:
            held = False
        yield held


def builder_main(arguments: Sequence[str], path: Path, work: Callable[[], None]) -> None:
    """The end of a builder's command line, "PATH [modest]": do ``work`` if it makes just that library; one line on
    stderr where it fails."""
    if "modest" in arguments[1:]:
        be_modest()
    try:
        if str(path) != arguments[0]:
            raise RuntimeError("the program was changed since it was started")
        work()
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        raise SystemExit(1) from None


def main(arguments: Sequence[str]) -> None:
    """``python -m decoder.packages RECIPE PATH [modest]``: build one step."""
    recipe = Recipe(**json.loads(arguments[0]))
    builder_main(arguments[1:], recipe.path, lambda: build(recipe))


if __name__ == "__main__":
    main(sys.argv[1:])
