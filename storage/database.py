"""An open database: short transactions, one session per call, so that any thread may use it at any time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import URL, Engine
from sqlalchemy.orm import Session

from storage.engine import WRITES, check_file, friendly, is_memory, label, make_engine, parse_url, use_wal
from storage.errors import DatabaseReadOnly
from storage.migrate import upgrade


class Database:
    """``read_only``: the file may only be read; every ``write`` is refused."""

    def __init__(self, url: URL, engine: Engine, *, read_only: bool) -> None:
        self.url = url
        self.engine = engine
        self.read_only = read_only
        self._writing = engine.execution_options(**{WRITES: True})
        # A database in memory has one connection only, which threads must take turns with.
        self._turn = threading.RLock() if is_memory(url) else None

    @property
    def label(self) -> str:
        """The database in words: its path, or its URL without the password."""
        return label(self.url)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one state of the database throughout."""
        with self._turns(), friendly(self.url), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that holds the write lock from its first statement; committed at the end, or not at all."""
        if self.read_only:
            raise DatabaseReadOnly(
                f"{self.label} is read-only: runs can be looked at, nothing can be stored or changed"
            )
        with self._turns(), friendly(self.url), Session(self._writing) as session, session.begin():
            yield session

    @contextmanager
    def _turns(self) -> Iterator[None]:
        if self._turn is None:
            yield
        else:
            with self._turn:
                yield

    def close(self) -> None:
        """Close the connections; SQLite folds its journal into the file."""
        self.engine.dispose()


def open_database(url: str, *, create: bool = True, busy_timeout: float = 10.0) -> Database:
    """Open, create or upgrade; raises a StorageError that says what is wrong with the address or the file."""
    parsed = parse_url(url)
    is_file = parsed.get_backend_name() == "sqlite" and not is_memory(parsed)
    read_only = check_file(parsed, create=create) if is_file else False
    engine = make_engine(parsed, read_only=read_only, busy_timeout=busy_timeout)
    try:
        with friendly(parsed):
            upgrade(engine, read_only=read_only)
            if is_file and not read_only:
                use_wal(engine, busy_timeout)
    except BaseException:
        engine.dispose()
        raise
    return Database(parsed, engine, read_only=read_only)
