"""Runs as CSV: one row per run, configuration and numbers. Made to be opened in a spreadsheet, hence the guards."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from storage.database import Database
from storage.errors import RunNotFound
from storage.models import RunRow, TraceRow
from storage.rows import tags_of
from storage.sweep import settle

_FROM_ROW = (
    "id",
    "name",
    "author",
    "created_at",
    "state",
    "finish_reason",
    "target",
    "proposer",
    "draft",
    "k",
    "seed",
    "temperature",
    "max_new_tokens",
    "dtype",
    "device",
    "baseline_id",
    "speedup",
    "tokens_per_second",
    "ms_per_token",
    "tokens_per_step",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "prefill_ms",
    "ttft_ms",
    "decode_ms",
    "not_speculating",
    "archived",
)
_SAMPLING = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
COLUMNS = (*_FROM_ROW, *_SAMPLING, "chat", "tags", "note", "error", "prompt", "text")

_CHUNK = 500
"""Runs that are read at once."""

_FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")


def guard(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: such texts get an apostrophe in front, numbers stay numbers."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "\u2400")  # many readers end a file at a NUL
    return "'" + text if text.startswith(_FORMULA_STARTS) else text


def export(database: Database, ids: Sequence[str]) -> str:
    """The CSV, in the order of ``ids``, with a header row. Raises RunNotFound."""
    dead = settle(database)
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    with database.read() as session:
        for values in _rows(session, list(dict.fromkeys(ids)), dead):
            writer.writerow([guard(values.get(name)) for name in COLUMNS])
    return out.getvalue()


def _rows(session: Session, ids: list[str], dead: set[str]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(ids), _CHUNK):
        some = ids[start : start + _CHUNK]
        query = sa.select(RunRow, TraceRow.body).join(TraceRow, TraceRow.run_id == RunRow.id)
        rows = {row.id: (row, body) for row, body in session.execute(query.where(RunRow.id.in_(some)))}
        tags = tags_of(session, some)
        for run_id in some:
            if run_id not in rows:
                raise RunNotFound(run_id)
            row, body = rows[run_id]
            yield _values(row, json.loads(body), tags.get(run_id, ()), dead)
        session.expunge_all()


def _values(row: RunRow, body: Mapping[str, Any], tags: Sequence[str], dead: set[str]) -> dict[str, Any]:
    request = body.get("request", {})
    sampling = request.get("sampling")
    values = {name: getattr(row, name) for name in _FROM_ROW}
    values["created_at"] = row.created_at.isoformat()
    if row.id in dead:
        values["state"] = "interrupted"
    for name in _SAMPLING:
        values[name] = _plain(sampling.get(name)) if isinstance(sampling, dict) else None
    values["chat"] = _plain(request.get("chat"))
    values["tags"] = "; ".join(tags)
    values["note"] = row.note
    values["error"] = body.get("error")
    values["prompt"] = _plain(request.get("prompt"))
    values["text"] = body.get("text")
    return values


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)
