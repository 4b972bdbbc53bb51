"""The service keeps every run: ended, stopped, failed, abandoned, and with a database that is locked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder.request import GenerationRequest
from decoder.trace import FinishReason
from playground import saving
from playground.events import Begun, Done, Ended, Failed, Stepped, Waiting
from playground.plans import plan_comparison, plan_run
from playground.saving import Label
from playground.service import ModelService
from storage import DatabaseReadOnly, RunFilter, State, Store, open_store
from tests.playground.fake_engine import FakeEngine, FakeStream, fake_load

REQUEST = GenerationRequest(prompt="Why is the sky blue?", proposer="ngram", k=3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}", busy_timeout=0.2) as opened:
        yield opened


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(store: Store, engine: FakeEngine) -> Iterator[ModelService]:
    made = ModelService(store, fake_load(engine))
    yield made
    made.close()


def everything(service: ModelService, plan: Any, stop: threading.Event | None = None) -> list[Any]:
    return list(service.execute(plan, Label(author="Ada"), stop or threading.Event()))


def test_run_and_baseline_are_saved_and_linked(service: ModelService, store: Store) -> None:
    events = everything(service, plan_run(REQUEST, baseline=True))
    done = events[-1]
    assert isinstance(done, Done)
    assert done.no_baseline is None
    assert not done.stopped
    run = store.get_run(done.runs[0].id)
    assert run.meta.state is State.DONE
    assert run.meta.author == "Ada"
    assert run.run.baseline_id == done.baseline.id
    assert store.summaries(RunFilter(ids=[run.run.id])).rows[0].speedup is not None
    assert store.get_run(done.baseline.id).meta.tags == ("baseline",)
    steps = [step for event in events if isinstance(event, Stepped) and event.index == 0 for step in event.steps]
    assert tuple(steps) == run.run.steps


def test_without_a_baseline_the_reason_is_said(service: ModelService) -> None:
    assert everything(service, plan_run(REQUEST, baseline=False))[-1].no_baseline == "no baseline was asked for"
    assert len(plan_run(REQUEST.replace(proposer="none"), baseline=True)) == 1


def test_the_baseline_differs_in_nothing_but_the_proposer() -> None:
    request = GenerationRequest(prompt="x", proposer="prediction", prediction="y", k=7)
    raw, plain = request.to_json(), request.baseline().to_json()
    differing = {name for name in raw if raw[name] != plain[name]}
    assert differing <= {"proposer", "draft", "prediction", "exit_layer", "ngram_min", "ngram_max"}
    suffix = GenerationRequest(prompt="x", proposer="suffix", suffix_depth=9, suffix_factor=2.0, suffix_earlier=True)
    assert suffix.baseline() == GenerationRequest(prompt="x")


def test_earlier_runs_are_handed_over_only_where_they_are_asked_for(
    service: ModelService, store: Store, engine: FakeEngine
) -> None:
    suffix = REQUEST.replace(proposer="suffix")
    first = everything(service, plan_run(suffix, baseline=True))[-1].runs[0]
    assert engine.remembered == []
    plan = plan_comparison([("suffix", suffix.replace(suffix_earlier=True))])
    everything(service, plan)
    # The baseline of the same comparison has just written the same text: it is not an earlier run.
    assert engine.remembered == [[list(first.output_ids)] * 2]
    everything(service, plan_run(suffix.replace(suffix_earlier=True, target="another"), baseline=False))
    assert engine.remembered[-1] == []


def test_all_model_work_happens_on_one_thread(service: ModelService, engine: FakeEngine) -> None:
    everything(service, plan_run(REQUEST, baseline=True))
    names = {name for stream in engine.streams for name in stream.threads}
    assert len(names) == 1
    assert next(iter(names)).startswith("model")


def test_stop_keeps_the_steps(service: ModelService, store: Store, engine: FakeEngine) -> None:
    engine.delay = 0.02
    stop = threading.Event()
    events = []
    for event in service.execute(plan_run(REQUEST, baseline=True), Label(), stop):
        events.append(event)
        if isinstance(event, Stepped):
            stop.set()
    done = events[-1]
    assert done.stopped
    assert done.no_baseline == "it was stopped before its turn"
    stored = store.get_run(done.runs[0].id)
    assert stored.meta.state is State.STOPPED
    assert stored.run.finish_reason is FinishReason.CANCELLED
    assert 1 <= len(stored.run.steps) < 20


def test_a_closed_generator_leaves_a_stopped_run_and_frees_the_turn(
    service: ModelService, store: Store, engine: FakeEngine
) -> None:
    engine.delay = 0.02
    events = service.execute(plan_run(REQUEST, baseline=True), Label(), threading.Event())
    run_id = next(event.run.id for event in events if isinstance(event, Begun))
    next(event for event in events if isinstance(event, Stepped))
    events.close()
    deadline = time.monotonic() + 5
    while store.get_run(run_id).meta.state is State.RUNNING and time.monotonic() < deadline:
        time.sleep(0.02)
    stored = store.get_run(run_id)
    assert stored.meta.state is State.STOPPED
    assert stored.run.steps
    engine.delay = 0
    assert isinstance(everything(service, plan_run(REQUEST, baseline=False))[-1], Done)


def test_a_crash_keeps_the_steps_and_says_why(service: ModelService, store: Store, engine: FakeEngine) -> None:
    engine.crash_at = 3
    done = everything(service, plan_run(REQUEST, baseline=True))[-1]
    stored = store.get_run(done.runs[0].id)
    assert stored.meta.state is State.FAILED
    assert len(stored.run.steps) == 3
    assert "the matrix is singular" in (stored.run.error or "")
    assert done.no_baseline == "the run ended with an error"


class Broken(FakeStream):
    """A stream whose ``broken`` part ("run", "close" or "iter") raises after some steps."""

    broken = ""

    def close(self) -> None:
        if self.broken == "close":
            raise TypeError("close takes no prisoners\nand more")
        super().close()

    def __iter__(self) -> Iterator[Any]:
        if self.broken == "iter":
            raise TypeError("not to be iterated")
        return super().__iter__()

    @property
    def run(self) -> Any:
        if self.broken == "run" and self._shown:
            raise KeyError("run")
        return super().run


class BrokenEngine(FakeEngine):
    """Hands out broken streams; with "stream" it has none to hand out."""

    broken = ""

    def stream(self, request: GenerationRequest) -> FakeStream:
        made = super().stream(request)
        if request.prompt.startswith("One, two"):
            return made
        if self.broken == "stream":
            raise IndexError("no stream")
        stream = Broken(made._whole)
        stream.broken = self.broken
        return stream


@pytest.mark.parametrize("broken", ["run", "close", "iter"])
def test_whatever_is_raised_the_run_ends_and_is_kept(store: Store, broken: str) -> None:
    engine = BrokenEngine()
    engine.broken = broken
    service = ModelService(store, fake_load(engine))
    events = everything(service, plan_run(REQUEST, baseline=True))
    failed = next(e for e in events if isinstance(e, Failed))
    assert failed.sentence.startswith("the run stopped on an internal error (")
    assert failed.sentence.endswith("); its steps are kept")
    assert "and more" not in failed.sentence
    done = events[-1]
    assert isinstance(done, Done)
    stored = store.get_run(done.runs[0].id)
    assert stored.meta.state is State.FAILED
    assert stored.run == done.runs[0]
    assert "internal error" in (stored.run.error or "")
    handed_over = [step for e in events if isinstance(e, Stepped) and e.index == 0 for step in e.steps]
    assert tuple(handed_over) == stored.run.steps
    assert bool(stored.run.steps) is (broken != "iter")
    assert service._active is None
    engine.broken = ""
    assert isinstance(everything(service, plan_run(REQUEST, baseline=True))[-1].baseline.id, str)
    service.close()


def test_an_engine_that_breaks_before_the_first_step_is_said(store: Store) -> None:
    engine = BrokenEngine()
    engine.broken = "stream"
    service = ModelService(store, fake_load(engine))
    events = everything(service, plan_run(REQUEST, baseline=True))
    assert [e.sentence for e in events if isinstance(e, Failed)] == [
        "the run stopped on an internal error (IndexError: no stream)"
    ]
    assert isinstance(events[-1], Done)
    service.close()


def test_the_times_of_the_first_token_come_with_the_first_step(service: ModelService) -> None:
    events = everything(service, plan_run(REQUEST, baseline=True))
    assert next(e for e in events if isinstance(e, Begun)).run.ttft_ms == 0
    for index in (0, 1):
        first, *rest = [e for e in events if isinstance(e, Stepped) and e.index == index]
        assert first.prefill == (61.0, 71.0)
        assert all(e.prefill is None for e in rest)


def test_a_visitor_who_waits_is_busy_until_the_end(service: ModelService, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = service.begin("me")
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    assert service.is_busy("me")
    assert service.begin("me") is stop, "a second click must not take the first one's stop signal away"
    assert service.signal("me") is stop
    service.stop("me")
    assert stop.is_set()
    assert service.is_busy("me")
    service.end("me")
    assert not service.is_busy("me")


def test_an_error_of_the_engine_is_stored(service: ModelService, store: Store, engine: FakeEngine) -> None:
    engine.error_at_end = "the target's logits are not numbers"
    done = everything(service, plan_run(REQUEST, baseline=False))[-1]
    assert store.get_run(done.runs[0].id).run.error == "the target's logits are not numbers"


def test_what_cannot_start_fails_with_its_sentence(service: ModelService, store: Store) -> None:
    events = everything(service, plan_run(REQUEST.replace(target="missing"), baseline=True))
    assert [e.sentence for e in events if isinstance(e, Failed)] == [
        "missing is neither a named target, nor a folder, nor a Hugging Face id"
    ]
    assert service.status.state == "failed"
    long = everything(service, plan_run(REQUEST.replace(prompt="too long"), baseline=True))
    assert "shorten it by 809 tokens" in next(e.sentence for e in long if isinstance(e, Failed))
    assert store.summaries(RunFilter(archived=None)).total == 0


def test_loading_is_visible(store: Store, engine: FakeEngine) -> None:
    service = ModelService(store, fake_load(engine, delay=0.6))
    waits = [e for e in everything(service, plan_run(REQUEST, baseline=False)) if isinstance(e, Waiting)]
    assert any("loading smollm2-135m" in wait.message for wait in waits)
    assert service.status.state == "ready"
    assert service.status.text == "smollm2-135m · bf16 · CPU"
    service.close()


def test_a_failed_preload_is_a_status(store: Store, engine: FakeEngine) -> None:
    service = ModelService(store, fake_load(engine))
    service.preload(REQUEST.replace(target="missing", proposer="none")).result(timeout=5)
    assert service.status.state == "failed"
    assert "neither a named target" in service.status.text
    service.close()


def test_a_comparison_runs_one_baseline_first(service: ModelService, store: Store) -> None:
    plan = plan_comparison([(f"k = {k}", REQUEST.replace(k=k)) for k in (1, 2, 4)])
    assert [p.role for p in plan] == ["baseline", "run", "run", "run"]
    done = everything(service, plan)[-1]
    assert [run.k for run in done.runs] == [1, 2, 4]
    assert {store.get_run(run.id).run.baseline_id for run in done.runs} == {done.baseline.id}


def test_a_comparison_goes_on_after_one_that_cannot_run(service: ModelService) -> None:
    plan = plan_comparison([("bad", REQUEST.replace(target="missing")), ("good", REQUEST)])
    events = everything(service, plan)
    assert sum(isinstance(e, Failed) for e in events) == 2  # the baseline takes the first one's target
    assert len(events[-1].runs) == 1


class Locked:
    """A store that refuses to write for a while."""

    def __init__(self, store: Store, times: int) -> None:
        self._store = store
        self.left = times

    def start_run(self, *args: Any, **kwargs: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise DatabaseReadOnly("the database may only be read")
        return self._store.start_run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_database_that_recovers_loses_nothing(store: Store, engine: FakeEngine) -> None:
    service = ModelService(Locked(store, 3), fake_load(engine))  # type: ignore[arg-type]
    done = everything(service, plan_run(REQUEST, baseline=False))[-1]
    assert store.get_run(done.runs[0].id).run.steps == done.runs[0].steps
    assert not service.unsaved
    service.close()


def test_a_run_that_cannot_be_saved_is_kept_and_saved_later(
    store: Store, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "FINAL_TRIES_S", (0.0, 0.01))
    locked = Locked(store, 10_000)
    service = ModelService(locked, fake_load(engine))  # type: ignore[arg-type]
    events = everything(service, plan_run(REQUEST, baseline=False))
    ended = next(e for e in events if isinstance(e, Ended))
    assert ended.unsaved == "the database may only be read"
    assert any(isinstance(e, Waiting) and "saving again" in e.message for e in events)
    run_id = ended.run.id
    assert service.save_again(run_id) == "the database may only be read"
    locked.left = 0
    assert service.save_again(run_id) is None
    assert store.get_run(run_id).run.steps == ended.run.steps
    assert run_id not in service.unsaved
    service.close()


def test_two_visitors_take_turns(service: ModelService, engine: FakeEngine) -> None:
    engine.delay = 0.02
    first = service.execute(plan_run(REQUEST, baseline=False), Label(), threading.Event())
    next(event for event in first if isinstance(event, Stepped))
    second = service.execute(plan_run(REQUEST, baseline=False), Label(), threading.Event())
    assert next(second) == Waiting("waiting for another run to end")
    first.close()
    engine.delay = 0
    assert isinstance(list(second)[-1], Done)


def test_closing_the_service_saves_what_is_going_on(store: Store, engine: FakeEngine) -> None:
    engine.delay = 0.02
    service = ModelService(store, fake_load(engine))
    events = service.execute(plan_run(REQUEST, baseline=True), Label(), threading.Event())
    run_id = next(event.run.id for event in events if isinstance(event, Begun))
    next(event for event in events if isinstance(event, Stepped))
    thread = threading.Thread(target=list, args=(events,))
    thread.start()
    service.close()
    thread.join(timeout=5)
    assert store.get_run(run_id).meta.state is State.STOPPED


def test_what_waits_can_be_stopped_and_a_double_click_is_heard_once(service: ModelService, store: Store) -> None:
    assert not service.is_busy("me")
    service.begin("me")
    assert service.is_busy("me")
    assert service.stop("me")
    done = everything(service, plan_run(REQUEST, baseline=True), service.signal("me"))[-1]
    assert done.stopped
    assert done.runs == ()
    assert store.summaries(RunFilter(archived=None)).total == 0
    assert service.is_busy("me")
    service.end("me")
    assert not service.is_busy("me")
    assert not service.stop("me")
