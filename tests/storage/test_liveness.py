"""A run whose writer is gone reads "interrupted"; one that is written by another process does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from decoder.trace import violations
from storage import RunFilter, State, Store, open_store
from storage.liveness import STALE_AFTER, Writer, _started, host_name, is_alive, new_writer, retire
from storage.models import RunRow
from tests.storage.factories import bare, keep, make_run

ROOT = Path(__file__).resolve().parents[2]

WRITES_AND_WAITS = """
import sys
from storage import open_store
from tests.storage.factories import bare, make_run

run = make_run(6, run_id="rchild")
writer = open_store(sys.argv[1]).start_run(bare(run), name="child")
for step in run.steps[:4]:
    writer.append([step])
print("written", flush=True)
sys.stdin.readline()
writer.finish(run)
print("finished", flush=True)
"""


def start_child(url: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES_AND_WAITS, url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    return child


def test_a_killed_process_leaves_an_interrupted_run_with_its_steps(store: Store, url: str) -> None:
    expected = make_run(6, run_id="rchild")
    child = start_child(url)
    try:
        # Alive, although it says nothing: neither a reader nor a fresh start may call it interrupted.
        assert store.get_run("rchild").meta.state is State.RUNNING
        with open_store(url) as fresh:
            assert fresh.summaries(RunFilter(state="running")).total == 1
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    finally:
        child.kill()
        child.communicate()
    assert store.summaries(RunFilter(state="interrupted")).rows[0].id == "rchild"
    back = store.get_run("rchild")
    assert back.meta.state is State.INTERRUPTED
    assert back.meta.name == "child"
    assert back.run.steps == expected.steps[:4]
    assert violations(back.run) == []
    assert back.run.text == "".join(e.text for s in expected.steps[:4] for e in s.emitted)
    row = store.summaries().rows[0]
    assert row.num_draft_tokens == 12  # the numbers of a list are there, too
    assert row.tokens_per_second is not None
    assert store.delete(["rchild"]) == 1


def test_an_unreaped_process_is_dead(store: Store, url: str) -> None:
    child = start_child(url)
    try:
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
        assert store.get_run("rchild").meta.state is State.INTERRUPTED
    finally:
        child.kill()
        child.communicate()


def test_a_live_process_ends_its_run_itself(store: Store, url: str) -> None:
    child = start_child(url)
    out, _ = child.communicate("go\n", timeout=60)
    assert out == "finished\n"
    assert store.get_run("rchild").run == make_run(6, run_id="rchild")


def test_a_writer_that_was_taken_for_dead_goes_on(store: Store) -> None:
    """A host that slept, a clock that jumped: the next step takes the run back, and nothing is lost."""
    run = make_run(5)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:2])
    pretend(store, run.id, writer_host="elsewhere", heartbeat_at=datetime.now(UTC) - STALE_AFTER * 2)
    assert store.get_run(run.id).meta.state is State.INTERRUPTED
    writer.append(run.steps[2:3])
    pretend(store, run.id, writer_host=host_name())
    back = store.get_run(run.id)
    assert back.meta.state is State.RUNNING
    assert back.run.steps == run.steps[:3]
    assert violations(back.run) == []
    writer.finish(run)
    assert store.get_run(run.id).run == run
    assert store.get_run(run.id).meta.state is State.DONE


def pretend(store: Store, run_id: str, **values: Any) -> None:
    with store.database.write() as session:
        session.execute(sa.update(RunRow).where(RunRow.id == run_id).values(**values))


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"writer_pid": 2**22 + 1}, State.INTERRUPTED),
        ({"writer_started": "some other time"}, State.INTERRUPTED),  # the same pid, but an earlier process
        ({"writer_token": "a writer of this process that is gone"}, State.INTERRUPTED),
        ({"writer_token": None}, State.INTERRUPTED),
        ({"writer_host": "elsewhere"}, State.RUNNING),
        ({"writer_host": "elsewhere", "writer_pid": 2**22 + 1}, State.RUNNING),  # its pids are not ours
        ({"writer_host": "elsewhere", "heartbeat_at": None}, State.INTERRUPTED),
    ],
)
def test_who_counts_as_gone(store: Store, values: dict[str, Any], state: State) -> None:
    run = make_run()
    writer = store.start_run(bare(run))
    pretend(store, run.id, **values)
    assert store.get_run(run.id).meta.state is state
    assert writer.run_id == run.id


def test_each_step_is_a_sign_of_life(store: Store) -> None:
    run = make_run()
    writer = store.start_run(bare(run))
    pretend(store, run.id, writer_host="elsewhere", heartbeat_at=datetime.now(UTC) - STALE_AFTER + timedelta(minutes=1))
    writer.append(run.steps[:1])
    with store.database.read() as session:
        row = session.get_one(RunRow, run.id)
        assert row.heartbeat_at is not None
        assert datetime.now(UTC) - row.heartbeat_at < timedelta(minutes=1)


def test_processes_are_told_apart_by_when_they_started() -> None:
    ours = _started(os.getpid())
    assert ours
    assert ours == _started(os.getpid())
    assert ours != _started(1)
    assert _started(2**22 + 1) is None


def test_a_writer_lives_until_it_retires() -> None:
    class Owner:
        pass

    owner = Owner()
    writer = new_writer(owner)
    assert is_alive(writer, None)
    assert not is_alive(Writer(writer.host, writer.pid, writer.started, "other"), None)
    retire(writer)
    assert not is_alive(writer, None)


def test_a_dead_run_is_shown_as_interrupted_even_where_it_cannot_be_marked(url: str, store: Store) -> None:
    run, done = make_run(), keep(store, make_run())
    writer = store.start_run(bare(run))
    writer.append(run.steps[:3])
    pretend(store, run.id, writer_pid=2**22 + 1)
    with open_store(url, busy_timeout=0.05) as reader:
        with store.database.write() as session:
            session.execute(sa.update(RunRow).values(note="held"))  # the write lock, for as long as this block lasts
            assert reader.get_run(run.id).meta.state is State.INTERRUPTED
            assert violations(reader.get_run(run.id).run) == []
            states = {row.id: row.state for row in reader.summaries().rows}
            assert states == {run.id: State.INTERRUPTED, done.id: State.DONE}
            assert [r.id for r in reader.summaries(RunFilter(state="interrupted")).rows] == [run.id]
            assert reader.summaries(RunFilter(state="running")).total == 0
            assert '"interrupted"' in reader.export_json([run.id])
            assert ",interrupted," in reader.export_csv([run.id])
        assert reader.get_run(run.id).meta.state is State.INTERRUPTED
