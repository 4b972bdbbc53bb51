"""What is done with the rows of one run, inside a session that the caller has opened.

Every function here takes part in the caller's transaction; none commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from decoder.metrics import speedup
from decoder.trace import Run
from storage.codec import columns_of, decode_run, encode_body, finite, prompt_of, searchable
from storage.errors import RunNotFound, StorageError
from storage.liveness import Writer
from storage.models import RunRow, StepRow, TagRow, TraceRow
from storage.records import RunMeta, State, StoredRun

Payloads = Sequence[tuple[int, str]]
"""Encoded steps: index and JSON."""


def insert_run(session: Session, run: Run, meta: RunMeta, payloads: Payloads, writer: Writer | None = None) -> None:
    """A new run with its steps; ``writer`` is who goes on writing it, None when it is complete as it stands."""
    body = encode_body(run)
    if session.get(RunRow, run.id) is not None:
        raise StorageError(f"there is a run {run.id!r} in this database already")
    session.execute(
        sa.insert(RunRow).values(
            id=run.id,
            created_at=meta.created_at,
            author=meta.author,
            state=meta.state.value,
            name=meta.name,
            note=meta.note,
            label_search=searchable([meta.name, meta.note]),
            archived=meta.archived,
            imported_from=meta.imported_from,
            heartbeat_at=meta.created_at if writer else None,
            **_writer_columns(writer),
            **columns_of(run),
        )
    )
    session.execute(
        sa.insert(TraceRow).values(run_id=run.id, body=body, final=writer is None, search=_search_text(run))
    )
    insert_tags(session, run.id, meta.tags)
    insert_steps(session, run.id, payloads)


def _writer_columns(writer: Writer | None) -> dict[str, Any]:
    if writer is None:
        return {}
    return {
        "writer_token": writer.token,
        "writer_host": writer.host,
        "writer_pid": writer.pid,
        "writer_started": writer.started,
    }


def _search_text(run: Run) -> str:
    return searchable([prompt_of(run), run.text])


def insert_tags(session: Session, run_id: str, tags: Sequence[str]) -> None:
    """The tags of a run that has none."""
    if tags:
        session.execute(
            sa.insert(TagRow), [{"run_id": run_id, "tag": tag, "position": i} for i, tag in enumerate(tags)]
        )


def insert_steps(session: Session, run_id: str, payloads: Payloads) -> None:
    """Steps that are not there yet."""
    if payloads:
        session.execute(
            sa.insert(StepRow),
            [{"run_id": run_id, "index": index, "payload": payload} for index, payload in payloads],
        )


def write_end(session: Session, run: Run, state: State) -> None:
    """The run as it ended; its steps are written already. Speed-ups that hang on it are measured anew."""
    body = encode_body(run)
    session.execute(sa.update(RunRow).where(RunRow.id == run.id).values(state=state.value, **columns_of(run)))
    session.execute(
        sa.update(TraceRow).where(TraceRow.run_id == run.id).values(body=body, final=True, search=_search_text(run))
    )
    refresh_speedup(session, run)
    refresh_dependents(session, run)


def find_row(session: Session, run_id: str) -> RunRow:
    """The row of a run. Raises RunNotFound, also for what cannot be an id at all (ids come from addresses, too)."""
    row = session.get(RunRow, run_id) if isinstance(run_id, str) and run_id.isprintable() else None
    if row is None:
        raise RunNotFound(str(run_id))
    return row


def load(session: Session, run_id: str, dead: Collection[str] = ()) -> StoredRun:
    """The run with all its steps; ``dead`` are running runs whose writer is gone. Raises RunNotFound."""
    row = find_row(session, run_id)
    return StoredRun(load_run(session, row), meta_of(row, tags_of(session, [run_id]).get(run_id, ()), dead))


def load_run(session: Session, row: RunRow) -> Run:
    """The Run of ``row``, with all its steps."""
    trace = session.execute(sa.select(TraceRow.body, TraceRow.final).where(TraceRow.run_id == row.id)).one_or_none()
    if trace is None:
        raise StorageError(f"run {row.id!r}: what is stored of this run is damaged: its trace is gone")
    payloads = session.scalars(sa.select(StepRow.payload).where(StepRow.run_id == row.id).order_by(StepRow.index)).all()
    try:
        return decode_run(trace.body, payloads, final=trace.final, baseline_id=row.baseline_id)
    except StorageError as error:
        raise StorageError(f"run {row.id!r}: {error}") from error


def meta_of(row: RunRow, tags: Sequence[str], dead: Collection[str] = ()) -> RunMeta:
    """The meta of ``row``."""
    return RunMeta(
        id=row.id,
        name=row.name,
        tags=tuple(tags),
        note=row.note,
        author=row.author,
        created_at=row.created_at,
        state=State.INTERRUPTED if row.id in dead else State(row.state),
        archived=row.archived,
        imported_from=row.imported_from,
    )


def tags_of(session: Session, run_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tags of several runs, each in its order; runs without tags are left out."""
    rows = session.execute(
        sa.select(TagRow.run_id, TagRow.tag).where(TagRow.run_id.in_(list(run_ids))).order_by(TagRow.position)
    )
    found: dict[str, tuple[str, ...]] = {}
    for run_id, tag in rows:
        found[run_id] = (*found.get(run_id, ()), tag)
    return found


def refresh_speedup(session: Session, run: Run, loaded: dict[str, Run] | None = None) -> None:
    """Measure the speed-up of ``run`` against its baseline, as far as that is here and complete.

    ``loaded`` holds runs that need not be read again; what is read is added to it.
    """
    loaded = {} if loaded is None else loaded
    baseline = loaded.get(run.baseline_id or "")
    if baseline is None and run.baseline_id:
        row = session.get(RunRow, run.baseline_id)
        if row is not None and row.state != State.RUNNING:
            baseline = _load_sound(session, row)
    if baseline is not None:
        loaded[baseline.id] = baseline
    _set_speedup(session, run, baseline if baseline is not None and baseline.id != run.id else None)


def refresh_dependents(session: Session, baseline: Run, skip: Collection[str] = ()) -> None:
    """Measure the runs that name ``baseline``, which has just arrived or changed; those in ``skip`` are up to date."""
    rows = session.scalars(
        sa.select(RunRow).where(
            RunRow.baseline_id == baseline.id, RunRow.id != baseline.id, RunRow.state != State.RUNNING.value
        )
    ).all()
    for row in rows:
        run = None if row.id in skip else _load_sound(session, row)
        if run is not None:
            _set_speedup(session, run, baseline)


def _load_sound(session: Session, row: RunRow) -> Run | None:
    # A damaged run has no numbers; it must not keep a sound one from being stored.
    try:
        return load_run(session, row)
    except StorageError:
        return None


def _set_speedup(session: Session, run: Run, baseline: Run | None) -> None:
    session.execute(sa.update(RunRow).where(RunRow.id == run.id).values(speedup=finite(speedup(run, baseline))))
