"""What can go wrong with stored runs, each as one sentence that says what is wrong and what would be right."""

from __future__ import annotations

from decoder.errors import RedlineError


class StorageError(RedlineError):
    """Base of everything that storage refuses or cannot do."""


class RunNotFound(StorageError):
    """A run id that is not in the database; ``run_id`` is the id that was asked for."""

    def __init__(self, run_id: str, problem: str | None = None) -> None:
        self.run_id = run_id
        super().__init__(problem or f"there is no run {one_line(run_id, 80)!r} in this database")


class DatabaseLocked(StorageError):
    """Another process holds the database; trying again later is right, nothing was written."""


class DatabaseReadOnly(StorageError):
    """The database can be read, not written."""


class DatabaseUnusable(StorageError):
    """There is no usable database at this address: a folder, foreign, damaged, newer than the program, ..."""


class ImportRefused(StorageError):
    """A file that is not taken in; nothing of it was stored. The text holds the line and column, or the field."""


def one_line(text: str, limit: int = 500) -> str:
    """``text`` as one printable line: controls, bidi marks and lone surrogates are escaped, the rest is cut off."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
