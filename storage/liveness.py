"""Is the writer of a run still there?

A running run carries who writes it: host, process id, when that process started (ids are used again) and a token of
the one RunWriter. On this host the process table decides, in this process the writer itself; of other hosts we know
the last heartbeat only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

STALE_AFTER = timedelta(minutes=10)
"""How long a writer on another host may be silent. It beats with every step; waking up again, it goes on."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes a run. ``started`` tells processes apart that had the same id, one after the other."""

    host: str
    pid: int
    started: str
    token: str


_here: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
_here_lock = threading.Lock()


def new_writer(owner: object) -> Writer:
    """An identity for ``owner`` in this process; it counts as alive until ``retire`` or until ``owner`` is gone."""
    pid = os.getpid()
    writer = Writer(host_name(), pid, _own_start(pid), secrets.token_hex(16))
    with _here_lock:
        _here[writer.token] = owner
    return writer


def retire(writer: Writer) -> None:
    """The writer has written its last word."""
    with _here_lock:
        _here.pop(writer.token, None)


def is_alive(writer: Writer, heartbeat: datetime | None) -> bool:
    """False when nobody will write to this run any more. ``heartbeat`` is aware."""
    if writer.host != host_name():
        return heartbeat is not None and datetime.now(UTC) - heartbeat < STALE_AFTER
    if writer.pid == os.getpid() and writer.started == _own_start(writer.pid):
        with _here_lock:
            return writer.token in _here
    started = _started(writer.pid)
    return started is not None and started == writer.started


@lru_cache(maxsize=1)
def host_name() -> str:
    """This host; containers that share a name but not their processes are different hosts."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += "/" + os.readlink("/proc/self/ns/pid")
    return name[:255]


@lru_cache(maxsize=1)
def _own_start(pid: int) -> str:
    """The mark of this process; ``pid`` is its own id, which a fork changes."""
    return _started(pid) or ""


def _started(pid: int) -> str | None:
    """A mark of when process ``pid`` of this host started; None when there is no such process (any more)."""
    if sys.platform == "linux":
        return _started_linux(pid)
    return _started_posix(pid)


def _started_linux(pid: int) -> str | None:
    try:
        # The command's name may hold anything, also brackets and spaces: fields are counted from its end.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    state, ticks = fields[0], fields[19]
    if state in (b"Z", b"X"):  # killed, but its parent has not looked yet
        return None
    return f"{_boot_id()}:{int(ticks)}"


@lru_cache(maxsize=1)
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started_posix(pid: int) -> str | None:
    try:
        found = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10, env={"LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
