"""Compiling behind the runs: missing steps are built one after the other in helper processes, while nothing decodes.

While anything is decoded the helper is stopped (with the compiler that it may have started), so that it takes no time
from a measurement; where a process cannot be stopped, none is started until all is quiet. What was built is taken up
between runs. Knows nothing of torch: what is missing, how it is built and what then happens is given to it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

from decoder.child import GROUPS, guarded

log = logging.getLogger(__name__)

CAN_PAUSE = GROUPS
_builders: set[Builder] = set()


def active() -> bool:
    """True in a process that builds what is missing by itself."""
    return bool(_builders)


class Job(Protocol):
    """One thing to be built (``decoder.packages.Recipe``)."""

    @property
    def built(self) -> bool:
        """True when it is there."""


class Work(Protocol):
    """What there is to do."""

    def missing(self) -> Sequence[Job]:
        """What is to be built, in order."""

    def command(self, job: Job) -> tuple[list[str], Path]:
        """The command that builds it, and the folder to run it in."""

    def failed(self, job: Job, code: int, errors: str) -> None:
        """It ended with ``code`` and this on stderr; ``missing`` must not name it again."""


class Builder:
    """Builds what ``work`` lacks whenever nobody holds it. ``done`` is called (on the builder's thread) when something
    was built; it may wait for a moment between two runs."""

    def __init__(self, work: Work, done: Callable[[], None]) -> None:
        self._work = work
        self._done = done
        self._changed = threading.Condition()
        self._held = 0
        self._closing = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        """The helper's process group, which is also its process."""
        self._thread = threading.Thread(target=self._loop, name="builder", daemon=True)

    def start(self) -> None:
        """Begin; also called again it begins only once."""
        if not self._thread.is_alive() and not self._closing:
            self._thread.start()
            _builders.add(self)
            atexit.register(self.close)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is compiled inside."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Stop compiling until ``release`` was called as often."""
        with self._changed:
            self._held += 1
            if self._held == 1:
                self._signal("SIGSTOP")

    def release(self) -> None:
        """The other end of ``hold``. Whoever has new work calls it as well: it makes the builder look again."""
        with self._changed:
            self._held -= 1
            if self._held == 0:
                self._signal("SIGCONT")
            self._changed.notify_all()

    def close(self) -> None:
        """End the helper, stopped or not, and build nothing more."""
        with self._changed:
            self._closing = True
            if self._guard and self._guard.stdin:
                self._guard.stdin.close()
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        _builders.discard(self)
        atexit.unregister(self.close)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (self._held or not self._work.missing()):
                    self._changed.wait()
                if self._closing:
                    return
                job = self._work.missing()[0]
            try:
                built = self._build(job)
            except Exception as error:  # no process could be started: say so, and do not try again
                log.warning("nothing can be compiled: %s", error)
                self._work.failed(job, 1, str(error))
                continue
            if built and not self._closing:
                try:
                    self._done()
                except Exception:
                    log.exception("what was compiled could not be taken up")

    def _build(self, job: Job) -> bool:
        """Build one job in a process group of its own, under a guard; True when it is there."""
        command, folder = self._work.command(job)
        with tempfile.TemporaryFile() as errors:
            with self._changed:
                if self._closing:
                    return False
                guard = subprocess.Popen(
                    guarded(command), cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                )
                assert guard.stdin
                assert guard.stdout
                line = guard.stdout.readline()
                self._group = int(line) if line.strip() else None
                if self._held:
                    self._signal("SIGSTOP")
                self._guard = guard
            code = guard.wait()
            with self._changed:
                self._group = self._guard = None
                guard.stdin.close()
                guard.stdout.close()
                closing = self._closing
            if job.built:
                return True
            if not closing:
                self._work.failed(job, code if code <= 128 else 128 - code, _end_of(errors))
            return False

    def _signal(self, name: str) -> None:
        """Stop or continue the helper and all that it has started; with the lock held."""
        if CAN_PAUSE and self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, getattr(signal, name))


def _end_of(file: IO[bytes], limit: int = 20_000) -> str:
    """The last of what was written to ``file``."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - limit))
    return file.read().decode(errors="replace")
