"""Several processes and many threads write at once, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sqlalchemy as sa

from decoder.trace import violations
from storage import RunFilter, State, Store, open_store
from storage.models import StepRow
from tests.storage.factories import bare, keep, make_run

ROOT = Path(__file__).resolve().parents[2]

WRITES_MANY = """
import sys
from storage import open_store
from tests.storage.factories import bare, keep, make_run

url, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
store = open_store(url, busy_timeout=60)
shared = make_run(1, run_id="rshared")
try:
    keep(store, shared, author=who)
except ValueError as error:
    assert "already" in str(error), error
for i in range(count):
    run = keep(store, make_run(6, run_id=f"r{who}-{i}", seed=i), author=who, tags=[who])
    assert store.get_run(run.id).run == run
    store.set_note("rshared", who)
"""


def test_processes_that_create_and_write_at_once_lose_nothing(url: str) -> None:
    """They also race to create the database and for one id: exactly one of them gets it."""
    count, names = 12, ("a", "b", "c")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITES_MANY, url, name, str(count)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        _, errors = child.communicate(timeout=240)
        assert child.returncode == 0, errors
    with open_store(url) as store:
        assert store.summaries().total == count * len(names) + 1
        assert store.summaries(RunFilter(state="done")).total == count * len(names) + 1
        for name in names:
            assert store.summaries(RunFilter(author=name, tag=name)).total == count
            for i in range(count):
                assert store.get_run(f"r{name}-{i}").run == make_run(6, run_id=f"r{name}-{i}", seed=i)
        assert store.get_run("rshared").run == make_run(1, run_id="rshared")


def test_many_threads_use_one_store(store: Store) -> None:
    runs = [make_run(5, seed=i) for i in range(24)]
    together = threading.Barrier(8)

    def work(number: int) -> None:
        if number < 8:
            together.wait(30)
        run = runs[number]
        with store.start_run(bare(run), author=f"a{number % 3}") as writer:
            for step in run.steps:
                writer.append([step])
                assert store.summaries(RunFilter(ids=[run.id])).rows[0].state is State.RUNNING
            writer.finish(run)
        store.set_tags(run.id, [f"t{number % 5}", "all"])
        store.rename(run.id, f"run {number}")
        assert store.get_run(run.id).run == run
        assert violations(store.get_run(run.id).run) == []

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(len(runs))))
    assert store.summaries(RunFilter(tag="all", state="done")).total == len(runs)
    assert store.facets().tags == ["all", "t0", "t1", "t2", "t3", "t4"]
    with store.database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(StepRow)) == 5 * len(runs)


def test_threads_share_a_database_in_memory() -> None:
    with open_store("sqlite://") as store, ThreadPoolExecutor(6) as pool:
        runs = list(pool.map(lambda i: keep(store, make_run(3, seed=i)), range(18)))
        assert store.summaries().total == len(runs)
        assert all(store.get_run(run.id).run == run for run in runs)


def test_a_reader_sees_one_state_of_the_database(store: Store) -> None:
    """The rows of a page and its total belong together, whatever is written in between."""
    for _ in range(3):
        keep(store, make_run(2))
    with store.database.read() as session:
        before = session.scalar(sa.select(sa.func.count()).select_from(StepRow))
        keep(store, make_run(2))
        assert session.scalar(sa.select(sa.func.count()).select_from(StepRow)) == before
