"""Scripts and styles of the page: the views' own, then the shell's. All inline: no folder is served."""

from __future__ import annotations

from playground.components.assets import head_html, inline

SCRIPTS = ("shell", "history-table")
STYLES = ("shell",)


def head() -> str:
    """Everything that the page's head holds."""
    return head_html() + "\n" + inline(STYLES, SCRIPTS)
