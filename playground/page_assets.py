"""Scripts and styles of the page: the views' own, then the shell's. All inline: no folder is served."""

from __future__ import annotations

from pathlib import Path

from playground.components import head_html

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SCRIPTS = ("shell.js", "history-table.js")
STYLE = "shell.css"


def head() -> str:
    """Everything that the page's head holds."""
    parts = [head_html(), f"<style>\n{_read('css', STYLE)}\n</style>"]
    parts += [f"<script>\n{_read('js', name)}\n//# sourceURL=redline/{name}\n</script>" for name in SCRIPTS]
    return "\n".join(parts)


def _read(folder: str, name: str) -> str:
    text = (ASSETS / folder / name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower():
        raise ValueError(f"assets/{folder}/{name} holds a closing tag, which would end the element it stands in")
    return text
