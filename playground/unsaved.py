"""Runs that the database refused: kept to be saved again or downloaded, and written to a file rather than dropped.

A run is kept with its saver, which knows what of it is in the database already, and with the ids of its whole plan:
whoever asks for one run of a plan means its baseline too. A baseline is linked once both are safe.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from decoder.errors import RedlineError
from decoder.trace import Run
from playground.saving import RunSaver

if TYPE_CHECKING:
    from storage import Store

log = logging.getLogger(__name__)

UNSAVED_KEPT = 20
"""More runs than this are not held in memory: the older half goes to a file."""


class Kept(NamedTuple):
    """A run that is not in the database. ``plan`` holds the ids of all runs of its plan, shared between them."""

    run: Run
    saver: RunSaver
    plan: Sequence[str]
    since: datetime


class Unsaved:
    """All runs of this process that could not be saved. Usable from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._links: dict[str, tuple[str, Sequence[str]]] = {}
        """Baselines that are still to be linked: run id -> baseline id and plan."""
        self._written: dict[str, tuple[Path, Sequence[str]]] = {}
        self._lock = threading.RLock()
        self._saving = threading.Lock()

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, run_id: str) -> Kept | None:
        """The run with this id, None when it is not kept here."""
        return self._kept.get(run_id)

    def of_plan(self, run_id: str) -> list[Kept]:
        """What is kept of the plan that ``run_id`` belongs to (which may be saved itself), baselines first."""
        with self._lock:
            found = [kept for kept in self._kept.values() if run_id == kept.run.id or run_id in kept.plan]
        return sorted(found, key=lambda kept: kept.run.proposer != "none")

    def concerns(self, run_id: str) -> bool:
        """True when something of ``run_id``'s plan is not safe yet."""
        return bool(self.of_plan(run_id)) or any(run_id in plan for _, plan in list(self._links.values()))

    # --- taking in --------------------------------------------------------------------------------------------

    def keep(self, run: Run, saver: RunSaver, plan: Sequence[str] = ()) -> None:
        """Hold ``run`` until it is saved or downloaded."""
        with self._lock:
            self._kept[run.id] = Kept(run, saver, plan, datetime.now(UTC))
            if len(self._kept) > UNSAVED_KEPT:
                self.write_out(list(self._kept.values())[: UNSAVED_KEPT // 2])

    def link(self, run_id: str, baseline_id: str, plan: Sequence[str]) -> str | None:
        """Make ``baseline_id`` the baseline of the run, now or when both are saved. Returns why it failed, or None."""
        with self._lock:
            self._links[run_id] = (baseline_id, plan)
            kept = self._kept.get(run_id)
            if kept is not None:
                self._kept[run_id] = kept._replace(run=kept.run.replace(baseline_id=baseline_id))
        return self._link(run_id)

    def _link(self, run_id: str) -> str | None:
        baseline_id = self._links.get(run_id, ("", ()))[0]
        if not baseline_id or run_id in self._kept or baseline_id in self._kept:
            return None
        if run_id in self._written or baseline_id in self._written:
            self._links.pop(run_id, None)
            return None
        try:
            self._store.link_baseline(run_id, baseline_id)
        except RedlineError as error:
            log.warning("the baseline of %s could not be linked: %s", run_id, error)
            return f"the baseline could not be linked to the run: {error}"
        self._links.pop(run_id, None)
        return None

    # --- letting go -------------------------------------------------------------------------------------------

    def save_again(self, run_id: str, waits: Sequence[float] | None = None) -> str | None:
        """Try to save all that is kept of ``run_id``'s plan. None when the plan is safe now, else the reason."""
        with self._saving:
            for kept in self.of_plan(run_id):
                if not kept.saver.finish(kept.run, waits):
                    return kept.saver.problem or "the database did not answer"
                with self._lock:
                    self._kept.pop(kept.run.id, None)
            for linked in [id_ for id_, (_, plan) in self._links.items() if run_id == id_ or run_id in plan]:
                problem = self._link(linked)
                if problem:
                    return problem
        for id_, (path, plan) in list(self._written.items()):
            if run_id == id_ or run_id in plan:
                return f"{id_} was written to {path}: take it in with python -m storage import"
        try:
            self._store.get_run(run_id)
        except RedlineError as error:
            return str(error)
        return None

    def export(self, *run_ids: str) -> tuple[list[str], str]:
        """Ids and text of a file with all that is kept of the plans of ``run_ids``. Raises RedlineError when nothing
        is."""
        found = {kept.run.id: kept for run_id in run_ids for kept in self.of_plan(run_id)}
        if not found:
            raise RedlineError("this run is saved: export it from History")
        return list(found), envelope(list(found.values()))

    def close(self) -> None:
        """Try once more to save what is left, and write the rest to a file."""
        for run_id in list(self._kept):
            if run_id in self._kept and self.save_again(run_id, waits=(0.0,)):
                break  # a database that refuses one refuses all, and the end of the process should not take minutes
        with self._lock:
            if self._kept:
                self.write_out(list(self._kept.values()))

    def write_out(self, runs: Sequence[Kept]) -> Path | None:
        """Write ``runs`` to a file that can be imported, say where, and let go of them. None when nothing took it."""
        text = envelope(runs)
        for folder in (Path.cwd(), Path(tempfile.gettempdir())):
            try:
                path = _write_new(folder, text)
            except OSError as error:
                log.warning("runs could not be written to %s: %s", folder, error)
                continue
            for kept in runs:
                self._kept.pop(kept.run.id, None)
                self._written[kept.run.id] = (path, kept.plan)
            gone = {kept.run.id for kept in runs}
            self._links = {run: link for run, link in self._links.items() if run not in gone and link[0] not in gone}
            number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
            print(
                f"redline: {number} could not be saved in {self._store.label}: written to {path}. "
                f"Take in with: python -m storage import {path}",
                file=sys.stderr,
                flush=True,
            )
            return path
        log.error("%d runs that could not be saved could not be written to a file either", len(runs))
        return None


def envelope(runs: Sequence[Kept]) -> str:
    """``runs`` as an export that ``Store.import_json`` takes in, with their labels."""
    from storage import RunMeta
    from storage.records import state_of
    from storage.transfer import KIND, SCHEMA, meta_to_json

    entries: list[dict[str, Any]] = []
    for kept in runs:
        label, run = kept.saver.label, kept.run
        state = state_of(run.finish_reason)
        meta = RunMeta(run.id, label.name, label.tags, label.note, label.author, kept.since, state, False, None)
        entries.append({"run": run.to_json(), "meta": meta_to_json(meta)})
    return json.dumps(
        {"redline": KIND, "schema": SCHEMA, "exported_at": datetime.now(UTC).isoformat(), "runs": entries},
        ensure_ascii=False,
        allow_nan=False,
    )


def _write_new(folder: Path, text: str) -> Path:
    """Write ``text`` to a new file that only this user may read; an older file is never replaced."""
    for path in _names(folder):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return path
    raise OSError(f"{folder} holds too many files of this second")


def _names(folder: Path) -> Iterator[Path]:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    yield folder / f"redline-unsaved-{stamp}.json"
    yield from (folder / f"redline-unsaved-{stamp}-{number}.json" for number in range(2, 1000))
