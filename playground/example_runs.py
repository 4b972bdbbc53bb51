"""Recorded example runs: what a first visitor sees while the model loads.

Each file of ``assets/examples`` holds one Run of schema 1, a list of Runs, an object with ``run`` and ``baseline``, or
an export of History. A file that cannot be read is passed over: an example must never keep the page from opening.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

from decoder.errors import RedlineError
from decoder.trace import Run

log = logging.getLogger(__name__)
FOLDER = Path(__file__).resolve().parent.parent / "assets" / "examples"


def read_example(path: Path) -> list[Run]:
    """The runs of one file; raises RedlineError or ValueError when it is not what it should be."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict) and "run" in data:
        found = [data["run"], data.get("baseline")]
    elif isinstance(data, dict) and isinstance(data.get("runs"), list):
        found = data["runs"]
    else:
        found = data if isinstance(data, list) else [data]
    runs = [item["run"] if isinstance(item, dict) and "run" in item else item for item in found if item]
    return [Run.from_json(item) for item in runs]


@functools.cache
def first(folder: Path = FOLDER) -> tuple[Run, Run | None] | None:
    """The first example that drafts, with its baseline where it was recorded; None without examples."""
    runs: list[Run] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            runs.extend(read_example(path))
        except (RedlineError, ValueError, OSError) as error:
            log.warning("the example %s is passed over: %s", path.name, error)
    run = next((r for r in runs if r.proposer != "none"), None)
    if run is None:
        return None
    return run, next((r for r in runs if r.id == run.baseline_id), None)
