"""The cache folder: converted models, compiled steps, kept benches. Importing this is cheap."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models are kept (``REDLINE_CACHE`` overrides the user's cache folder)."""
    if os.environ.get("REDLINE_CACHE"):
        return Path(os.environ["REDLINE_CACHE"])
    try:
        import platformdirs
    except ImportError:  # a bare machine with torch and transformers only
        return Path.home() / ".cache" / "redline"
    return Path(platformdirs.user_cache_dir("redline"))


def compiled_dir() -> Path:
    """Where compiled steps are kept."""
    return cache_dir() / "compiled"


def compiled_size() -> int:
    """Bytes of everything that was compiled."""
    size = 0
    for path in compiled_dir().rglob("*") if compiled_dir().is_dir() else ():
        with contextlib.suppress(OSError):  # somebody builds or clears at the same time
            size += path.stat().st_size if path.is_file() else 0
    return size


def clear_compiled() -> int:
    """Delete everything that was compiled; returns the bytes that were freed."""
    freed = compiled_size()
    shutil.rmtree(compiled_dir(), ignore_errors=True)
    return freed
