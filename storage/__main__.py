"""``python -m storage list|show|export|import``: the stored runs from the command line.

Bad input ends with exit code 2 and one line on stderr. ``--json`` prints JSON on stdout and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Annotated

import typer

from decoder.errors import RedlineError
from decoder.terminal import run_typer
from storage import RunFilter, Store, open_store, show
from storage.errors import StorageError, one_line
from storage.transfer import MAX_BYTES

app = typer.Typer(
    name="storage",
    help="The stored runs: list, show, export, import.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)

Db = Annotated[str, typer.Option("--db", help="Database URL.", metavar="URL")]
DEFAULT_DB = "sqlite:///redline.db"


@app.command("list")
def list_runs(
    db: Db = DEFAULT_DB,
    text: Annotated[str, typer.Option(help="Look for this in name, note, prompt and output.")] = "",
    target: Annotated[str | None, typer.Option()] = None,
    proposer: Annotated[str | None, typer.Option()] = None,
    draft: Annotated[str | None, typer.Option()] = None,
    k: Annotated[int | None, typer.Option("--k", "-k")] = None,
    tag: Annotated[str | None, typer.Option()] = None,
    author: Annotated[str | None, typer.Option()] = None,
    state: Annotated[str | None, typer.Option(help="running, done, stopped, failed or interrupted.")] = None,
    since: Annotated[str | None, typer.Option(help="Date, or date and time; included.")] = None,
    until: Annotated[str | None, typer.Option(help="Date (included), or date and time (excluded).")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only runs that were put away.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Archived runs, too.")] = False,
    sort: Annotated[str, typer.Option(help="Column to sort by.")] = "created_at",
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest or oldest first.")] = False,
    limit: Annotated[int, typer.Option()] = 50,
    offset: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: total and rows.")] = False,
) -> None:
    """List runs, newest first."""
    wanted = RunFilter(
        text=text,
        target=target,
        proposer=proposer,
        draft=draft,
        k=k,
        tag=tag,
        author=author,
        state=state,
        since=_moment("--since", since, time.min),
        until=_moment("--until", until, time.max),
        archived=None if everything else archived,
    )
    with open_store(db, create=False) as store:
        page = store.summaries(wanted, sort=sort, descending=not ascending, limit=limit, offset=offset)
    if as_json:
        _print(json.dumps({"total": page.total, "rows": [row.to_json() for row in page.rows]}, indent=1) + "\n")
    else:
        _print(show.table(page, offset))


@app.command("show")
def show_run(
    run_id: Annotated[str, typer.Argument(metavar="ID")],
    db: Db = DEFAULT_DB,
    steps: Annotated[bool, typer.Option("--steps", help="One line per step, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Exactly the Run of schema 1.")] = False,
) -> None:
    """Show one run."""
    with open_store(db, create=False) as store:
        stored = store.get_run(run_id)
    if as_json:
        _print(json.dumps(stored.run.to_json()) + "\n")
    else:
        _print(show.run(stored, steps=steps))


@app.command("export")
def export_runs(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...")] = None,
    db: Db = DEFAULT_DB,
    everything: Annotated[bool, typer.Option("--all", help="Every run, archived ones included.")] = False,
    form: Annotated[str, typer.Option("--format", help="json (complete, can be imported) or csv.")] = "json",
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is stdout.")] = "-",
) -> None:
    """Write runs to a file or to stdout."""
    if form not in ("json", "csv"):
        raise StorageError(f"unknown format {one_line(form, 40)!r}: json or csv")
    if bool(ids) == everything:
        raise StorageError("say which runs: their ids, or --all" + (", not both" if ids else ""))
    with open_store(db, create=False) as store:
        chosen = store.ids(RunFilter(archived=None)) if everything else ids or []
        pieces: Iterable[str] = [store.export_csv(chosen)] if form == "csv" else store.iter_json(chosen)
        if output == "-":
            for piece in pieces:
                _print(piece)
        else:
            _write(Path(output).resolve(), pieces)
            print(f"{len(chosen)} run{'s' * (len(chosen) != 1)} written to {one_line(output)}", file=sys.stderr)


def _write(path: Path, pieces: Iterable[str]) -> None:
    """Write beside the file and move it over, so that no half export is left behind."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe; a folder refuses by itself
            with path.open("w", encoding="utf-8", newline="") as file:
                file.writelines(pieces)
            return
        try:
            with beside.open("w", encoding="utf-8", newline="") as file:
                file.writelines(pieces)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if isinstance(error, RedlineError):
            raise
        raise StorageError(f"{one_line(str(path), 300)} cannot be written: {_reason(error)}") from None


@app.command("import")
def import_runs(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="JSON files; - is stdin.")],
    db: Db = DEFAULT_DB,
    author: Annotated[str, typer.Option(help="Signs runs that come without an author.")] = "anonymous",
    max_mb: Annotated[float, typer.Option("--max-mb", help="Refuse larger files.")] = MAX_BYTES / 1e6,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: new and known ids.")] = False,
) -> None:
    """Take runs in from exports, or from what `python -m decoder run --json` prints."""
    if not max_mb > 0:
        raise StorageError("--max-mb must be above 0")
    limit = int(min(max_mb, 1e9) * 1e6)
    new: list[str] = []
    known: list[str] = []
    loaded = [(name, _read(name, limit)) for name in files]
    with open_store(db) as store:
        for number, (name, data) in enumerate(loaded):
            found = _import(store, name, data, author, limit, before=number)
            new.extend(found[0])
            known.extend(found[1])
    if as_json:
        _print(json.dumps({"new": new, "known": known}) + "\n")
    else:
        already = f", {len(known)} already here" if known else ""
        _print(f"{len(new)} run{'s' * (len(new) != 1)} imported{already}\n")


def _import(
    store: Store, name: str, data: bytes, author: str, limit: int, *, before: int
) -> tuple[list[str], list[str]]:
    source = "stdin" if name == "-" else Path(name).name
    try:
        ids = store.import_json(data, author=author, source=source, max_bytes=limit)
    except StorageError as error:
        done = " (the files before it were imported)" if before else ""
        raise StorageError(f"{one_line(source, 100)}: {error}{done}") from error
    return ids.new, ids.known


def _read(name: str, limit: int) -> bytes:
    """At most one byte more than ``limit``: enough to be refused as too large."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(limit + 1)
        with open(name, "rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise StorageError(f"{one_line(name, 300)} cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or str(error), 200)


def _moment(option: str, text: str | None, of_day: time) -> datetime | None:
    if text is None:
        return None
    try:
        if len(text) == 10:  # a date alone means the whole day, here
            return datetime.combine(datetime.fromisoformat(text), of_day).astimezone(UTC)
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise StorageError(
            f"{option} {one_line(text, 40)!r} is not a date: write 2026-01-31 or 2026-01-31T12:00"
        ) from None


def _print(text: str) -> None:
    """UTF-8 on stdout whatever the locale says, so that no character can make printing fail."""
    buffer = getattr(sys.stdout, "buffer", None)
    if isinstance(buffer, io.RawIOBase | io.BufferedIOBase):
        buffer.write(text.encode("utf-8"))
        buffer.flush()
    else:
        sys.stdout.write(text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line (``sys.argv`` when no ``arguments`` are given); returns the exit code."""
    return run_typer(app, arguments, "python -m storage")


if __name__ == "__main__":
    sys.exit(main())
