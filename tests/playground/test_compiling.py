"""Compiling behind the runs, as the service drives it: never beside a plan, taken up between two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder.request import GenerationRequest
from playground.compiling import Compiling
from playground.events import Begun, Done
from playground.header import status_html
from playground.plans import plan_run
from playground.saving import Label
from playground.service import ModelService
from storage import Store, open_store
from tests.playground.fake_engine import FakeEngine, FakeStream, fake_load

REQUEST = GenerationRequest(prompt="Why is the sky blue?", proposer="ngram", k=3)


class Scripted(Compiling):
    """Nothing is missing; ``path`` changes when it is taken up."""

    def __init__(self, done: Callable[[], None]) -> None:
        super().__init__(done)
        self.ready = False
        self.path = "eager, fused"
        self.said = ""
        self.done = done

    @property
    def words(self) -> str:
        return self.said

    def missing(self) -> list[Any]:
        return []

    def take_up(self) -> bool:
        changed, self.ready = self.ready, False
        self.path = "compiled" if changed else self.path
        return changed


class PathEngine(FakeEngine):
    """Runs record the path of the moment."""

    compiling: Scripted

    def stream(self, request: GenerationRequest) -> FakeStream:
        stream = super().stream(request)
        note = {} if self.compiling.path == "compiled" else {"target_path_note": "there is no C++ compiler here"}
        versions = {"target_path": self.compiling.path, **note}
        stream._whole = stream._whole.replace(versions=versions)
        return stream


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as opened:
        yield opened


@pytest.fixture
def service(store: Store) -> Iterator[ModelService]:
    engine = PathEngine()
    made = ModelService(store, fake_load(engine), Scripted)
    engine.compiling = made.compiling  # type: ignore[assignment]
    made.compile_behind()
    yield made
    made.close()


def execute(service: ModelService, baseline: bool = True) -> Iterator[Any]:
    return iter(service.execute(plan_run(REQUEST, baseline=baseline), Label(author="Ada"), threading.Event()))


def path_of(event: Any) -> str:
    return str(event.run.versions["target_path"])


def test_nothing_is_compiled_while_a_plan_goes_on_however_it_ends(service: ModelService) -> None:
    builder = service.compiling.builder
    held = [builder._held for _ in execute(service)]
    assert set(held) == {1}
    assert builder._held == 0
    left = execute(service)
    next(event for event in left if isinstance(event, Begun))
    assert builder._held == 1
    left.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while builder._held:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert isinstance(list(execute(service))[-1], Done)


def test_loading_at_the_start_is_not_disturbed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made = ModelService(store, fake_load(FakeEngine()), Scripted)
    original = made.models.prepare
    monkeypatch.setattr(
        made.models, "prepare", lambda request: (seen.append(made.compiling.builder._held), original(request))[1]
    )
    made.preload(REQUEST).result()
    assert seen == [1]
    assert made.compiling.builder._held == 0
    made.close()


def test_what_was_compiled_is_used_from_the_next_plan_on(service: ModelService) -> None:
    compiling = service.compiling
    assert isinstance(compiling, Scripted)
    plan = execute(service)
    first = next(event for event in plan if isinstance(event, Begun))
    compiling.ready = True
    builder = threading.Thread(target=compiling.done)
    builder.start()
    rest = list(plan)
    # Run and baseline of one plan share a path, and so they can be compared.
    assert path_of(first) == "eager, fused"
    assert [path_of(event) for event in rest if isinstance(event, Begun)] == ["eager, fused"]
    assert rest[-1].no_baseline is None
    builder.join(timeout=20)
    assert compiling.path == "compiled"
    assert service.status.text == "smollm2-135m · bf16 · CPU · compiled"
    assert service.status.detail == ""
    assert [path_of(event) for event in execute(service) if isinstance(event, Begun)] == ["compiled", "compiled"]


def test_the_header_says_why_a_path_is_not_the_fastest_and_how_far_compiling_is(service: ModelService) -> None:
    service.preload(REQUEST).result()
    assert service.status.detail == "there is no C++ compiler here"
    compiling = service.compiling
    assert isinstance(compiling, Scripted)
    compiling.said = "compiling in the background, 2 of 5 steps ready"
    assert service.status.detail == compiling.said
    shown = status_html(service.status)
    assert "eager, fused" in shown
    assert "2 of 5 steps ready" in shown
    compiling.said = "<b>"
    assert "<b>" not in status_html(service.status)


def test_closing_does_not_wait_for_something_to_be_taken_up(service: ModelService) -> None:
    compiling = service.compiling
    assert isinstance(compiling, Scripted)
    plan = execute(service)
    next(event for event in plan if isinstance(event, Begun))
    builder = threading.Thread(target=compiling.done)
    builder.start()
    service._closing.set()
    builder.join(timeout=20)
    assert not builder.is_alive()
    assert compiling.path == "eager, fused"
    list(plan)


def test_without_a_model_in_memory_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "decoder.compiled", raising=False)
    one = Compiling(lambda: None)
    assert list(one.missing()) == []
    assert one.words == ""
    assert not one.take_up()
