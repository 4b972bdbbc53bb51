"""The background builder: it works only while nobody holds it, and nothing of it outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from decoder import builder as module
from decoder.builder import Builder

ROOT = Path(__file__).resolve().parents[2]
posix = pytest.mark.skipif(not module.CAN_PAUSE, reason="processes cannot be stopped on this system")

SLOW = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(300)
"""
"""A helper that has started a compiler, and says which process that is."""


@dataclass
class FileJob:
    """A file to be made by a small program."""

    path: Path
    code: str = "open(sys.argv[1], 'w').write('x')"

    @property
    def built(self) -> bool:
        return self.path.is_file()


@dataclass
class Work:
    jobs: list[FileJob]
    failures: list[tuple[str, int, str]] = field(default_factory=list)

    def missing(self) -> list[FileJob]:
        failed = {name for name, _, _ in self.failures}
        return [job for job in self.jobs if not job.built and job.path.name not in failed]

    def command(self, job: FileJob) -> tuple[list[str], Path]:
        return [sys.executable, "-c", f"import sys\n{job.code}", str(job.path)], ROOT

    def failed(self, job: FileJob, code: int, errors: str) -> None:
        self.failures.append((job.path.name, code, errors))


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def state(pid: int) -> str:
    """One letter as ps shows it; "" when there is no such process."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1]


def gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


@pytest.fixture
def make() -> Iterator[Callable[..., Builder]]:
    made: list[Builder] = []

    def new(work: Work, done: Callable[[], None] = lambda: None) -> Builder:
        made.append(Builder(work, done))
        return made[-1]

    yield new
    for one in made:
        one.close()


def test_it_builds_in_order_tells_and_does_not_repeat_what_failed(tmp_path: Path, make: Callable[..., Builder]) -> None:
    broken = FileJob(tmp_path / "b", "sys.exit('no space')")
    work = Work([FileJob(tmp_path / "a"), broken, FileJob(tmp_path / "c")])
    told: list[set[str]] = []
    one = make(work, lambda: told.append({path.name for path in tmp_path.iterdir()}))
    assert not module.active()
    one.start()
    assert module.active()
    wait_for(lambda: len(told) == 2)
    assert told == [{"a"}, {"a", "c"}]
    assert [(name, code) for name, code, _ in work.failures] == [("b", 1)]
    assert "no space" in work.failures[0][2]
    # New work is found when somebody lets go, and not before.
    work.jobs.append(FileJob(tmp_path / "d"))
    with one.held():
        pass
    wait_for(lambda: len(told) == 3)
    one.close()
    assert not module.active()


def test_a_command_that_cannot_be_started_is_a_failure(
    tmp_path: Path, make: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work([FileJob(tmp_path / "a")])
    monkeypatch.setattr(work, "command", lambda job: (["/nowhere/to/be/found"], ROOT))
    make(work).start()
    wait_for(lambda: work.failures)
    assert "nowhere" in work.failures[0][2]


def test_an_error_while_taking_up_does_not_end_it(tmp_path: Path, make: Callable[..., Builder]) -> None:
    work = Work([FileJob(tmp_path / "a"), FileJob(tmp_path / "b")])

    def fail() -> None:
        raise RuntimeError("not now")

    make(work, fail).start()
    wait_for(lambda: not work.missing())


def test_nothing_is_started_while_it_is_held(tmp_path: Path, make: Callable[..., Builder]) -> None:
    work = Work([FileJob(tmp_path / "a")])
    one = make(work)
    one.hold()
    one.hold()
    one.start()
    one.release()
    time.sleep(0.5)
    assert not work.jobs[0].built
    one.release()
    wait_for(lambda: work.jobs[0].built)


@posix
def test_a_helper_and_its_compilers_stop_while_it_is_held_and_end_with_it(
    tmp_path: Path, make: Callable[..., Builder]
) -> None:
    pids = tmp_path / "pid"
    work = Work([FileJob(tmp_path / "never", SLOW.replace("sys.argv[1]", repr(str(pids))))])
    one = make(work)
    one.start()
    wait_for(lambda: pids.exists() and pids.read_text())
    compiler = int(pids.read_text())
    helper = one._group or 0
    for _ in range(2):
        with one.held():
            wait_for(lambda: state(helper) == "T" and state(compiler) == "T")
        wait_for(lambda: state(helper) == "S" and state(compiler) == "S")
    one.hold()
    wait_for(lambda: state(helper) == "T")
    one.close()
    wait_for(lambda: gone(helper) and gone(compiler))
    assert work.failures == []  # it was ended, it did not fail


@posix
def test_a_helper_that_is_killed_is_a_failure(tmp_path: Path, make: Callable[..., Builder]) -> None:
    work = Work([FileJob(tmp_path / "a", "import time; time.sleep(300)")])
    one = make(work)
    one.start()
    wait_for(lambda: one._group)
    os.kill(one._group or 0, signal.SIGKILL)
    wait_for(lambda: work.failures)
    assert work.failures[0][:2] == ("a", -9)


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from decoder.builder import Builder
from tests.decoder.test_builder import SLOW, FileJob, Work
pids, how = sys.argv[1:]
one = Builder(Work([FileJob(Path(pids + ".never"), SLOW.replace("sys.argv[1]", repr(pids)))]), lambda: None)
one.start()
while not Path(pids).exists() or one._group is None:
    time.sleep(0.05)
if how == "held":
    one.hold()
print(one._group, flush=True)
time.sleep(300)
"""


@posix
@pytest.mark.parametrize("held", ["held", "free"])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_helper_outlives_the_program(tmp_path: Path, end: signal.Signals, held: str) -> None:
    pids = tmp_path / "pid"
    command = [sys.executable, "-c", PROGRAM, str(pids), held]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert program.stdout
    helper = int(program.stdout.readline())
    wait_for(lambda: pids.read_text())
    compiler = int(pids.read_text())
    program.send_signal(end)
    program.wait(timeout=60)
    wait_for(lambda: gone(helper) and gone(compiler))


def test_closing_twice_or_before_the_start_is_harmless(make: Callable[..., Builder]) -> None:
    one = make(Work([]))
    one.close()
    one.close()
    one.start()
    assert not module.active()
    assert threading.active_count() >= 1
