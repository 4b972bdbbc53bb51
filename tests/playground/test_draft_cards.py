"""A model card is foreign text: markdown is shown, nothing in it acts, nothing is fetched."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder import catalog
from playground import draft_cards
from playground.draft_cards import card, render

TAGS = {
    "h4", "h5", "h6", "p", "ul", "ol", "li", "strong", "em", "code", "pre", "blockquote", "hr", "br", "a", "span",
    "img", "table", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd", "details", "summary", "div", "b",
}  # fmt: skip
ATTRIBUTES = {"href", "rel", "target", "src", "alt", "class", "style", "start", "tabindex", "role", "aria-label"}
HOSTILE = """---
license: "><script>window.HACKED=1</script>
base_model: ${window.HACKED=2}
---
# <img src=x onerror=window.HACKED=3> title
<script>window.HACKED=4</script>
<details open ontoggle="window.HACKED=5">

[a](javascript:window.HACKED=6) [b](JaVaScRiPt:window.HACKED=7 "x") [c](data:text/html,<script>1</script>)
[d](https://example.org/"onmouseover="window.HACKED=8) <javascript:window.HACKED=9>
[e](//example.org/x) [f](/?run=r1)
![remote](https://example.org/track.png) ![up](../secret.svg) ![file](file:///etc/passwd) ![no](notes.txt)
![curve](curve.svg)

| <i>a</i> | b |
|:---|---|
| `{{constructor}}` | \u202egnp.exe |

```html" onload="window.HACKED=10
</code></pre><script>window.HACKED=11</script>
```
"""


class Reader(HTMLParser):
    """Every tag and attribute that a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def harmless(text: str) -> None:
    for tag, attributes in Reader(text).found:
        assert tag in TAGS, tag
        assert set(attributes) <= ATTRIBUTES, attributes
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("http://", "https://"))
            assert "noopener" in str(attributes["rel"])
        if "src" in attributes:
            assert str(attributes["src"]).startswith(("data:image/svg+xml;base64,", "data:image/png;base64,"))
        if "style" in attributes:
            assert str(attributes["style"]).startswith("text-align:")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "<b>mine"
    found.mkdir()
    (found / "config.json").write_text("{}")
    (found / "model.safetensors").write_bytes(b"")
    (found / "README.md").write_text(HOSTILE)
    (found / "curve.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>window.HACKED=12</script></svg>")
    (tmp_path / "secret.svg").write_text("<svg/>")
    return found


def test_a_hostile_card_is_text(folder: Path) -> None:
    shown = card(str(folder))
    harmless(shown)
    tags = [tag for tag, _ in Reader(shown).found]
    assert tags.count("img") == 1  # the curve beside the card; no remote image, nothing from another folder
    assert tags.count("a") == 1  # [d] leads to the web, its quotes are part of the address
    assert "&lt;script&gt;window.HACKED=4" in shown
    assert "[remote]" in shown
    assert "\u202e" not in shown
    assert "<b>&lt;b&gt;mine</b>" in shown


@given(st.text(max_size=300))
def test_no_text_gets_a_tag_through(text: str) -> None:
    harmless(render(text))


@given(
    st.lists(
        st.sampled_from(["<", ">", '"', "[", "](", ")", "!", "javascript:", "data:", "`", "|", "\n", "&#x", "a"]),
        max_size=40,
    )
)
def test_no_markup_gets_a_tag_through(parts: list[str]) -> None:
    harmless(render("".join(parts)))


@pytest.mark.parametrize("entry", [e for e in catalog.drafts() if e.path], ids=lambda e: e.name)
def test_shipped_drafts_have_a_card_with_its_picture(entry: catalog.ModelEntry) -> None:
    shown = card(entry.name)
    harmless(shown)
    assert "Held-out acceptance" in shown
    assert "apache-2.0" in shown
    assert "data:image/svg+xml;base64," in shown


def test_only_the_folder_of_a_model_has_a_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# not yours")
    for name in (str(tmp_path), "/etc", "nobody/draft", "", "a\0b", "x" * 5000, None, 7):
        assert card(name) == ""


def test_a_card_that_changed_is_read_again_and_a_long_one_is_cut(folder: Path) -> None:
    import os

    card(str(folder))
    (folder / "README.md").write_text("word " * draft_cards.MAX_CARD)
    os.utime(folder / "README.md", ns=(1, 1))
    shown = card(str(folder))
    assert "The card goes on" in shown
    assert len(shown) < 2 * draft_cards.MAX_CARD
