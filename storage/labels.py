"""What people write on runs: names, notes, tags, authors. Refused at the edge when it cannot be kept."""

from __future__ import annotations

from collections.abc import Iterable

from storage.errors import StorageError, one_line

MAX_NAME = 200
MAX_NOTE = 100_000
MAX_TAG = 100
MAX_TAGS = 50
MAX_AUTHOR = 100


def check_text(what: str, text: object, limit: int) -> str:
    """``text`` itself, or StorageError when it is no text, too long, or holds half of a surrogate pair."""
    if not isinstance(text, str):
        raise StorageError(f"the {what} must be text, not {type(text).__name__}")
    if len(text) > limit:
        raise StorageError(f"the {what} has {len(text):,} characters: at most {limit:,}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise StorageError(f"the {what} holds half of a surrogate pair, which no text can hold") from None
    return text


def check_name(text: str) -> str:
    """The name of a run; may be empty."""
    return check_text("name", text, MAX_NAME)


def check_note(text: str) -> str:
    """The note on a run; may be empty."""
    return check_text("note", text, MAX_NOTE)


def check_author(text: str) -> str:
    """Who made a run; "anonymous" when nobody says so."""
    return check_text("author", text, MAX_AUTHOR).strip() or "anonymous"


def check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Tags without the space around them, each once, in their order."""
    if isinstance(tags, str):
        raise StorageError(f"tags are a list of texts, not the one text {one_line(tags, 40)!r}")
    clean = tuple(dict.fromkeys(check_text("tag", tag, MAX_TAG).strip() for tag in tags))
    if "" in clean:
        raise StorageError("a tag must not be empty")
    if len(clean) > MAX_TAGS:
        raise StorageError(f"{len(clean)} tags are too many for one run: at most {MAX_TAGS}")
    return clean
