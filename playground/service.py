"""Model work for the whole process: one plan at a time, every step saved as it goes, a stop heard within one step.

A plan is one generation or several (a run and its baseline; four draft lengths and one baseline). It is executed as
a generator of events. Decoding pauses while the receiver draws or the database writes, so neither is inside the
measured time. Order: the engine of each generation is loaded and warmed up before it, so run and baseline are measured
on the same warm engine. The Playground measures the run first and the baseline behind it, so that the answer comes
without delay; a comparison measures its one baseline first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from decoder.errors import RedlineError
from decoder.metrics import baseline_fits
from decoder.request import GenerationRequest
from decoder.trace import FinishReason, Run, Step
from playground.events import Begun, Done, Ended, Failed, ModelEvent, Planned, Stepped, Waiting
from playground.model_thread import Load, ModelThread, Status, Stream, first_line, load_engine
from playground.saving import Label, RunSaver

if TYPE_CHECKING:
    from storage import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

FRAME_S = 1 / 15
"""Steps are handed on at most this often."""
UNSAVED_KEPT = 20
JUST_NOW_S = 2.0


def baseline_request(request: GenerationRequest) -> GenerationRequest:
    """The same generation with the proposer off: the only fair thing to measure a speed-up against."""
    return request.replace(proposer="none", draft=None, prediction=None, exit_layer=0, ngram_min=1, ngram_max=4)


def plan_run(request: GenerationRequest, *, baseline: bool) -> list[Planned]:
    """A run and, if asked for and if it drafts, its baseline behind it."""
    plan = [Planned(request)]
    if baseline and request.proposer != "none":
        plan.append(Planned(baseline_request(request), "baseline", "baseline", ("baseline",)))
    return plan


def plan_comparison(variants: Sequence[tuple[str, GenerationRequest]]) -> list[Planned]:
    """One baseline, then each variant. The variants must differ in nothing but who drafts, and how much."""
    baseline = Planned(baseline_request(variants[0][1]), "baseline", "baseline", ("baseline",))
    rest = [Planned(request, "run", title) for title, request in variants if request.proposer != "none"]
    return [baseline, *rest]


class _Active:
    """The generation that is going on: what must be closed and saved, whatever happens."""

    def __init__(self, stream: Stream, saver: RunSaver) -> None:
        self.stream = stream
        self.saver = saver
        self.pending: list[Step] = []

    def final(self) -> Run:
        """The run as it stands, with a finish reason."""
        run = self.stream.run
        return run if run.finish_reason else run.replace(finish_reason=FinishReason.CANCELLED)


class ModelService:
    """Owns the model thread, the turn-taking, the stop signals and the runs that could not be saved."""

    def __init__(self, store: Store, load: Load = load_engine) -> None:
        self.store = store
        self.models = ModelThread(load)
        self.unsaved: OrderedDict[str, tuple[Run, Label]] = OrderedDict()
        self._turn = threading.Lock()
        self._stops: dict[str, threading.Event] = {}
        self._begun: dict[str, float] = {}
        self._active: _Active | None = None
        self._closing = threading.Event()

    @property
    def status(self) -> Status:
        """The model in one line."""
        return self.models.status

    def preload(self, request: GenerationRequest) -> Future[None]:
        """Load ``request``'s target in the background; a failure is kept as the status, never raised."""

        def work() -> None:
            try:
                self.models.prepare(request)
            except RedlineError:
                log.warning("the model is not loaded: %s", self.status.text)

        return self.models.submit(work)

    # --- stopping ---------------------------------------------------------------------------------------------

    def begin(self, session: str) -> threading.Event:
        """A fresh stop signal for what ``session`` has asked for: it can be stopped while it still waits."""
        event = self._stops[session] = threading.Event()
        self._begun[session] = time.monotonic()
        return event

    def signal(self, session: str) -> threading.Event:
        """The stop signal of what ``session`` had begun, whose turn has come."""
        self._begun[session] = math.inf
        return self._stops.setdefault(session, threading.Event())

    def end(self, session: str) -> None:
        """What ``session`` had begun is over."""
        self._stops.pop(session, None)
        self._begun.pop(session, None)

    def is_busy(self, session: str) -> bool:
        """True while ``session``'s work goes on, and just after it was asked for (a second click, a double key)."""
        return self._begun.get(session, -math.inf) > time.monotonic() - JUST_NOW_S

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
        self._begun.pop(session, None)
        if event:
            event.set()

    def close(self) -> None:
        """Stop all work and save what is going on; for the end of the process."""
        self._closing.set()
        if not self._turn.acquire(timeout=10) and self._active:
            self._settle(self._active)
        self.models.close()

    # --- working ----------------------------------------------------------------------------------------------

    def execute(self, plan: Sequence[Planned], label: Label, stop: threading.Event) -> Iterator[ModelEvent]:
        """Run ``plan``. Sentences come as events; a closed generator leaves its run saved as stopped."""
        while not self._turn.acquire(timeout=0.3):
            if self._heard(stop):
                yield Done((), None, "it was stopped before it began", stopped=True)
                return
            yield Waiting("waiting for another run to end")
        released = False
        try:
            yield from self._execute(plan, label, stop)
        except GeneratorExit:
            # The visitor has gone. Closing and saving may take a moment, and whoever closes us may not wait.
            active, self._active = self._active, None
            if active:
                released = True
                threading.Thread(target=self._abandon, args=(active,), name="abandoned-run").start()
            raise
        finally:
            if not released:
                self._turn.release()

    def _execute(self, plan: Sequence[Planned], label: Label, stop: threading.Event) -> Iterator[ModelEvent]:
        ended: dict[int, Run] = {}
        reasons: dict[int, str] = {}
        for index, planned in enumerate(plan):
            if self._heard(stop):
                reasons[index] = "it was stopped before its turn"
                continue
            try:
                run = yield from self._one(index, planned, label, stop)
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
        yield self._conclude(plan, ended, reasons, stopped=self._heard(stop))

    def _one(
        self, index: int, planned: Planned, label: Label, stop: threading.Event
    ) -> Generator[ModelEvent, None, Run | None]:
        """One generation, from loading to saved. Returns its run, or None when it was stopped before it began."""
        engine = yield from self._wait(self.models.submit(self.models.prepare, planned.request), stop)
        if engine is None:
            return None
        stream = self.models.call(engine.stream, planned.request)
        filed = Label(label.author, label.name, (*label.tags, *planned.tags), label.note)
        active = self._active = _Active(stream, RunSaver(self.store, stream.run, filed))
        active.saver.add([])
        yield Begun(index, stream.run)
        steps = iter(stream)
        shown = 0.0
        crash: str | None = None
        while not self._heard(stop):
            try:
                step = self.models.call(next, steps, None)
            except RedlineError as error:
                crash = str(error)
                break
            except Exception as error:
                log.exception("run %s failed", stream.run.id)
                crash = f"decoding failed: {type(error).__name__}: {first_line(error)}"
                break
            if step is None:
                break
            active.pending.append(step)
            if time.monotonic() - shown >= FRAME_S:
                yield self._hand_over(index, active)
                shown = time.monotonic()
        if active.pending:
            yield self._hand_over(index, active)
        self.models.call(stream.close)
        run = active.final()
        if crash is not None:
            run = run.replace(finish_reason=FinishReason.ERROR, error=run.error or crash)
        for saved in active.saver.finishing(run):
            if not saved:
                yield Waiting(f"saving again: {active.saver.problem}")
        self._active = None
        yield self._ended(index, run, active.saver)
        return run

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

    def _hand_over(self, index: int, active: _Active) -> Stepped:
        steps, active.pending = active.pending, []
        active.saver.add(steps)
        return Stepped(index, tuple(steps))

    def _ended(self, index: int, run: Run, saver: RunSaver) -> Ended:
        if saver.saved:
            return Ended(index, run)
        self.unsaved[run.id] = (run, saver.label)
        while len(self.unsaved) > UNSAVED_KEPT:
            self.unsaved.popitem(last=False)
        return Ended(index, run, saver.problem or "the database did not answer")

    def _conclude(
        self, plan: Sequence[Planned], ended: dict[int, Run], reasons: dict[int, str], *, stopped: bool
    ) -> Done:
        """Link the baseline to every run that it fits, and say why where there is none."""
        position = next((i for i, p in enumerate(plan) if p.role == "baseline"), None)
        baseline = ended.get(position) if position is not None else None
        if position is None:
            reason: str | None = "no baseline was asked for"
        elif baseline is None:
            reason = reasons.get(position, "it was not run")
        elif baseline.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            reason = "it was stopped" if baseline.finish_reason is FinishReason.CANCELLED else "it failed"
        else:
            reason = None
        runs = []
        for index, run in ended.items():
            if plan[index].role == "run" and baseline is not None and reason is None:
                misfit = baseline_fits(run, baseline)
                if misfit is None:
                    run = self._link(run, baseline)
                elif len(plan) == 2:
                    reason = misfit
            if plan[index].role == "run":
                runs.append(run)
        return Done(tuple(runs), baseline, reason, stopped)

    def _link(self, run: Run, baseline: Run) -> Run:
        if run.id not in self.unsaved and baseline.id not in self.unsaved:
            try:
                self.store.link_baseline(run.id, baseline.id)
            except RedlineError as error:
                log.warning("the baseline of %s could not be linked: %s", run.id, error)
        return run.replace(baseline_id=baseline.id)

    def save_again(self, run_id: str) -> str | None:
        """Try to save a run that could not be saved. None when it is safe now, else the reason."""
        found = self.unsaved.get(run_id)
        if found is None:
            return None
        saver = RunSaver(self.store, *found)
        saver.add(list(found[0].steps))
        if not saver.finish(found[0]):
            return saver.problem or "the database did not answer"
        self.unsaved.pop(run_id, None)
        return None

    # --- ending -----------------------------------------------------------------------------------------------

    def _heard(self, stop: threading.Event) -> bool:
        return stop.is_set() or self._closing.is_set()

    def _abandon(self, active: _Active) -> None:
        try:
            self._settle(active)
        finally:
            self._turn.release()

    def _settle(self, active: _Active) -> None:
        """Close and save what nobody watches any more."""
        try:
            self.models.call(active.stream.close)
            active.saver.add(active.pending)
            run = active.final()
            if not active.saver.finish(run):
                self.unsaved[run.id] = (run, active.saver.label)
        except Exception:
            log.exception("a run that was left could not be closed")
