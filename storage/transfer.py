"""Runs as JSON, out and in again, losslessly.

An export is ``{"redline": "runs", "schema": 1, "exported_at": ..., "runs": [{"run": Run, "meta": {...}}]}``. An import
also takes one bare Run (as ``python -m decoder run --json`` prints it) or a list of Runs. It is a matter of all or
nothing: everything is read and checked before the first row is written, and the rows are one transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from decoder.errors import TraceError
from decoder.trace import Run
from storage import labels
from storage.codec import dump
from storage.database import Database
from storage.errors import ImportRefused, StorageError, one_line
from storage.models import RunRow
from storage.records import ImportedIds, RunMeta, State, state_of
from storage.rows import find_row, insert_run, load, load_run, refresh_dependents, refresh_speedup
from storage.strict_json import parse
from storage.sweep import settle

KIND = "runs"
SCHEMA = 1
MAX_BYTES = 200_000_000
META_FIELDS = ("name", "tags", "note", "author", "created_at", "state", "archived")
"""What goes with a run. ``imported_from`` stays behind: it tells how a run came into *this* database."""


# --- out ------------------------------------------------------------------------------------------------------


def export(database: Database, ids: Sequence[str]) -> Iterator[str]:
    """The export in pieces. All ids are looked up before the first piece: RunNotFound comes at once or not at all."""
    wanted = list(dict.fromkeys(ids))
    dead = settle(database)
    with database.read() as session:
        for run_id in wanted:
            find_row(session, run_id)
    return _pieces(database, wanted, dead)


def _pieces(database: Database, ids: list[str], dead: set[str]) -> Iterator[str]:
    now = datetime.now(UTC).isoformat()
    yield f'{{"redline": "{KIND}", "schema": {SCHEMA}, "exported_at": "{now}", "runs": ['
    between = "\n"
    for run_id in ids:
        with database.read() as session:
            stored = load(session, run_id, dead)
        # One run a line, so that tools and error messages that count lines are of use.
        entry = json.dumps(
            {"run": stored.run.to_json(), "meta": meta_to_json(stored.meta)}, ensure_ascii=False, allow_nan=False
        )
        yield between + entry
        between = ",\n"
    yield "\n]}\n"


def meta_to_json(meta: RunMeta) -> dict[str, Any]:
    """What an export says about a run. The copy of a running run is an interrupted one: nobody goes on with it."""
    state = State.INTERRUPTED if meta.state is State.RUNNING else meta.state
    return {
        "name": meta.name,
        "tags": list(meta.tags),
        "note": meta.note,
        "author": meta.author,
        "created_at": meta.created_at.isoformat(),
        "state": state.value,
        "archived": meta.archived,
    }


# --- in -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    run: Run
    meta: RunMeta
    payloads: list[tuple[int, str]]


def take_in(
    database: Database, data: str | bytes, *, author: str, source: str, max_bytes: int = MAX_BYTES
) -> ImportedIds:
    """Store all runs of ``data`` that are not here yet, or raise ImportRefused and store nothing."""
    author = labels.check_author(author)
    source = labels.check_text("file name", one_line(source, 255), 255) or "import"
    raw = parse(data, max_bytes=max_bytes)
    try:
        entries = [_entry(*found, author, source, now) for found, now in zip(_found(raw), _moments(), strict=False)]
    except TraceError as error:
        raise ImportRefused(f"this file was refused: {one_line(str(error))}") from error
    except RecursionError:
        raise ImportRefused("this JSON is nested too deeply to be a run") from None
    _refuse_twins(entries)
    settle(database)
    known: list[str] = []
    with database.write() as session:
        fresh: list[_Entry] = []
        for entry in entries:
            row = session.get(RunRow, entry.run.id)
            if row is None:
                fresh.append(entry)
            elif load_run(session, row) == entry.run:
                known.append(entry.run.id)
            else:
                raise ImportRefused(
                    f"{entry.path or 'this file'}: there is another run {entry.run.id!r} in this database; nothing "
                    "was imported. Delete that one first, or take this one out of the file"
                )
        for entry in fresh:
            insert_run(session, entry.run, entry.meta, entry.payloads)
        loaded = {entry.run.id: entry.run for entry in fresh}
        for entry in fresh:
            refresh_speedup(session, entry.run, loaded)
        for entry in fresh:
            refresh_dependents(session, entry.run, skip=loaded)
    return ImportedIds([entry.run.id for entry in entries], known)


def _moments() -> Iterator[datetime]:
    """Creation times for runs that come without one: in the order of the file."""
    now = datetime.now(UTC)
    while True:
        yield now
        now += timedelta(microseconds=1)


def _found(raw: Any) -> Iterator[tuple[str, Any, str | None, Any]]:
    """Path and JSON of every run in the file, then path and JSON of its meta."""
    if isinstance(raw, list):
        for index, item in enumerate(raw):
            yield f"[{index}]", item, None, None
    elif isinstance(raw, Mapping) and "redline" in raw:
        for index, item in enumerate(_envelope(raw)):
            path = f"runs[{index}]"
            entry = _object(item, path, ("run", "meta"), required=("run",))
            yield f"{path}.run", entry["run"], f"{path}.meta", entry.get("meta")
    elif isinstance(raw, Mapping) and {"schema", "id", "steps"} & set(raw):
        yield "", raw, None, None
    else:
        raise TraceError("", "it holds neither an export of Redline nor a run (an object with schema, id, steps, ...)")


def _envelope(raw: Mapping[str, Any]) -> list[Any]:
    fields = ("redline", "schema", "exported_at", "runs")
    _object(raw, "", fields, required=("redline", "schema", "runs"))
    if raw["redline"] != KIND:
        raise TraceError("redline", f"expected {KIND!r}")
    if type(raw["schema"]) is not int or raw["schema"] != SCHEMA:
        raise TraceError("schema", f"this program reads exports of schema {SCHEMA}")
    if not isinstance(raw["runs"], list):
        raise TraceError("runs", "expected a list")
    return raw["runs"]


def _object(data: Any, path: str, fields: Sequence[str], *, required: Sequence[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise TraceError(path, "expected an object")
    dot = f"{path}." if path else ""
    for key in data:
        if key not in fields:
            raise TraceError(f"{dot}{key[:60]}", "unknown field")
    for key in fields if required is None else required:
        if key not in data:
            raise TraceError(f"{dot}{key}", "missing")
    return data


def _entry(
    path: str, raw: Any, meta_path: str | None, raw_meta: Any, author: str, source: str, now: datetime
) -> _Entry:
    run = Run.from_json(raw, path)
    state = state_of(run.finish_reason)
    if raw_meta is None:
        meta = RunMeta(run.id, "", (), "", author, now, state, False, source)
    else:
        meta = _meta(raw_meta, meta_path or "meta", run.id, state, source)
    # Run.from_json has checked every step: as they stand in the file they are what it read.
    return _Entry(path, run, meta, [(index, dump(step)) for index, step in enumerate(raw["steps"])])


def _meta(data: Any, path: str, run_id: str, state: State, source: str) -> RunMeta:
    raw = _object(data, path, META_FIELDS)
    if not isinstance(raw["tags"], list):
        raise TraceError(f"{path}.tags", "expected a list")
    if not isinstance(raw["archived"], bool):
        raise TraceError(f"{path}.archived", "expected true or false")
    if raw["state"] != state.value:
        raise TraceError(f"{path}.state", f"expected {state.value!r}, which is what the run's finish_reason says")
    return RunMeta(
        id=run_id,
        name=_label(f"{path}.name", labels.check_name, raw["name"]),
        tags=_label(f"{path}.tags", labels.check_tags, raw["tags"]),
        note=_label(f"{path}.note", labels.check_note, raw["note"]),
        author=_label(f"{path}.author", labels.check_author, raw["author"]),
        created_at=_moment(f"{path}.created_at", raw["created_at"]),
        state=state,
        archived=raw["archived"],
        imported_from=source,
    )


def _label(path: str, check: Any, value: Any) -> Any:
    try:
        return check(value)
    except StorageError as error:
        raise TraceError(path, str(error)) from None


def _moment(path: str, value: Any) -> datetime:
    try:
        found = datetime.fromisoformat(value)
        if found.tzinfo is None:
            raise TraceError(path, "the time zone is missing")
        return found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, "expected a date and time, such as 2026-01-31T12:00:00+00:00") from None


def _refuse_twins(entries: Sequence[_Entry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        if entry.run.id in seen:
            raise ImportRefused(
                f"{entry.path}: the id {entry.run.id!r} stands twice in this file (first at {seen[entry.run.id]})"
            )
        seen[entry.run.id] = entry.path
