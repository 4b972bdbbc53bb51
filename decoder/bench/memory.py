"""Does memory grow with the number of runs? Resident memory of this process after 5 runs and after N."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decoder.bench.measure import Report, silent
from decoder.errors import RequestError

FIRST = 5


@dataclass(frozen=True, slots=True)
class Memory:
    """Megabytes (10^6 bytes) after ``FIRST`` runs and after ``runs``."""

    runs: int
    first_mb: float
    last_mb: float

    @property
    def ratio(self) -> float:
        """Last over first: 1 when nothing grows."""
        return self.last_mb / self.first_mb

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict, with ``ratio``."""
        return {**asdict(self), "ratio": self.ratio}


def resident_bytes() -> int:
    """Resident memory of this process. RequestError where the system does not tell."""
    try:
        import psutil
    except ImportError:
        pass
    else:
        return int(psutil.Process().memory_info().rss)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        raise RequestError("this system does not tell a process's memory: install psutil") from None
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_memory(
    run: Callable[[int], object], runs: int, report: Report = silent, read: Callable[[], int] = resident_bytes
) -> Memory:
    """Call ``run(i)`` ``runs`` times, keep nothing, and read the memory after the fifth call and after the last."""
    first = 0
    for index in range(runs):
        report(index / runs, f"memory: run {index + 1} of {runs}")
        run(index)
        if index + 1 == FIRST:
            gc.collect()
            first = read()
    gc.collect()
    return Memory(runs, first / 1e6, read() / 1e6)
