"""What can be done with selected runs, without Gradio: every action takes ids that are checked, and answers with a
sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoder.errors import RedlineError
from playground.deeplinks import MAX_COMPARE, read_ids
from playground.history_view import export_name, read_tags
from storage import RunFilter, RunSummary, Store

MAX_EXPORT = 500
"""Runs per download; the command line exports any number."""
MAX_EXPORT_BYTES = 100_000_000
"""Of a download: a browser can hold it, and an import takes twice as much (``storage.transfer.MAX_BYTES``)."""


def read_selection(text: Any) -> tuple[str, ...]:
    """The browser's selection (a JSON list of ids); raises RedlineError for anything else."""
    if not isinstance(text, str) or len(text) > 2_000_000:
        raise RedlineError("the selection that came from the browser cannot be read")
    try:
        return read_ids(json.loads(text or "[]"))
    except ValueError as error:
        if isinstance(error, RedlineError):
            raise
        raise RedlineError("the selection that came from the browser cannot be read") from None


def one_of(ids: Sequence[str], what: str) -> str:
    """The single selected id; raises RedlineError that says how many are selected."""
    if len(ids) != 1:
        raise RedlineError(f"select exactly one run to {what}; {count(len(ids))} selected")
    return ids[0]


def some_of(ids: Sequence[str], what: str) -> Sequence[str]:
    """At least one selected id."""
    if not ids:
        raise RedlineError(f"select at least one run to {what}: tick the boxes at the left of the list")
    return ids


def comparable(ids: Sequence[str]) -> tuple[str, ...]:
    """Between two and ``MAX_COMPARE`` selected ids."""
    if not 2 <= len(ids) <= MAX_COMPARE:
        raise RedlineError(f"select two to {MAX_COMPARE} runs to compare; {count(len(ids))} selected")
    return tuple(ids)


def count(number: int) -> str:
    """``no run is``, ``1 run is``, ``3 runs are``."""
    return "no run is" if number == 0 else "1 run is" if number == 1 else f"{number:,} runs are"


def runs(number: int) -> str:
    """``1 run``, ``3 runs``."""
    return "1 run" if number == 1 else f"{number:,} runs"


def summary_of(store: Store, run_id: str) -> RunSummary:
    """The list row of one run; raises RedlineError when it is gone."""
    rows = store.summaries(RunFilter(ids=[run_id], archived=None), limit=1).rows
    if not rows:
        raise RedlineError(f"run {run_id} is no longer in this database")
    return rows[0]


def describe(store: Store, run_id: str, name: str, tags: str, note: str) -> str:
    """Store name, tags and note where they differ from what is there."""
    now = summary_of(store, run_id)
    changed = []
    if name != now.name:
        store.rename(run_id, name)
        changed.append("name")
    if tags != ", ".join(now.tags):  # a tag that holds a comma stays as it is unless it is edited
        store.set_tags(run_id, read_tags(tags))
        changed.append("tags")
    if note != now.note:
        store.set_note(run_id, note)
        changed.append("note")
    return f"saved: {', '.join(changed)}" if changed else "nothing was changed"


def export(store: Store, ids: Sequence[str], suffix: str) -> tuple[str, str]:
    """File name and text of an export as ``json`` or ``csv``."""
    wanted = some_of(ids, "export")
    if len(wanted) > MAX_EXPORT:
        raise RedlineError(
            f"{len(wanted):,} runs are too many for one download; select at most {MAX_EXPORT}, "
            "or use `python -m storage export`"
        )
    text = _json(store, wanted) if suffix == "json" else store.export_csv(wanted)
    return export_name(wanted, suffix), text


def _json(store: Store, ids: Sequence[str]) -> str:
    pieces = []
    size = 0
    for piece in store.iter_json(ids):
        size += len(piece.encode())
        if size > MAX_EXPORT_BYTES:
            raise RedlineError(
                f"these {len(ids):,} runs are larger than {MAX_EXPORT_BYTES / 1e6:g} MB, too large for one download; "
                "select fewer, or use `python -m storage export`"
            )
        pieces.append(piece)
    return "".join(pieces)


def take_in(store: Store, path: Any, author: str) -> tuple[str, list[str]]:
    """Import an uploaded file, whole or not at all. Returns a sentence and all its ids; the upload is removed."""
    if not isinstance(path, str) or not path:
        raise RedlineError("choose a JSON file that was exported from Redline")
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RedlineError(f"the upload could not be read: {error.strerror}") from None
    finally:
        file.unlink(missing_ok=True)
    found = store.import_json(data, author=author, source=file.name[:200])
    new, known = len(found.new), len(found.known)
    if not new:
        return (f"{runs(known)} in the file, all of them here already" if known else "the file holds no run"), list(
            found
        )
    return f"imported {runs(new)}" + (f"; {runs(known)} were here already" if known else ""), list(found)
