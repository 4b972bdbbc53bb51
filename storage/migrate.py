"""Bring a database to the newest revision, from nothing or from any earlier one, with what it holds.

The revisions lie in ``migrations/versions``; Alembic finds them by this file's own path, so that the working folder
does not matter.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from storage.engine import WRITES, label
from storage.errors import DatabaseReadOnly, DatabaseUnusable, one_line

_FOLDER = Path(__file__).resolve().parent / "migrations"


def config() -> Config:
    """Alembic's configuration; ``config.attributes["connection"]`` is what env.py works on."""
    made = Config()
    # A percent sign in the path would be read as the start of an interpolation.
    made.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    return made


def revisions() -> list[str]:
    """All revisions of this program, oldest first."""
    script = ScriptDirectory.from_config(config())
    return [revision.revision for revision in reversed(list(script.walk_revisions()))]


def head() -> str:
    """The newest revision."""
    return revisions()[-1]


def current(connection: Connection) -> str | None:
    """The revision of the database, None when it holds no tables of ours."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: Engine, revision: str = "head", *, read_only: bool = False) -> None:
    """Upgrade to ``revision``. Raises DatabaseUnusable for foreign databases and ones of a newer program.

    Everything happens in one transaction that holds the write lock from its start: two processes that open a fresh
    database at once do not trip over each other, and a failing migration leaves the database as it was.
    """
    known = revisions()
    wanted = known[-1] if revision == "head" else revision
    with engine.connect() as connection:
        found = _found(connection, known)
    if found is not None and known.index(found) >= known.index(wanted):
        return
    if read_only:
        raise DatabaseReadOnly(
            f"{label(engine.url)} is read-only, and it is of revision {found or 'none'} while this program needs "
            f"{wanted}: open it once where it may be written to"
        )
    with engine.execution_options(**{WRITES: True}).begin() as connection:
        found = _found(connection, known)  # again, now that nobody else can change it
        if found is not None and known.index(found) >= known.index(wanted):
            return
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, wanted)


def _found(connection: Connection, known: list[str]) -> str | None:
    where = label(connection.engine.url)
    tables = set(sa.inspect(connection).get_table_names())
    found = current(connection) if "alembic_version" in tables else None
    if found is None:
        if tables - {"alembic_version"}:
            raise DatabaseUnusable(
                f"{where} belongs to another program (it has a table {one_line(min(tables), 60)!r}): "
                "name another database"
            )
        return None
    if found not in known:
        raise DatabaseUnusable(
            f"{where} was written by a newer Redline: it is of revision {one_line(found, 60)!r}, this program knows "
            f"up to {known[-1]!r}; update Redline, or name another database"
        )
    return found
