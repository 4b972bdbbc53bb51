"""Three rooms, one direction: what may import what, and what a cheap import must not pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "decoder": {"gradio", "sqlalchemy", "alembic", "plotly", "storage", "playground"},
    "storage": {"torch", "transformers", "gradio", "plotly", "playground"},
    "playground": set(),
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_keep_their_direction(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & FORBIDDEN[room], path


def test_storage_uses_only_the_pure_half_of_the_decoder() -> None:
    pure = {f"decoder.{name}" for name in ("trace", "request", "metrics", "errors", "terminal")} | {"decoder"}
    for path in (ROOT / "storage").rglob("*.py"):
        assert {n for n in imports(path) if n.split(".")[0] == "decoder"} <= pure, path


@pytest.mark.parametrize("statement", ["import decoder", "import decoder.catalog, decoder.cli", "import storage"])
def test_light_imports_stay_light(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules and 'gradio' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_no_pickle_and_no_remote_code() -> None:
    for room in FORBIDDEN:
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not imports(path) & {"pickle", "dill", "cloudpickle", "joblib"}, path
            assert "torch.load(" not in text, path
            assert "trust_remote_code=True" not in text, path
