"""Model work for the whole process: one plan at a time, every step saved as it goes, a stop heard within one step.

A plan is one generation or several (a run and its baseline; four draft lengths and one baseline). It is executed as
a generator of events. Decoding pauses while the receiver draws or the database writes, so neither is inside the
measured time. Order: the engine of each generation is loaded and warmed up before it, so run and baseline are measured
on the same warm engine. The Playground measures the run first and the baseline behind it, so that the answer comes
without delay; a comparison measures its one baseline first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from decoder.errors import ModelError, RedlineError
from decoder.request import GenerationRequest
from decoder.trace import FinishReason, Run
from playground.active import Active, internal
from playground.compiling import Compiling
from playground.events import Begun, Done, Ended, Failed, ModelEvent, Planned, Stepped, Waiting
from playground.model_thread import Load, ModelThread, Status, first_line, load_engine
from playground.pace import pace_of
from playground.plans import conclude
from playground.saving import Label, RunSaver
from playground.unsaved import Unsaved

if TYPE_CHECKING:
    from storage import Store

log = logging.getLogger(__name__)
T = TypeVar("T")


class ModelService:
    """Owns the model thread, the turn-taking, the stop signals and the runs that could not be saved.

    ``compiling`` makes what compiles behind the runs; it begins with ``compile_behind``.
    """

    def __init__(
        self,
        store: Store,
        load: Load = load_engine,
        compiling: Callable[[Callable[[], None]], Compiling] = Compiling,
    ) -> None:
        self.store = store
        self.models = ModelThread(load)
        self.compiling = compiling(self._renew)
        self.unsaved = Unsaved(store)
        self._turn = threading.Lock()
        self._stops: dict[str, threading.Event] = {}
        self._active: Active | None = None
        self._beside = False
        self._closing = threading.Event()

    @property
    def status(self) -> Status:
        """The model in one line."""
        status = self.models.status
        words = self.compiling.words if status.state == "ready" else ""
        return replace(status, detail=words) if words else status

    def compile_behind(self) -> None:
        """From now on, compile what is missing while nothing is decoded."""
        self.compiling.builder.start()

    def _renew(self) -> None:
        """Something was compiled: use it from the next plan on. On the builder's thread."""
        while not self._turn.acquire(timeout=0.3):
            if self._closing.is_set():
                return
        try:
            if not self._closing.is_set():
                self.models.call(self.models.renew, self.compiling.take_up)
        finally:
            self._turn.release()

    def preload(self, request: GenerationRequest) -> Future[None]:
        """Load ``request``'s target in the background; a failure is kept as the status, never raised."""

        def work() -> None:
            try:
                with self.compiling.builder.held():
                    self.models.prepare(request)
            except RedlineError:
                log.warning("the model is not loaded: %s", self.status.text)

        return self.models.submit(work)

    # --- stopping ---------------------------------------------------------------------------------------------

    def begin(self, session: str) -> threading.Event:
        """The stop signal of what ``session`` has asked for: it can be stopped while it still waits.

        A signal that nobody has used is shared, never replaced: what waits already must still hear a stop.
        """
        event = self._stops.get(session)
        if event is None or event.is_set():
            event = self._stops[session] = threading.Event()
        return event

    def signal(self, session: str) -> threading.Event:
        """The stop signal of what ``session`` had begun, whose turn has come."""
        return self._stops.setdefault(session, threading.Event())

    def end(self, session: str) -> None:
        """What ``session`` had begun is over."""
        self._stops.pop(session, None)

    def is_busy(self, session: str) -> bool:
        """True from ``begin`` to ``end``: while ``session``'s work waits for its turn, and while it goes on."""
        return session in self._stops

    def stop(self, session: str) -> bool:
        """Ask ``session``'s work to stop; False when there is none."""
        event = self._stops.get(session)
        if event is None:
            return False
        event.set()
        return True

    def forget(self, session: str) -> None:
        """``session`` has left."""
        event = self._stops.pop(session, None)
        if event:
            event.set()

    def close(self) -> None:
        """Stop all work and save what is going on, or write it to a file; for the end of the process."""
        self._closing.set()
        self.compiling.builder.close()
        active = None if self._turn.acquire(timeout=10) else self._active
        if active and active.left:  # somebody still tries to save it, and will not get to the end
            self.unsaved.keep(active.final(), active.saver, active.plan)
        elif active:
            self._settle(active)
        self.unsaved.close()
        self.models.close()

    # --- working ----------------------------------------------------------------------------------------------

    def execute(
        self, plan: Sequence[Planned], label: Label, stop: threading.Event, *, beside: bool = False
    ) -> Iterator[ModelEvent]:
        """Run ``plan``. Sentences come as events; a closed generator leaves its run saved as stopped. ``beside``: see
        ``playground.pace``."""
        while not self._turn.acquire(timeout=0.3):
            if self._heard(stop):
                yield Done((), None, "it was stopped before it began", stopped=True)
                return
            yield Waiting("waiting for another run to end")
        self._beside = beside
        # No compiler takes time from what is measured, and the path stays the same from here to the end of the plan.
        self.compiling.builder.hold()
        released = False
        try:
            yield from self._execute(plan, label, stop)
        except GeneratorExit:
            # The visitor has gone. Closing and saving may take a moment, and whoever closes us may not wait.
            active = self._active
            if active:
                active.left = True
                released = True
                threading.Thread(target=self._abandon, args=(active,), name="abandoned-run").start()
            raise
        finally:
            if not released:
                self._end_turn()

    def _end_turn(self) -> None:
        self._turn.release()
        self.compiling.builder.release()

    def _execute(self, plan: Sequence[Planned], label: Label, stop: threading.Event) -> Iterator[ModelEvent]:
        ended: dict[int, Run] = {}
        reasons: dict[int, str] = {}
        ids: list[str] = []
        for index, planned in enumerate(plan):
            if self._heard(stop):
                reasons[index] = "it was stopped before its turn"
                continue
            try:
                run = yield from self._one(index, planned, label, stop, ids)
            except RedlineError as error:
                reasons[index] = str(error)
                yield Failed(index, str(error))
                if index == 0 and not any(p.role == "run" for p in plan[1:]):
                    break
                continue
            if run is None:
                reasons[index] = "it was stopped before it began"
                continue
            ended[index] = run
            if run.finish_reason is FinishReason.CANCELLED:
                stop.set()
            elif run.finish_reason is FinishReason.ERROR and len(plan) == 2 and index == 0:
                reasons[1] = "the run ended with an error"
                break
        try:
            done = conclude(plan, ended, reasons, partial(self.unsaved.link, plan=ids), stopped=self._heard(stop))
        except Exception as error:
            log.exception("a plan could not be concluded")
            runs = tuple(run for index, run in ended.items() if plan[index].role == "run")
            done = Done(runs, None, internal(error), self._heard(stop))
        yield done

    def _one(
        self, index: int, planned: Planned, label: Label, stop: threading.Event, ids: list[str]
    ) -> Generator[ModelEvent, None, Run | None]:
        """One generation that always ends: whatever is raised, what there is gets saved and the page is told."""
        try:
            return (yield from self._generate(index, planned, label, stop, ids))
        except Exception as error:
            active = self._active
            expected = isinstance(error, RedlineError)
            if not expected:
                log.exception("generation %d of a plan failed", index)
            if active is None and expected:
                raise
            if active is None:
                raise ModelError(internal(error)) from error
            active.crash = active.crash or (str(error) if expected else internal(error))
        run = self._settle(active)
        self._active = None
        fresh = active.take()
        if fresh:
            yield Stepped(index, tuple(fresh), (run.prefill_ms, run.ttft_ms) if fresh[0].index == 0 else None)
        yield Failed(index, f"{active.crash}; its steps are kept")
        yield Ended(index, run, self._problem(active.saver))
        return run

    def _generate(
        self, index: int, planned: Planned, label: Label, stop: threading.Event, ids: list[str]
    ) -> Generator[ModelEvent, None, Run | None]:
        """One generation, from loading to saved. Returns its run, or None when it was stopped before it began."""
        engine = yield from self._wait(self.models.submit(self.models.prepare, planned.request), stop)
        if engine is None:
            return None
        if planned.request.suffix_earlier:
            self.models.call(engine.remember, self._earlier(planned.request, ids))
        stream = self.models.call(engine.stream, planned.request)
        filed = Label(label.author, label.name, (*label.tags, *planned.tags), label.note)
        ids.append(stream.run.id)
        active = self._active = Active(stream, RunSaver(self.store, stream.run, filed), ids)
        active.saver.add([])
        yield Begun(index, stream.run)
        steps = iter(stream)
        pace = pace_of(stream.run.device, self._beside)
        shown = 0.0
        while not self._heard(stop):
            try:
                step = self.models.call(next, steps, None)
            except RedlineError as error:
                active.crash = str(error)
                break
            except Exception as error:
                log.exception("run %s failed", stream.run.id)
                active.crash = f"decoding failed: {type(error).__name__}: {first_line(error)}"
                break
            if step is None:
                break
            active.steps.append(step)
            if time.monotonic() - shown >= pace.frame_s:
                first = active.handed_over == 0
                yield self._hand_over(index, active)
                if pace.rest_s:
                    stop.wait(pace.first_rest_s if first else pace.rest_s)
                shown = time.monotonic()
        if active.handed_over < len(active.steps):
            yield self._hand_over(index, active)
        self.models.call(stream.close)
        run = active.final()
        for saved in active.saver.finishing(run):
            if not saved:
                yield Waiting(f"saving again: {active.saver.problem}")
        if not active.saver.saved:
            self.unsaved.keep(run, active.saver, ids)
        self._active = None
        yield Ended(index, run, self._problem(active.saver))
        return run

    def _earlier(self, request: GenerationRequest, plan: Sequence[str]) -> list[list[int]]:
        """Outputs of stored runs to draft from. Those of the same plan are not earlier runs: its own baseline has just
        written the very text that is to be drafted."""
        try:
            return self.store.recent_outputs(request.target, leave_out=plan)
        except RedlineError as error:
            log.warning("earlier runs cannot be read: %s", error)
            return []

    def _wait(self, future: Future[T], stop: threading.Event) -> Generator[ModelEvent, None, T | None]:
        while not future.done():
            if self._heard(stop):
                future.cancel()  # a load that has begun goes on and serves the next run
                return None
            status = self.status
            if status.state == "loading":
                yield Waiting(status.text, status.fraction)
            wait([future], timeout=0.15)
        return future.result() if not self._heard(stop) else None

    def _hand_over(self, index: int, active: Active) -> Stepped:
        prefill = None
        if active.handed_over == 0:
            run = active.stream.run
            prefill = (run.prefill_ms, run.ttft_ms)
        steps = active.take()
        active.saver.add(steps, prefill)
        return Stepped(index, tuple(steps), prefill)

    def _problem(self, saver: RunSaver) -> str | None:
        return None if saver.saved else saver.problem or "the database did not answer"

    def save_again(self, run_id: str) -> str | None:
        """Try to save what could not be saved of ``run_id``'s plan. None when all of it is safe, else the reason."""
        return self.unsaved.save_again(run_id)

    # --- ending -----------------------------------------------------------------------------------------------

    def _heard(self, stop: threading.Event) -> bool:
        return stop.is_set() or self._closing.is_set()

    def _abandon(self, active: Active) -> None:
        try:
            self._settle(active)
        finally:
            self._active = None
            self._end_turn()

    def _settle(self, active: Active) -> Run:
        """Close and save, or keep, what nobody watches any more or what has failed. Raises nothing."""
        try:
            self.models.call(active.stream.close)
        except Exception as error:
            log.exception("a run could not be closed")
            active.crash = active.crash or internal(error)
        run = active.final()
        if not active.saver.finish(run):
            self.unsaved.keep(run, active.saver, active.plan)
        return run
