"""How often a run is shown, and when the engine rests; what the page is told to watch while it streams."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoder.request import GenerationRequest
from decoder.trace import FinishReason
from playground import listening, service
from playground.events import Done, Stepped
from playground.pace import Pace, is_beside, pace_of
from playground.plans import plan_run
from playground.saving import Label
from playground.service import ModelService
from storage import open_store
from tests.playground.fake_engine import FakeEngine, fake_load


def test_only_an_engine_on_the_cpu_rests_and_only_for_a_browser_on_its_machine() -> None:
    assert pace_of("cuda:0", beside=True) == pace_of("mps", beside=False) == Pace()
    assert pace_of("cpu", beside=False).rest_s == 0
    assert 0 < pace_of("cpu", beside=True).rest_s < pace_of("cpu", beside=True).frame_s


@pytest.mark.parametrize(
    ("host", "beside"),
    [
        ("127.0.0.1", True),
        ("127.0.1.7", True),
        ("::1", True),
        ("10.0.0.5", False),
        ("testclient", False),
        (None, False),
    ],
)
def test_beside_is_an_address_of_this_machine(host: str | None, beside: bool) -> None:
    assert is_beside(SimpleNamespace(client=SimpleNamespace(host=host))) is beside
    assert not is_beside(SimpleNamespace(client=None))


def test_a_stop_is_heard_while_the_engine_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "pace_of", lambda device, beside: Pace(0.0, *((600.0, 600.0) if beside else ())))
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as store:
        made = ModelService(store, fake_load(FakeEngine()))
        stop = threading.Event()
        seen = []
        plan = plan_run(GenerationRequest(prompt="Why?", proposer="ngram"), baseline=False)
        for event in made.execute(plan, Label(), stop, beside=True):
            seen.append(event)
            if isinstance(event, Stepped):
                threading.Timer(0.2, stop.set).start()
        made.close()
        end = seen[-1]
        assert isinstance(end, Done)
        assert end.runs[0].finish_reason is FinishReason.CANCELLED
        assert store.get_run(end.runs[0].id).run.steps


def test_the_first_frame_gets_the_longest_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the page puts the last run away, which takes longer than a frame of this one."""
    assert pace_of("cpu", beside=True).first_rest_s > pace_of("cpu", beside=True).rest_s
    monkeypatch.setattr(service, "pace_of", lambda device, beside: Pace(0.0, 0.002, 0.003))
    waits: list[float | None] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(timeout)

    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as store:
        made = ModelService(store, fake_load(FakeEngine()))
        plan = plan_run(GenerationRequest(prompt="Why?", proposer="ngram"), baseline=True)
        frames = [e for e in made.execute(plan, Label(), Stop(), beside=True) if isinstance(e, Stepped)]
        made.close()
    firsts = [frame.steps[0].index == 0 for frame in frames]
    assert sum(firsts) == 2, "a run and its baseline"
    assert waits == [0.003 if first else 0.002 for first in firsts]


def test_no_event_shows_its_progress_on_a_component() -> None:
    """The page would copy that component with all that is in it at every message of a run that streams."""
    for kind in (listening.JS_ONLY, listening.QUICK, listening.LIGHT, listening.MODEL_WORK):
        assert kind["show_progress_on"] == []
