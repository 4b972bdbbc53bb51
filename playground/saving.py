"""Saving a run while it is being decoded, so that no step is lost: not when it fails, not when the database is locked.

A ``RunSaver`` never raises while the run goes on. What could not be written waits and is tried again with the next
steps; at the end it is tried for some seconds more, and if that fails too, the caller is told and still has the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decoder.errors import RedlineError
from decoder.trace import Run, Step

if TYPE_CHECKING:
    from storage import RunWriter, Store

log = logging.getLogger(__name__)

FINAL_TRIES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Waits before each try to write the end of a run."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a run is filed under beside its trace."""

    author: str = "anonymous"
    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


@dataclass
class RunSaver:
    """Writes one run through ``store``. ``problem`` is the sentence of the last failure, None while all is well."""

    store: Store
    run: Run
    label: Label = field(default_factory=Label)
    problem: str | None = None
    saved: bool = False
    _writer: RunWriter | None = None
    _pending: list[Step] = field(default_factory=list)

    def add(self, steps: list[Step], prefill: tuple[float, float] | None = None) -> None:
        """Keep ``steps`` and try to write all that waits. ``prefill`` (prefill_ms, ttft_ms) comes with the first step:
        a run that never ends has its prefill times too."""
        if prefill is not None:
            self.run = self.run.replace(prefill_ms=prefill[0], ttft_ms=prefill[1])
        self._pending.extend(steps)
        self._try(self._write_pending)

    def finish(self, run: Run, waits: Sequence[float] | None = None) -> bool:
        """Write the final state; tries for a few seconds. True when the run is safe in the database."""
        return any(self.finishing(run, waits=waits))

    def finishing(
        self, run: Run, sleep: Callable[[float], None] = time.sleep, waits: Sequence[float] | None = None
    ) -> Iterator[bool]:
        """As ``finish``, but yields False after each failed try and True at the end, so that a caller can say so."""
        self.run = run
        for wait in FINAL_TRIES_S if waits is None else waits:
            sleep(wait)
            if self._try(self._write_end):
                self.saved = True
                yield True
                return
            yield False

    def _write_pending(self) -> None:
        if self._writer is None:
            bare = self.run.replace(steps=(), output_ids=(), text="", finish_reason=None, decode_ms=0.0, metrics={})
            label = self.label
            self._writer = self.store.start_run(
                bare, author=label.author, name=label.name, tags=label.tags, note=label.note
            )
        if self._pending:
            # The writer keeps what it was given even when it cannot write it now: never hand a step over twice.
            steps, self._pending = self._pending, []
            # The run is given each time, because the writer keeps steps but not times while the database is locked.
            self._writer.append(steps, run=self.run)

    def _write_end(self) -> None:
        if self._writer is None:
            self._write_pending()
        assert self._writer is not None
        self._writer.finish(self.run)  # stores every step of the run that is not stored yet

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except RedlineError as error:
            self.problem = str(error)
            return False
        except Exception as error:  # whatever a database driver raises must not cost the run
            log.exception("saving run %s failed", self.run.id)
            self.problem = f"the database refused it ({type(error).__name__})"
            return False
        self.problem = None
        return True
