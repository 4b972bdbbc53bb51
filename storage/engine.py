"""From a database URL to an engine, and from a driver's errors to sentences. All that is special to SQLite is here.

SQLite runs in WAL mode (readers never wait for the writer), and every transaction that writes begins with BEGIN
IMMEDIATE: it waits for the lock at its start, where waiting is harmless, instead of failing half-way through when a
reader wants to become a writer.
"""

from __future__ import annotations

import os
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.pool import NullPool, StaticPool

from storage.errors import DatabaseLocked, DatabaseReadOnly, DatabaseUnusable, StorageError, one_line

WRITES = "redline_writes"
"""Execution option of an engine whose transactions write."""


def parse_url(url: str) -> URL:
    """Read a URL; a relative SQLite path is pinned to the present working folder, for later connections."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        hint = f"sqlite:///{url}" if url.isprintable() and url and ":" not in url else "sqlite:///redline.db"
        raise DatabaseUnusable(f"{one_line(url, 200)!r} is not a database URL: write for example {hint}") from None
    if parsed.get_backend_name() != "sqlite":
        return parsed
    if parsed.host:
        raise DatabaseUnusable(
            f"{one_line(url, 200)!r} names a host: an SQLite URL has three slashes, for example sqlite:///redline.db"
        )
    if is_memory(parsed):
        return parsed
    database = parsed.database or ""
    if database.startswith("file:"):
        raise DatabaseUnusable("file: addresses are not supported: write the path, for example sqlite:///redline.db")
    if "\0" in database:
        raise DatabaseUnusable("the path of the database holds a NUL character")
    return parsed.set(database=os.path.abspath(os.path.expanduser(database)))


def is_memory(url: URL) -> bool:
    """True for an SQLite database that lives in memory only."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def label(url: URL) -> str:
    """The database in words, for error messages: a path, or the URL without its password."""
    if url.get_backend_name() == "sqlite":
        return one_line(url.database or "the database in memory", 300)
    return one_line(url.render_as_string(hide_password=True), 300)


def check_file(url: URL, *, create: bool) -> bool:
    """Whether the SQLite file can only be read; raises DatabaseUnusable where there can be no database."""
    path = Path(url.database or "")
    try:
        if path.is_dir():
            raise DatabaseUnusable(f"{label(url)} is a folder: name a file in it, for example {label(url)}/redline.db")
        exists = path.exists()
    except OSError as error:
        raise DatabaseUnusable(f"{label(url)} cannot be looked at: {error.strerror}") from None
    folder = path.parent
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist: create it first, or name another database"
        raise DatabaseUnusable(f"the folder {one_line(str(folder), 300)} {what}")
    if not exists:
        if not create:
            raise DatabaseUnusable(f"there is no database at {label(url)}")
        if not _may(folder, os.W_OK | os.X_OK):
            raise DatabaseUnusable(
                f"{label(url)} cannot be created: the folder may not be written to; name another database"
            )
        return False
    if not path.is_file():
        raise DatabaseUnusable(f"{label(url)} is not a regular file")
    if not _may(path, os.R_OK):
        raise DatabaseUnusable(f"{label(url)} may not be read by this user")
    # SQLite keeps its journal beside the file: a folder that cannot be written to makes the database read-only too.
    return not (_may(path, os.W_OK) and _may(folder, os.W_OK | os.X_OK))


def _may(path: Path, mode: int) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(path, mode, effective_ids=effective)


def make_engine(url: URL, *, read_only: bool, busy_timeout: float) -> Engine:
    """An engine for ``url``; ``busy_timeout`` is how many seconds SQLite waits for a lock."""
    if url.get_backend_name() != "sqlite":
        try:
            return sa.create_engine(url, pool_pre_ping=True)
        except (sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
            raise DatabaseUnusable(f"no driver for {url.drivername!r} is installed ({one_line(str(error))})") from None
    options: dict[str, Any] = {"connect_args": {"timeout": busy_timeout, "check_same_thread": False}}
    if is_memory(url):
        options["poolclass"] = StaticPool
    elif read_only:
        # Opened anew for each use: what _connect_read_only finds out holds for a short while only.
        options = {"poolclass": NullPool, "creator": lambda: _connect_read_only(url.database or "", busy_timeout)}
    else:
        options |= {"pool_size": 8, "max_overflow": 64}
    engine = sa.create_engine(url, **options)
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _on_begin does
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _connect_read_only(path: str, busy_timeout: float) -> sqlite3.Connection:
    # A plain read-only connection to a WAL database at rest would make a journal beside it, and leave it there under
    # this user's name: in the way of the user who may write. Without a journal nobody has the database open, so that
    # it may be read as it lies, for the short while of one call.
    at_rest = not any(Path(path + suffix).exists() for suffix in ("-wal", "-journal"))
    mode = "immutable=1" if at_rest else "mode=ro"
    address = f"file:{urllib.parse.quote(path)}?{mode}"
    return sqlite3.connect(address, uri=True, timeout=busy_timeout, check_same_thread=False)


def use_wal(engine: Engine, busy_timeout: float) -> None:
    """Switch an SQLite file to WAL. The switch does not wait for other connections by itself, hence the loop."""
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            with engine.connect() as connection:
                cursor = connection.connection.cursor()
                try:
                    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                        cursor.execute("PRAGMA journal_mode = WAL")
                finally:
                    cursor.close()
            return
        except sqlite3.OperationalError as error:
            if _primary_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _primary_code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


@contextmanager
def friendly(url: URL) -> Iterator[None]:
    """Turn what the driver raises into a StorageError."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise _translate(error.orig, url) from error
    except sqlite3.Error as error:
        raise _translate(error, url) from error
    except UnicodeEncodeError as error:
        raise StorageError("half of a surrogate pair is no text: it can be neither stored nor looked for") from error
    except sa.exc.TimeoutError as error:
        raise DatabaseLocked(f"{label(url)}: every connection is in use: try again in a moment") from error


def _translate(error: BaseException | None, url: URL) -> StorageError:
    where = label(url)
    code = _primary_code(error)
    detail = one_line(str(error), 200)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseLocked(f"{where} is locked by another process: try again when that one has finished")
    if code == sqlite3.SQLITE_READONLY:
        return DatabaseReadOnly(f"{where} is read-only: nothing can be stored in it")
    if code == sqlite3.SQLITE_NOTADB:
        return DatabaseUnusable(f"{where} is not a database: name another file, or move this one away")
    if code == sqlite3.SQLITE_CORRUPT:
        return DatabaseUnusable(f"{where} is damaged ({detail}): restore it from a copy")
    if code == sqlite3.SQLITE_FULL:
        return StorageError(f"the disk is full: nothing more could be stored in {where}")
    if code == sqlite3.SQLITE_CANTOPEN:
        return DatabaseUnusable(f"{where} cannot be opened: check that the file and its folder may be written to")
    if code == sqlite3.SQLITE_IOERR:
        return StorageError(f"{where} cannot be read or written ({detail}): check the disk")
    return StorageError(f"the database {where} refused: {detail}")
