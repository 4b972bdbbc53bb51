"""The way from nothing, and from every earlier revision with runs in it, to the newest one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateIndex, CreateTable

from storage import RunFilter, State, open_store
from storage.codec import columns_of, dump
from storage.engine import make_engine, parse_url
from storage.migrate import current, head, revisions, upgrade
from storage.models import Base
from tests.storage.factories import bare, keep, make_run

ROOT = Path(__file__).resolve().parents[2]
DONE = make_run(5, run_id="rdone", prompt="Grüße aus Köln\0", text="Straße")
DEAD = make_run(5, run_id="rdead")
SPECULATIVE = make_run(5, run_id="rfast", baseline_id="rdone")
MADE = datetime(2026, 1, 31, 12, tzinfo=UTC)


@contextmanager
def engine_for(url: str) -> Iterator[Engine]:
    engine = make_engine(parse_url(url), read_only=False, busy_timeout=5)
    try:
        yield engine
    finally:
        engine.dispose()


def insert(connection: Connection, table: str, **values: Any) -> None:
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), values)


def fill(connection: Connection, revision: str) -> None:
    """What a program of ``revision`` would have left: a finished run, one that died, one that names a baseline."""
    late = {} if revision < "0002" else {"name": "Äpfel", "note": "100%", "archived": False, "imported_from": "x.json"}
    for run in (DONE, DEAD, SPECULATIVE):
        dead = run is DEAD
        columns = columns_of(bare(run) if dead else run)
        insert(
            connection,
            "runs",
            id=run.id,
            created_at=MADE.replace(tzinfo=None).isoformat(" "),
            author="ann",
            state="running" if dead else "done",
            writer_token="gone" if dead else None,
            writer_host="nowhere" if dead else None,
            speedup=1.5 if run is SPECULATIVE else None,
            **(late if run is DONE else {}),
            **columns,
        )
        raw = (bare(run) if dead else run).to_json()
        del raw["steps"]
        insert(connection, "traces", run_id=run.id, body=dump(raw), final=not dead)
        for step in run.steps[: 3 if dead else None]:
            insert(connection, "steps", run_id=run.id, step_index=step.index, payload=dump(step.to_json()))
    if revision >= "0002":
        for position, tag in enumerate(["b", "a"]):
            insert(connection, "run_tags", run_id="rdone", tag=tag, position=position)


def test_there_is_a_way_to_be_tested() -> None:
    assert revisions() == ["0001", "0002", "0003"]
    assert head() == "0003"


def test_an_empty_file_becomes_the_newest(url: str) -> None:
    with open_store(url) as store, store.database.engine.connect() as connection:
        assert current(connection) == head()


@pytest.mark.parametrize("revision", revisions())
def test_every_revision_is_upgraded_with_what_it_holds(url: str, revision: str) -> None:
    with engine_for(url) as engine:
        upgrade(engine, revision)
        with engine.begin() as connection:
            assert current(connection) == revision
            if revision != head():
                fill(connection, revision)
    with open_store(url) as store:
        with store.database.engine.connect() as connection:
            assert current(connection) == head()
        if revision == head():
            return
        done = store.get_run("rdone")
        assert done.run == DONE
        assert (done.meta.author, done.meta.created_at, done.meta.state) == ("ann", MADE, State.DONE)
        assert store.get_run("rfast").run == SPECULATIVE
        dead = store.get_run("rdead")
        assert dead.meta.state is State.INTERRUPTED
        assert dead.run.steps == DEAD.steps[:3]
        rows = {row.id: row for row in store.summaries().rows}
        assert rows["rfast"].speedup == 1.5
        assert rows["rfast"].draft_acceptance_rate == SPECULATIVE.metrics["draft_acceptance_rate"]
        assert [row.id for row in store.summaries(RunFilter(text="STRASSE")).rows] == ["rdone"]
        assert [row.id for row in store.summaries(RunFilter(text="köln")).rows] == ["rdone"]
        if revision >= "0002":
            assert (done.meta.name, done.meta.note, done.meta.tags) == ("Äpfel", "100%", ("b", "a"))
            assert done.meta.imported_from == "x.json"
            assert [row.id for row in store.summaries(RunFilter(text="äpfel")).rows] == ["rdone"]
        else:
            assert (done.meta.name, done.meta.note, done.meta.tags, done.meta.archived) == ("", "", (), False)
        # And it is a database like any other from here on.
        run = keep(store, make_run(3), tags=["new"], name="n")
        assert store.get_run(run.id).run == run
        assert store.delete(["rdone"]) == 1
        assert store.summaries(RunFilter(ids=["rfast"])).rows[0].speedup is None


def test_models_and_migrations_describe_the_same_tables(url: str) -> None:
    with open_store(url) as store, store.database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        inspector = sa.inspect(connection)
        for table in Base.metadata.sorted_tables:
            keys = [(key["constrained_columns"], key["options"]) for key in inspector.get_foreign_keys(table.name)]
            assert keys == [(["run_id"], {"ondelete": "CASCADE"})] * (table.name != "runs")
            nullable = {column["name"]: column["nullable"] for column in inspector.get_columns(table.name)}
            assert nullable == {column.name: column.nullable for column in table.columns}


def test_opening_again_changes_nothing(url: str) -> None:
    path = parse_url(url).database or ""
    with open_store(url) as store:
        keep(store, make_run(2))
    before = Path(path).read_bytes()
    with open_store(url) as store:
        assert store.summaries().total == 1
    assert Path(path).read_bytes() == before


def test_a_failing_migration_leaves_the_database_as_it_was(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for(url) as engine:
        upgrade(engine, "0002")
        with engine.begin() as connection:
            fill(connection, "0002")
            connection.execute(sa.text("UPDATE traces SET body = 'broken' WHERE run_id = 'rfast'"))
        with pytest.raises(json.JSONDecodeError):
            upgrade(engine)
        with engine.begin() as connection:
            assert current(connection) == "0002"
            columns = {column["name"] for column in sa.inspect(connection).get_columns("runs")}
            assert "label_search" not in columns
            connection.execute(sa.text("UPDATE traces SET body = :b WHERE run_id = 'rfast'"), {"b": body()})
        upgrade(engine)
        with engine.begin() as connection:
            assert current(connection) == head()


def body() -> str:
    raw = SPECULATIVE.to_json()
    del raw["steps"]
    return dump(raw)


def test_the_working_folder_and_odd_paths_do_not_matter(tmp_path: Path) -> None:
    """The package may lie under a path with a percent sign, and be used from anywhere."""
    odd = tmp_path / "100%s of it"
    odd.mkdir()
    for name in ("storage", "decoder"):
        (odd / name).symlink_to(ROOT / name)
    # storage.migrate resolves links: copy the room itself, so that it really lies there.
    (odd / "storage").unlink()
    copy_tree(ROOT / "storage", odd / "storage")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "from storage import open_store; s = open_store('sqlite:///x.db'); print(s.summaries().total, s.label)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(odd)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 {elsewhere}/x.db\n"


def copy_tree(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize("dialect", [postgresql.dialect(), mysql.dialect()], ids=["postgresql", "mysql"])
def test_the_tables_can_be_made_elsewhere(dialect: Any) -> None:
    for table in Base.metadata.sorted_tables:
        str(CreateTable(table).compile(dialect=dialect))
        for index in table.indexes:
            str(CreateIndex(index).compile(dialect=dialect))
