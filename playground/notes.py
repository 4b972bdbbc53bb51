"""Sentences beside the controls. Everything is escaped: a sentence may quote what a stranger wrote."""

from __future__ import annotations

import html
from typing import Literal

Kind = Literal["info", "busy", "good", "warning", "error"]
_SIGN = {"info": "", "busy": "", "good": "✓", "warning": "!", "error": "✕"}


def note(text: str, kind: Kind = "info", fraction: float | None = None) -> str:
    """One message as HTML: a sign and a sentence (colour is never the only sign), with a bar if ``fraction`` is given.

    An empty ``text`` gives an empty string, which takes the message away.
    """
    if not text:
        return ""
    role = "alert" if kind == "error" else "status"
    sign = f'<span class="rl-note-sign" aria-hidden="true">{_SIGN[kind]}</span>' if _SIGN[kind] else ""
    bar = ""
    if fraction is not None:
        share = round(100 * min(1.0, max(0.0, fraction)))
        bar = (
            f'<span class="rl-bar" role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{share}">'
            f'<span style="width:{share}%"></span></span>'
        )
    return (
        f'<div class="rl-note rl-note-{kind}" role="{role}">{sign}<span>{html.escape(sentence(text))}</span>{bar}</div>'
    )


def sentence(text: str) -> str:
    """``text`` with a capital letter and a full stop, as far as that is safe to do."""
    text = text.strip()
    if not text:
        return ""
    head = text.split(maxsplit=1)[0]
    plain = head.rstrip(",:;").isalpha() and head.islower()
    text = text[0].upper() + text[1:] if plain else text
    return text if text[-1] in ".!?…:)%" else text + "."


def people_before(count: int) -> str:
    """The place in the queue, in words."""
    if count <= 0:
        return "Your run is next."
    return "1 person before you." if count == 1 else f"{count} people before you."
