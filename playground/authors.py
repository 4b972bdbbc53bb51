"""Whose run it is: the signed-in name, else the name that was typed in the header, else "anonymous"."""

from __future__ import annotations

import unicodedata
from typing import Any

ANONYMOUS = "anonymous"
MAX_AUTHOR = 64


def clean_author(typed: Any) -> str:
    """A name that is safe to store and show: visible characters, single spaces, at most 64 characters."""
    if not isinstance(typed, str):
        return ANONYMOUS
    spaced = " ".join(typed[:1000].split())
    visible = "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn"))
    return visible[:MAX_AUTHOR].strip() or ANONYMOUS


def author_of(signed_in: str | None, typed: Any) -> str:
    """The author of what this visitor does. A signed-in name cannot be overridden by a typed one."""
    return clean_author(signed_in) if signed_in else clean_author(typed)
