"""The door to the stored runs. Safe to use from many threads at once: every call has its own short session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa

from decoder.metrics import baseline_fits
from decoder.trace import Run
from storage import labels, query, spreadsheet, transfer
from storage.codec import searchable
from storage.database import Database, open_database
from storage.errors import StorageError
from storage.models import RunRow, TagRow
from storage.records import Facets, ImportedIds, Page, RunFilter, RunMeta, State, StoredRun
from storage.rows import find_row, insert_tags, load, load_run, refresh_speedup
from storage.sweep import find_dead, settle
from storage.writer import RunWriter

_CHUNK = 500
"""Ids per statement where many are changed at once."""


def open_store(url: str = "sqlite:///redline.db", *, create: bool = True, busy_timeout: float = 10.0) -> Store:
    """Open the database at ``url``; it is created (unless ``create`` is False) and upgraded as needed.

    ``busy_timeout``: seconds to wait while another process writes. Raises a StorageError with one sentence when the
    URL is malformed, the file is locked, not a database, foreign, or newer than this program. A file that may only be
    read is opened, with ``read_only`` set.
    """
    store = Store(open_database(url, create=create, busy_timeout=busy_timeout))
    settle(store.database)
    return store


class Store:
    """All runs of one database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @property
    def read_only(self) -> bool:
        """True when runs can be looked at but nothing can be stored."""
        return self.database.read_only

    @property
    def label(self) -> str:
        """The database in words: its path, or its URL without the password."""
        return self.database.label

    def close(self) -> None:
        """Close all connections. Writers that are still writing open new ones."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- writing runs -----------------------------------------------------------------------------------------

    def start_run(
        self, run: Run, *, author: str = "anonymous", name: str = "", tags: Iterable[str] = (), note: str = ""
    ) -> RunWriter:
        """Store the beginning of ``run`` as "running" and return who writes the rest.

        Raises StorageError when the id is taken or the run cannot be stored as it is.
        """
        meta = RunMeta(
            id=run.id,
            name=labels.check_name(name),
            tags=labels.check_tags(tags),
            note=labels.check_note(note),
            author=labels.check_author(author),
            created_at=datetime.now(UTC),
            state=State.RUNNING,
            archived=False,
            imported_from=None,
        )
        return RunWriter(self.database, run, meta)

    # --- reading runs -----------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> StoredRun:
        """The run with all its steps. Raises RunNotFound."""
        dead = settle(self.database)
        with self.database.read() as session:
            return load(session, run_id, dead)

    def summaries(
        self,
        wanted: RunFilter | None = None,
        sort: str = "created_at",
        descending: bool = True,
        limit: int = 50,
        offset: int = 0,
    ) -> Page:
        """One page of the runs that fit; ``sort`` is one of ``storage.query.SORTS``. No step is loaded."""
        dead = settle(self.database)
        with self.database.read() as session:
            return query.page(
                session,
                wanted or RunFilter(),
                sort=sort,
                descending=descending,
                limit=limit,
                offset=offset,
                dead=dead,
            )

    def ids(self, wanted: RunFilter | None = None) -> list[str]:
        """The ids of all runs that fit, newest first."""
        dead = settle(self.database)
        with self.database.read() as session:
            return query.matching_ids(session, wanted or RunFilter(), dead)

    def facets(self) -> Facets:
        """The distinct values that a filter can offer."""
        with self.database.read() as session:
            return query.facets(session)

    def recent_outputs(
        self, target: str, *, leave_out: Iterable[str] = (), runs: int = 200, tokens: int = 32_768
    ) -> list[list[int]]:
        """Output token ids of the newest ended runs of ``target``, newest first, without archived ones and
        ``leave_out``: what suffix decoding may draft from. At most ``runs`` lists and ``tokens`` ids."""
        with self.database.read() as session:
            return query.recent_outputs(session, target, set(leave_out), runs, tokens)

    # --- what people say about runs ---------------------------------------------------------------------------

    def rename(self, run_id: str, name: str) -> None:
        """Give the run another name; "" takes it away. Raises RunNotFound."""
        self._relabel(run_id, name=labels.check_name(name))

    def set_note(self, run_id: str, note: str) -> None:
        """Write another note on the run. Raises RunNotFound."""
        self._relabel(run_id, note=labels.check_note(note))

    def _relabel(self, run_id: str, **values: str) -> None:
        with self.database.write() as session:
            row = find_row(session, run_id)
            for column, value in values.items():
                setattr(row, column, value)
            row.label_search = searchable([row.name, row.note])

    def set_tags(self, run_id: str, tags: Iterable[str]) -> None:
        """Replace the tags of the run. Raises RunNotFound."""
        clean = labels.check_tags(tags)
        with self.database.write() as session:
            find_row(session, run_id)
            session.execute(sa.delete(TagRow).where(TagRow.run_id == run_id))
            insert_tags(session, run_id, clean)

    def archive(self, ids: Iterable[str], archived: bool = True) -> int:
        """Put runs away, or bring them back. Ids that are not here are passed over; returns how many were."""
        count = 0
        with self.database.write() as session:
            for some in _chunks(ids):
                count += _rows(
                    session.execute(sa.update(RunRow).where(RunRow.id.in_(some)).values(archived=bool(archived)))
                )
        return count

    def delete(self, ids: Iterable[str]) -> int:
        """Delete runs with their steps, for good. Ids that are not here are passed over; returns how many were.

        Runs that had one of them as baseline stay, without a speed-up. A run that is being written is not deleted:
        StorageError, and nothing is.
        """
        wanted = list(ids)
        settle(self.database)
        count = 0
        with self.database.write() as session:
            dead = find_dead(session)
            for some in _chunks(wanted):
                running = session.scalars(
                    sa.select(RunRow.id).where(RunRow.id.in_(some), RunRow.state == State.RUNNING.value)
                ).all()
                for run_id in running:
                    if run_id not in dead:
                        raise StorageError(f"run {run_id!r} is still running: stop it first, then delete it")
                session.execute(sa.update(RunRow).where(RunRow.baseline_id.in_(some)).values(speedup=None))
                count += _rows(session.execute(sa.delete(RunRow).where(RunRow.id.in_(some))))
        return count

    def link_baseline(self, run_id: str, baseline_id: str | None) -> str | None:
        """Make ``baseline_id`` the baseline of the run (None: it has none) and measure the speed-up.

        Returns why that baseline does not fit, None when it does. Raises RunNotFound for either id.
        """
        if run_id == baseline_id:
            raise StorageError(f"run {run_id!r} cannot be its own baseline")
        with self.database.write() as session:
            row = find_row(session, run_id)
            baseline = find_row(session, baseline_id) if baseline_id is not None else None
            row.baseline_id = baseline_id
            session.flush()
            run = load_run(session, row)
            if row.state == State.RUNNING:
                row.speedup = None
            else:
                refresh_speedup(session, run)
            return baseline_fits(run, load_run(session, baseline)) if baseline is not None else None

    # --- carrying runs away and back --------------------------------------------------------------------------

    def export_json(self, ids: Sequence[str]) -> str:
        """The runs as JSON, complete, in the order of ``ids``; ``import_json`` reads it. Raises RunNotFound."""
        return "".join(self.iter_json(ids))

    def iter_json(self, ids: Sequence[str]) -> Iterator[str]:
        """The same, run by run: for exports that are larger than memory."""
        return transfer.export(self.database, ids)

    def export_csv(self, ids: Sequence[str]) -> str:
        """One row per run, configuration and numbers, safe to open in a spreadsheet. Raises RunNotFound."""
        return spreadsheet.export(self.database, ids)

    def import_json(
        self,
        data: str | bytes,
        *,
        author: str = "anonymous",
        source: str = "import",
        max_bytes: int = transfer.MAX_BYTES,
    ) -> ImportedIds:
        """Take in an export, one Run, or a list of Runs: all of it or, raising ImportRefused, nothing.

        ``author`` signs runs that come without one; ``source`` (a file name) is kept as ``imported_from``. A run that
        is here already, identical, is left alone and listed under ``known``. Returns all ids in the file's order.
        """
        return transfer.take_in(self.database, data, author=author, source=source, max_bytes=max_bytes)


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    wanted = list(dict.fromkeys(ids))
    for start in range(0, len(wanted), _CHUNK):
        yield wanted[start : start + _CHUNK]


def _rows(result: Any) -> int:
    return int(result.rowcount)
