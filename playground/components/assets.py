"""The page's own CSS and JavaScript, inlined into the head, so that nothing is fetched and no folder is served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[2] / "assets"

SCRIPTS = (
    "base",
    "model",
    "store",
    "marks",
    "answer",
    "ladder",
    "peek",
    "why",
    "numbers",
    "race",
    "scrubber",
    "compare",
    "address",
    "picker",
    "mount",
)
"""In order of need: each file uses only what stands before it."""

STYLES = (
    "tokens",
    "page",
    "controls",
    "picker",
    "card",
    "marks",
    "answer",
    "numbers",
    "ladder",
    "why",
    "race",
    "compare",
    "narrow",
)


def _read(folder: str, name: str) -> str:
    text = (ASSETS / folder / f"{name}.{folder}").read_text(encoding="utf-8")
    for tag in ("</script", "</style", "<!--"):
        if tag in text.lower():
            raise ValueError(f"assets/{folder}/{name}.{folder} holds {tag!r}, which would end the element it stands in")
    return text


def head_html() -> str:
    """For ``launch(head=...)``: styles and scripts of the stage, inline. Loads nothing from anywhere."""
    return inline(STYLES, SCRIPTS)


def inline(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Files of ``assets/css`` and ``assets/js``, by name, as elements for a page's head."""
    css = "\n".join(_read("css", name) for name in styles)
    parts = [f"<style>\n{css}\n</style>"]
    parts += [f"<script>\n{_read('js', name)}\n//# sourceURL=redline/{name}.js\n</script>" for name in scripts]
    return "\n".join(parts)
