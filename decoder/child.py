"""Manners of a helper process: it takes what others leave, and nothing of it outlives who asked for it.

Run as a script with a command, this is a guard between a program and its helper: it starts the command in a process
group of its own, prints the group's number, and kills the whole group as soon as its stdin closes, which also happens
when the program is killed, and also while the group is stopped. Its exit code is the command's (128 + n: signal n).
Standard library only, so that it starts at once and takes hardly any memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

GROUPS = hasattr(os, "killpg")
"""Processes have groups here, which can be stopped and killed together."""


def be_modest() -> None:
    """Give way to everything else on the machine; be the one that goes when memory runs out."""
    if hasattr(os, "nice"):
        os.nice(15)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


def guarded(command: Sequence[str]) -> list[str]:
    """``command`` under a guard."""
    return [sys.executable, "-S", str(Path(__file__).resolve()), *command]


def end_group(helper: subprocess.Popen[bytes]) -> None:
    """Kill a helper and whatever it has started, stopped or not."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if GROUPS:
            os.killpg(helper.pid, signal.SIGKILL)
        else:
            helper.kill()


def guard(command: Sequence[str]) -> int:
    """Run ``command`` to its end, or until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which then closes stdin
    helper = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0 if GROUPS else None)

    def watch() -> None:
        os.read(0, 1)  # the raw descriptor: at the end of the process nobody waits for a lock on sys.stdin
        end_group(helper)

    threading.Thread(target=watch, daemon=True).start()
    print(helper.pid, flush=True)
    code = helper.wait()
    end_group(helper)  # compilers that it left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
