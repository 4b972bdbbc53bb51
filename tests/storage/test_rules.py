"""The rules of this room: what it may import, and where SQLite may be spoken of."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "storage").rglob("*.py"))
ALLOWED_DECODER = {f"decoder.{name}" for name in ("errors", "metrics", "request", "terminal", "trace")}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_storage_knows_neither_torch_nor_the_page() -> None:
    for path in FILES:
        for name in imports(path):
            root = name.split(".")[0]
            assert root not in {"torch", "transformers", "gradio", "playground", "numpy", "pandas"}, (path.name, name)
            assert root != "decoder" or name in ALLOWED_DECODER, (path.name, name)


def test_importing_storage_loads_no_heavy_library() -> None:
    code = "import sys, storage, storage.__main__; print(*{'torch', 'transformers', 'gradio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_sqlite_has_one_place() -> None:
    for path in FILES:
        if path.name != "engine.py":
            text = path.read_text(encoding="utf-8")
            assert "PRAGMA" not in text, path.name
            assert "sqlite3" not in imports(path), path.name
            assert "sqlalchemy.dialects.sqlite" not in text, path.name


def test_files_can_be_held_in_the_head() -> None:
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, path.name
