"""The model card of a draft as HTML that is safe to show: markdown only, no raw HTML, nothing that is fetched.

A card is foreign text. Tags in it are shown as text, only absolute http(s) links stay links, and an image is shown
only when it is a file beside the card; it then travels inside the page, where an SVG can neither run nor load anything.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from decoder import catalog
from playground.deeplinks import shown

MAX_CARD = 64_000
"""Bytes of a README that are read."""
MAX_IMAGE = 400_000
_IMAGES = {".svg": "image/svg+xml", ".png": "image/png"}
_FRONT = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_FACTS = (("license", "Licence"), ("base_model", "Made for"))


def card(draft: Any) -> str:
    """The card of ``draft`` (a shipped draft's name, or the folder of one) as a fold-out, or "" where there is none."""
    folder = _folder(draft) if isinstance(draft, str) else None
    readme = folder / "README.md" if folder else None
    if folder is None or readme is None or not readme.is_file():
        return ""
    try:
        changed = readme.stat().st_mtime_ns
        body = _rendered(folder, changed)
    except OSError:
        return ""
    title = html.escape(shown(folder.name))
    return (
        '<details class="rl-draft-card"><summary>Model card of '
        f"<b>{title}</b></summary><div class='rl-card-text' tabindex='0' role='region' "
        f"aria-label='Model card of {title}'>{body}</div></details>"
    )


def _folder(draft: str) -> Path | None:
    """The folder of a draft that is on this machine. Only a model's folder: no other README is anybody's business."""
    entry = catalog.find(draft)
    folder = entry.path if entry else Path(draft).expanduser() if "/" in draft or "\\" in draft else None
    try:
        if folder is None or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            return None
        return folder.resolve()
    except (OSError, ValueError):  # a name that is no path
        return None


@lru_cache(maxsize=32)
def _rendered(folder: Path, changed: int) -> str:
    with (folder / "README.md").open("rb") as file:
        raw = file.read(MAX_CARD + 1)
    text = _visible(raw[:MAX_CARD].decode("utf-8", errors="replace"))
    front = _FRONT.match(text)
    facts = _facts(front[1]) if front else ""
    cut = "<p>The card goes on; this is its beginning.</p>" if len(raw) > MAX_CARD else ""
    return facts + render(text[front.end() :] if front else text, folder) + cut


def _visible(text: str) -> str:
    """Control and direction characters are replaced: they are to be seen, not obeyed."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "" if c == "\r" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _facts(front: str) -> str:
    """Licence and target from the lines between the dashes, which are shown even when the text below forgets them."""
    found = dict(re.findall(r"^(\w+):[ \t]*(\S.*?)\s*$", front, re.MULTILINE))
    lines = [f"<dt>{title}</dt><dd>{html.escape(shown(found[key], 120))}</dd>" for key, title in _FACTS if key in found]
    return f"<dl>{''.join(lines)}</dl>" if lines else ""


def render(text: str, folder: Path | None = None) -> str:
    """Markdown as HTML without any of the text's own tags; images come from ``folder`` alone."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("image", lambda _, tokens, i, options, env: _image(tokens[i], folder))
    tokens = parser.parse(text)
    _tame(tokens)
    return str(parser.renderer.render(tokens, parser.options, {}))


def _tame(tokens: Sequence[Any]) -> None:
    """Headings below those of the page; links that leave the page say so to the browser, all others are plain text."""
    opened: list[bool] = []
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 3)}"
        elif token.type == "link_open":
            address = str(token.attrs.get("href", ""))
            leads = _is_web(address)
            opened.append(leads)
            token.attrs = {"href": address, "rel": "noopener noreferrer nofollow", "target": "_blank"} if leads else {}
            token.tag = "a" if leads else "span"
        elif token.type == "link_close":
            token.tag = "a" if opened and opened.pop() else "span"
        if token.children:
            _tame(token.children)


def _is_web(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def _image(token: Any, folder: Path | None) -> str:
    """An image file beside the card, inside the page; of any other image only its description."""
    name, words = str(token.attrs.get("src", "")), html.escape(token.content or "picture")
    kind = _IMAGES.get(Path(name).suffix.lower())
    if folder is not None and kind and re.fullmatch(r"[\w][\w.-]*", name):
        file = folder / name
        try:
            if file.is_file() and file.stat().st_size <= MAX_IMAGE:
                data = base64.b64encode(file.read_bytes()).decode("ascii")
                return f'<img src="data:{kind};base64,{data}" alt="{words}">'
        except OSError:
            pass
    return f'<span class="rl-no-image">[{words}]</span>'
