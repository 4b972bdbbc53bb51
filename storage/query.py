"""Lists of runs: filters, sorting, pages. Everything comes from the columns of ``runs``; no step is ever loaded.

How many statements a page takes does not depend on how many runs there are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute, Session

from storage.codec import searchable
from storage.errors import StorageError, one_line
from storage.models import RunRow, TagRow, TraceRow
from storage.records import Facets, Page, RunFilter, RunSummary, State
from storage.rows import tags_of

MAX_LIMIT = 1000
MAX_TEXT = 10_000
MAX_IDS = 30_000
_BIGGEST = 2**63 - 1

_COLUMNS = tuple(f.name for f in dataclasses.fields(RunSummary) if f.name not in ("tags", "state"))
SORTS = tuple(f.name for f in dataclasses.fields(RunSummary) if f.name not in ("tags", "note", "archived"))
"""What a list can be sorted by."""
_BY_LETTER = ("name", "author", "target", "draft", "prompt_preview", "text_preview")


def page(
    session: Session,
    wanted: RunFilter,
    *,
    sort: str,
    descending: bool,
    limit: int,
    offset: int,
    dead: Collection[str] = (),
) -> Page:
    """Rows ``offset`` to ``offset + limit`` of the runs that fit ``wanted``, and how many fit.

    Equal values are ordered by id, and runs without a value come last, whichever the direction. ``dead`` are running
    runs whose writer is gone and that could not be marked yet.
    """
    _whole("limit", limit, 0, MAX_LIMIT)
    _whole("offset", offset, 0, _BIGGEST)
    state = _state(dead)
    conditions = _conditions(wanted, state)
    total = session.scalar(sa.select(sa.func.count()).select_from(RunRow).where(*conditions)) or 0
    columns = [getattr(RunRow, name) for name in _COLUMNS]
    rows = session.execute(
        sa.select(*columns, state.label("state"))
        .where(*conditions)
        .order_by(*_order(sort, descending, state))
        .limit(limit)
        .offset(offset)
    ).all()
    tags = tags_of(session, [row.id for row in rows])
    return Page(
        rows=[RunSummary(**{**row._mapping, "tags": tags.get(row.id, ()), "state": State(row.state)}) for row in rows],
        total=total,
    )


def matching_ids(session: Session, wanted: RunFilter, dead: Collection[str] = ()) -> list[str]:
    """The ids of all runs that fit, newest first."""
    state = _state(dead)
    return list(
        session.scalars(
            sa.select(RunRow.id).where(*_conditions(wanted, state)).order_by(*_order("created_at", True, state))
        )
    )


def facets(session: Session) -> Facets:
    """The distinct values of what can be filtered by."""

    def values(column: InstrumentedAttribute[Any]) -> list[Any]:
        return list(session.scalars(sa.select(column).where(column.is_not(None)).distinct().order_by(column)))

    return Facets(
        targets=values(RunRow.target),
        proposers=values(RunRow.proposer),
        drafts=values(RunRow.draft),
        ks=values(RunRow.k),
        tags=values(TagRow.tag),
        authors=values(RunRow.author),
    )


def recent_outputs(
    session: Session, target: str, leave_out: Collection[str], runs: int, tokens: int
) -> list[list[int]]:
    """Output ids of the newest ended runs of ``target``, newest first, until ``runs`` or ``tokens`` are reached."""
    found: list[list[int]] = []
    room = tokens
    rows = session.execute(
        sa.select(RunRow.id, TraceRow.body)
        .join(TraceRow, TraceRow.run_id == RunRow.id)
        .where(RunRow.target == target, RunRow.archived.is_(False), TraceRow.final.is_(True))
        .order_by(RunRow.created_at.desc(), RunRow.id.desc())
        .limit(runs + len(leave_out))
        .execution_options(yield_per=20)
    )
    for run_id, body in rows:
        if run_id in leave_out:
            continue
        ids = [i for i in json.loads(body).get("output_ids", ()) if isinstance(i, int)][:room]
        if ids:
            found.append(ids)
            room -= len(ids)
        if room <= 0 or len(found) == runs:
            break
    return found


def _state(dead: Collection[str]) -> sa.ColumnElement[str]:
    if not dead:
        return RunRow.state.expression
    return sa.case((RunRow.id.in_(list(dead)), State.INTERRUPTED.value), else_=RunRow.state)


def _conditions(wanted: RunFilter, state: sa.ColumnElement[str]) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    for column, value in (
        (RunRow.target, wanted.target),
        (RunRow.proposer, wanted.proposer),
        (RunRow.draft, wanted.draft),
        (RunRow.author, wanted.author),
    ):
        if value:
            found.append(column == value)
    if wanted.k is not None:
        _whole("k", wanted.k, 0, _BIGGEST)
        found.append(RunRow.k == wanted.k)
    if wanted.archived is not None:
        found.append(RunRow.archived == wanted.archived)
    if wanted.state:
        if wanted.state not in set(State):
            raise StorageError(f"unknown state {one_line(str(wanted.state), 40)!r}: one of {', '.join(State)}")
        found.append(state == str(wanted.state))
    if wanted.since is not None:
        found.append(RunRow.created_at >= _moment("since", wanted.since))
    if wanted.until is not None:
        found.append(RunRow.created_at < _moment("until", wanted.until))
    if wanted.tag:
        found.append(sa.exists().where(TagRow.run_id == RunRow.id, TagRow.tag == wanted.tag).correlate(RunRow))
    if wanted.ids is not None:
        found.append(RunRow.id.in_(_ids(wanted.ids)))
    if wanted.text.strip():
        found.append(_holds(wanted.text.strip()))
    return found


def _holds(text: str) -> sa.ColumnElement[bool]:
    if len(text) > MAX_TEXT:
        raise StorageError(f"the text to look for is {len(text):,} characters long: at most {MAX_TEXT:,}")
    needle = searchable([text])
    return sa.or_(
        RunRow.label_search.contains(needle, autoescape=True),
        sa.exists()
        .where(TraceRow.run_id == RunRow.id, TraceRow.search.contains(needle, autoescape=True))
        .correlate(RunRow),
    )


def _ids(ids: Sequence[str]) -> list[str]:
    wanted = list(dict.fromkeys(ids))
    if len(wanted) > MAX_IDS:
        raise StorageError(f"{len(wanted):,} runs at once are too many: at most {MAX_IDS:,}")
    return wanted


def _moment(name: str, value: datetime) -> datetime:
    if value.tzinfo is None:
        raise StorageError(f"{name} must say its time zone, for example {value.isoformat()}+00:00")
    return value


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise StorageError(f"{name} must be a whole number of at least {low} and at most {high:,}, not {value!r}")


def _order(sort: str, descending: bool, state: sa.ColumnElement[str]) -> list[sa.ColumnElement[Any]]:
    if sort not in SORTS:
        raise StorageError(f"runs cannot be sorted by {one_line(str(sort), 40)!r}: one of {', '.join(SORTS)}")
    column: sa.ColumnElement[Any] = state if sort == "state" else getattr(RunRow, sort).expression
    order: list[sa.ColumnElement[Any]] = []
    if sort != "state" and getattr(RunRow, sort).expression.nullable:
        order.append(column.is_(None))  # NULLS LAST in words that every database knows
    key = sa.func.lower(column) if sort in _BY_LETTER else column
    order.append(key.desc() if descending else key.asc())
    if sort != "id":
        order.append(RunRow.id.desc() if descending else RunRow.id.asc())
    return order
