"""Design tokens: contrast in light and in dark, and nothing that would be fetched from elsewhere."""

from __future__ import annotations

import re

import pytest

from playground.components.assets import ASSETS, SCRIPTS, STYLES, head_html

TOKENS = (ASSETS / "css" / "tokens.css").read_text(encoding="utf-8")
TEXT = 4.5
GRAPHIC = 3.0


def theme(selector: str) -> dict[str, str]:
    block = TOKENS[TOKENS.index(f"\n{selector} {{") :]
    return dict(re.findall(r"--rl-([\w-]+):\s*(#[0-9a-f]{6});", block[: block.index("}")]))


LIGHT = theme(":root")
DARK = {**LIGHT, **theme(".dark")}


def luminance(colour: str) -> float:
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


PAIRS = [
    ("ink", "card", TEXT),
    ("ink", "paper", TEXT),
    ("ink-2", "card", TEXT),
    ("ink-2", "paper", TEXT),
    ("ink-2", "sunk", TEXT),
    ("paper", "ink", TEXT),
    ("accepted", "card", TEXT),
    ("ink", "accepted-bg", TEXT),
    ("rejected", "card", TEXT),
    ("rejected", "rejected-bg", TEXT),
    ("rejected", "accent-soft", TEXT),
    ("untested", "card", TEXT),
    ("untested", "accent-soft", TEXT),
    ("corrected", "card", TEXT),
    ("corrected", "corrected-bg", TEXT),
    ("bonus", "card", TEXT),
    ("bonus", "bonus-bg", TEXT),
    ("ink", "target-bg", TEXT),
    ("accepted-line", "card", GRAPHIC),
    ("bonus-line", "card", GRAPHIC),
    ("accent", "card", GRAPHIC),
    ("bar-p", "card", GRAPHIC),
    ("bar-residual", "card", GRAPHIC),
]


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize(("front", "back", "least"), PAIRS)
def test_contrast(name: str, front: str, back: str, least: float) -> None:
    colours = LIGHT if name == "light" else DARK
    assert contrast(colours[front], colours[back]) >= least


def test_the_head_loads_nothing_from_elsewhere() -> None:
    head = head_html()
    assert not re.search(r"https?://(?!www\.w3\.org/)", head)
    assert "@import" not in head
    assert "url(" not in head
    assert "src=" not in head
    assert "link rel" not in head


def test_every_file_is_inlined_once_and_none_writes_markup() -> None:
    for name in SCRIPTS:
        source = (ASSETS / "js" / f"{name}.js").read_text(encoding="utf-8")
        assert source.lstrip().startswith("/*"), f"{name}.js says first what it is for"
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in source, f"{name}.js uses {way}"
        assert len(source.splitlines()) < 350
    for name in STYLES:
        assert (ASSETS / "css" / f"{name}.css").is_file()
