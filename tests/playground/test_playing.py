"""From a ticket to what the page shows: feed lines and sentences."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder.request import GenerationRequest
from playground.comparing import Progress, by_length, progress
from playground.plans import plan_comparison, plan_run
from playground.playing import Frame, Ticket, frames
from playground.saving import Label
from playground.service import ModelService
from storage import open_store
from tests.playground.fake_engine import FakeEngine, FakeStream, fake_load

REQUEST = GenerationRequest(prompt="Why is the sky blue?", proposer="ngram", k=3)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(tmp_path: Path, engine: FakeEngine) -> Iterator[ModelService]:
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as store:
        made = ModelService(store, fake_load(engine))
        yield made
        made.close()


def shown(service: ModelService, request: GenerationRequest, baseline: bool = True) -> list[Frame]:
    ticket = Ticket(tuple(plan_run(request, baseline=baseline)), Label())
    return list(frames(ticket, service.execute(ticket.plan, ticket.label, threading.Event())))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_feed_only_grows_and_ends_with_the_baseline(service: ModelService) -> None:
    found = shown(service, REQUEST)
    texts = [frame.feed for frame in found if frame.feed is not None]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    entries = lines(texts[-1])
    assert [e["type"] for e in entries[:2]] == ["begin", "step"]
    ends = [e for e in entries if e["type"] == "end"]
    assert len(ends) == 2
    assert ends[0]["no_baseline_reason"] == "the baseline is being measured"
    assert ends[1]["baseline"]["id"] == found[-1].baseline.id
    assert ends[1]["break_even"]["speedup"] > 0
    assert found[-1].finished
    assert found[-1].kind == "good"


def test_progress_is_said(service: ModelService, engine: FakeEngine) -> None:
    engine.delay = 0.01
    said = " | ".join(frame.text for frame in shown(service, REQUEST))
    assert "reading the prompt" in said
    assert "tokens" in said
    assert "measuring the baseline" in said


def test_an_error_is_shown_with_what_is_kept(service: ModelService, engine: FakeEngine) -> None:
    engine.crash_at = 2
    last = shown(service, REQUEST)[-1]
    assert last.kind == "error"
    assert "the matrix is singular" in last.text
    assert "tokens before it are kept" in last.text
    assert lines(last.feed or "")[-1]["type"] == "end"


def test_a_run_that_cannot_start_leaves_the_stage_alone(service: ModelService) -> None:
    last = shown(service, REQUEST.replace(target="missing"))[-1]
    assert last.feed is None
    assert last.kind == "error"
    assert last.finished


def test_the_first_step_of_a_live_feed_says_when_it_came(service: ModelService) -> None:
    entries = lines(shown(service, REQUEST)[-1].feed or "")
    steps = [entry for entry in entries if entry["type"] == "step"]
    assert entries[0]["run"]["ttft_ms"] == 0
    assert (steps[0]["prefill_ms"], steps[0]["ttft_ms"]) == (61.0, 71.0)
    assert all(set(step) == {"type", "step"} for step in steps[1:])


def test_run_and_baseline_both_show_a_frame_before_their_first_step(service: ModelService) -> None:
    ticket = Ticket(tuple(plan_run(REQUEST, baseline=True)), Label())
    told: list[str] = []

    def listen() -> Iterator[Any]:
        for event in service.execute(ticket.plan, ticket.label, threading.Event()):
            told.append(type(event).__name__)
            yield event

    before = [told[-1] for _ in frames(ticket, listen())]
    assert before.count("Begun") == 2


def test_an_internal_error_ends_the_page_with_a_sentence(
    service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStream, "close", lambda self: 1 / 0)
    last = shown(service, REQUEST)[-1]
    assert last.finished
    assert last.kind == "error"
    assert last.text == (
        "the run stopped on an internal error (ZeroDivisionError: division by zero); its steps are kept"
    )
    assert lines(last.feed or "")[-1]["type"] == "end"


def test_two_feeds_never_share_a_seq(service: ModelService) -> None:
    seqs = {lines(shown(service, REQUEST, baseline=False)[-1].feed or "")[0]["seq"] for _ in range(2)}
    assert len(seqs) == 2


def test_a_comparison_reports_its_share_and_ends_with_the_baseline_first(service: ModelService) -> None:
    plan = plan_comparison(by_length(REQUEST, (1, 4)))
    found: list[Progress] = list(progress(plan, service.execute(plan, Label(), threading.Event())))
    shares = [step.fraction for step in found if step.fraction is not None]
    assert shares == sorted(shares)
    assert found[-1].runs is not None
    assert [run.proposer for run in found[-1].runs] == ["none", "ngram", "ngram"]
    assert "done: 3 runs" in found[-1].text


def test_a_comparison_needs_something_that_drafts() -> None:
    with pytest.raises(ValueError, match="choose a proposer"):
        by_length(REQUEST.replace(proposer="none"), (1, 2))
