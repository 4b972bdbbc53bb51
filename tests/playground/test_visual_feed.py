"""The feed: append-only lines, small heads, numbers derived from the steps."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from decoder import metrics
from decoder.trace import Step, violations
from playground import feed
from tests.playground import visual_runs as vr

RUNS = {
    "sampled": vr.make_run(),
    "greedy": vr.make_run(temperature=0.0, accept=0.5),
    "ngram": vr.make_run(proposer="ngram"),
    "emoji": vr.emoji_run(),
    "hostile": vr.hostile_run(),
    "tree": vr.tree_run(),
    "quiet": vr.make_run(not_speculating="the draft does not fit"),
    "plain": vr.baseline_of(vr.make_run()),
}


def lines(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("name", RUNS)
def test_the_made_up_runs_are_sound(name: str) -> None:
    assert violations(RUNS[name]) == []


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_feed_is_begin_steps_end_and_keeps_every_step(name: str) -> None:
    run = RUNS[name]
    entries = lines(feed.whole(run, None, None, 5))
    assert [entry["type"] for entry in entries] == ["begin", *["step"] * len(run.steps), "end"]
    assert tuple(Step.from_json(entry["step"]) for entry in entries[1:-1]) == run.steps


def test_a_first_step_may_bring_the_times_of_the_prompt() -> None:
    step = vr.make_run().steps[0]
    assert json.loads(feed.step_line(step, (61.0, 71.5))) == {
        **json.loads(feed.step_line(step)),
        "prefill_ms": 61.0,
        "ttft_ms": 71.5,
    }


def test_a_line_holds_neither_a_tag_nor_a_second_line() -> None:
    text = feed.whole(RUNS["hostile"], {"name": "<b>\u2028</b>"}, None, 1)
    assert "<" not in text
    assert "\u2028" not in text
    assert lines(text)[0]["meta"]["name"] == "<b>\u2028</b>"


def test_the_head_is_small_and_says_what_is_shown() -> None:
    run = vr.make_run(prompt="word " * 5000)
    begin = lines(feed.begin_line(run, None, True, 3))[0]
    assert begin["seq"] == 3
    assert begin["live"] is True
    assert begin["meta"] is None
    assert not {"steps", "output_ids", "prompt_ids"} & set(begin["run"])
    assert len(begin["run"]["prompt_preview"]) == feed.PREVIEW_CHARS
    assert len(json.dumps(begin)) < 3000
    assert begin["run"]["request"]["sampling"]["temperature"] == 0.7
    assert begin["run"]["num_prompt_tokens"] == len(run.prompt_ids)


def test_meta_may_be_a_dataclass_with_times() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Meta:
        author: str
        created_at: datetime
        tags: tuple[str, ...]

    begin = lines(feed.begin_line(RUNS["greedy"], Meta("Ada", datetime(2026, 1, 2, tzinfo=UTC), ("x",)), False, 1))[0]
    assert begin["meta"] == {"author": "Ada", "created_at": "2026-01-02T00:00:00+00:00", "tags": ["x"]}


def test_numbers_are_derived_from_the_steps_and_not_taken_from_the_run() -> None:
    run = RUNS["sampled"].replace(metrics={"draft_acceptance_rate": 0.99, "not_speculating": None})
    end = lines(feed.end_line(run))[0]
    assert end["metrics"] == metrics.derive(run.steps)


def test_the_reason_for_not_speculating_is_kept() -> None:
    assert lines(feed.end_line(RUNS["quiet"]))[0]["metrics"]["not_speculating"] == "the draft does not fit"


def test_a_fitting_baseline_gives_the_verdict_and_a_lane() -> None:
    run = RUNS["sampled"]
    end = lines(feed.end_line(run, vr.baseline_of(run)))[0]
    verdict = metrics.break_even(run, vr.baseline_of(run))
    assert verdict is not None
    assert end["break_even"]["speedup"] == pytest.approx(verdict.speedup)
    assert end["no_baseline_reason"] is None
    lane = end["baseline"]
    assert lane["tokens"] == len(run.output_ids) == sum(n for _, n in lane["steps"])
    assert lane["steps"][0] == [71.0, 1]
    assert lane["steps"][-1][0] == pytest.approx(71.0 + vr.baseline_of(run).decode_ms, abs=0.5)


def test_without_a_fitting_baseline_there_is_a_reason_and_no_lane() -> None:
    run = RUNS["sampled"]
    other = vr.baseline_of(run).replace(device="cuda")
    cases = [
        (feed.end_line(run), "the same request was not run with the proposer off"),
        (feed.end_line(run, other), "the baseline does not fit: device differs"),
        (feed.end_line(run, None, "the baseline is being measured"), "the baseline is being measured"),
        (feed.end_line(RUNS["plain"]), "this run is a baseline itself: nothing drafts"),
    ]
    for text, reason in cases:
        end = lines(text)[0]
        assert (end["break_even"], end["baseline"], end["no_baseline_reason"]) == (None, None, reason)


def test_the_timeline_starts_at_the_first_token_and_sums_the_steps() -> None:
    run = RUNS["greedy"]
    points = feed.timeline(run)
    assert len(points) == len(run.steps)
    assert points[0] == [71.0, 1]
    assert points[-1][0] == pytest.approx(71.0 + run.decode_ms, abs=0.01)
    assert sum(int(n) for _, n in points) == len(run.output_ids)


def test_the_tail_of_a_short_feed_is_the_feed() -> None:
    text = feed.whole(RUNS["sampled"], None, None, 3)
    assert feed.tail(text) == text
    assert feed.tail("") == ""


def test_the_tail_of_a_long_feed_is_short_grows_by_lines_and_overlaps() -> None:
    run = vr.long_run(600)
    text, before, seen = feed.begin_line(run, None, True, 8), "", 0
    for step in run.steps:
        text += feed.step_line(step)
        part = feed.tail(text, limit=60_000)
        assert len(part) < 60_000 + 15_000 + 12_000
        if not part.startswith(before):
            entries = lines(part)
            assert entries[0]["type"] == "resume"
            assert entries[0]["seq"] == 8
            assert entries[1]["step"]["index"] <= seen, "a skipped update would lose a step"
        assert lines(part)[-1]["step"]["index"] == step.index
        before, seen = part, step.index
