"""Writes one run while it goes: a row that says "running", its steps in short transactions, then its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from decoder.trace import Run, Step
from storage.codec import PREVIEW, encode_body, encode_step, preview
from storage.database import Database
from storage.errors import DatabaseLocked, RunNotFound, StorageError
from storage.liveness import new_writer, retire
from storage.models import RunRow, StepRow, TraceRow
from storage.records import RunMeta, State, state_of
from storage.rows import insert_run, insert_steps, write_end
from storage.sweep import interrupt

log = logging.getLogger(__name__)


class RunWriter:
    """Made by ``Store.start_run``. Usable from any thread; also a context manager.

    A writer that goes away without ``finish`` (left block, end of the process, SIGKILL) leaves an interrupted run
    with the steps it was given.
    """

    def __init__(self, database: Database, run: Run, meta: RunMeta) -> None:
        self.run_id = run.id
        self._database = database
        self._lock = threading.RLock()
        self._header = run.replace(steps=())
        self._steps: list[Step] = []
        self._pending: list[tuple[int, str]] = []
        """Encoded steps that are not in the database yet: the last ones of ``_steps``."""
        self._tokens = 0
        self._text = ""
        self._finished: Run | None = None
        self._take(run.steps)
        self._writer = new_writer(self)
        try:
            with database.write() as session:
                insert_run(session, self._header, meta, (), self._writer)
                self._store_pending(session)
        except BaseException:
            retire(self._writer)
            raise
        self._pending = []

    def append(self, steps: Iterable[Step], *, run: Run | None = None) -> None:
        """Store more steps, in order, in one short transaction; also the sign of life of this run.

        While another process holds the database for longer than the time-out the steps are kept, and stored with the
        next call. ``run`` (the Run so far) is worth giving once after the first step: its prefill times are then
        known even if the run never ends. Raises StorageError for a step that is out of turn or cannot be stored, and
        RunNotFound when the run was deleted meanwhile.
        """
        with self._lock:
            if self._finished is not None:
                raise StorageError(f"run {self.run_id!r} has ended: it takes no more steps")
            self._take(steps)
            try:
                self._flush(run)
            except DatabaseLocked:
                log.warning("run %s: the database is locked, steps are kept for later", self.run_id)

    def _take(self, steps: Iterable[Step]) -> None:
        fresh = list(steps)
        for position, step in enumerate(fresh, len(self._steps)):
            if step.index != position:
                raise StorageError(f"step {step.index} of run {self.run_id!r} came where step {position} was due")
        self._pending.extend([(step.index, encode_step(step)) for step in fresh])
        self._steps.extend(fresh)
        for token in (token for step in fresh for token in step.emitted):
            self._tokens += 1
            if len(self._text) < PREVIEW:
                self._text += token.text

    def _flush(self, run: Run | None) -> None:
        header = self._header
        if run is not None and run.id == self.run_id:
            header = header.replace(prefill_ms=run.prefill_ms, ttft_ms=run.ttft_ms)
        with self._database.write() as session:
            self._claim(session)
            self._store_pending(session)
            if header != self._header:
                session.execute(
                    sa.update(TraceRow).where(TraceRow.run_id == self.run_id).values(body=encode_body(header))
                )
                session.execute(
                    sa.update(RunRow)
                    .where(RunRow.id == self.run_id)
                    .values(prefill_ms=header.prefill_ms, ttft_ms=header.ttft_ms)
                )
        self._pending, self._header = [], header

    def _claim(self, session: Session) -> None:
        """Make sure that the run is still ours; take it back when it was believed dead."""
        state = session.scalar(
            sa.select(RunRow.state).where(RunRow.id == self.run_id, RunRow.writer_token == self._writer.token)
        )
        if state is None:
            raise RunNotFound(self.run_id, f"run {self.run_id!r} was deleted while it was being written")
        if state == State.INTERRUPTED:
            session.execute(
                sa.update(RunRow).where(RunRow.id == self.run_id).values(state=State.RUNNING.value, speedup=None)
            )
            session.execute(
                sa.update(TraceRow)
                .where(TraceRow.run_id == self.run_id)
                .values(body=encode_body(self._header), final=False)
            )

    def _store_pending(self, session: Session) -> None:
        insert_steps(session, self.run_id, self._pending)
        session.execute(
            sa.update(RunRow)
            .where(RunRow.id == self.run_id)
            .values(heartbeat_at=datetime.now(UTC), num_output_tokens=self._tokens, text_preview=preview(self._text))
        )

    def finish(self, run: Run) -> None:
        """Store the end of the run, and every step of it that is not stored yet. Calling it again changes nothing.

        ``run`` has the last word: stored steps that differ from its own are replaced. A baseline that was linked
        meanwhile is kept when ``run`` names none. Raises StorageError when the end could not be stored (it may be
        tried again).
        """
        with self._lock:
            if run.id != self.run_id:
                raise StorageError(f"run {run.id!r} is not run {self.run_id!r}, which this writer writes")
            if self._finished == run:
                return
            same = 0
            stored = self._steps[: len(self._steps) - len(self._pending)]
            for ours, final in zip(stored, run.steps, strict=False):
                if ours != final:
                    break
                same += 1
            payloads = [(index, encode_step(step)) for index, step in enumerate(run.steps[same:], same)]
            with self._database.write() as session:
                self._claim(session)
                linked = session.scalar(sa.select(RunRow.baseline_id).where(RunRow.id == run.id))
                session.execute(sa.delete(StepRow).where(StepRow.run_id == run.id, StepRow.index >= same))
                insert_steps(session, run.id, payloads)
                write_end(session, run.replace(baseline_id=run.baseline_id or linked), state_of(run.finish_reason))
            self._steps, self._pending, self._finished = list(run.steps), [], run
            retire(self._writer)

    def abandon(self) -> None:
        """Give the run up without an end: it reads "interrupted", with its steps. After ``finish`` it does nothing."""
        with self._lock:
            if self._finished is None:
                retire(self._writer)
                if self._pending:
                    self._flush(None)
                interrupt(self._database, self.run_id, self._writer.token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.abandon()
        except StorageError:
            if error is None:
                raise
            log.warning("run %s could not be marked as interrupted", self.run_id, exc_info=True)
