"""The interleaved loop with variants that only take notes."""

from __future__ import annotations

from typing import Any

import pytest

from decoder.bench.measure import Case, Report, Sample, Variant, VariantName, interleave, turn_order
from decoder.bench.plan import BenchPlan, parse_numbers, parse_peer
from decoder.errors import RequestError
from decoder.request import GenerationRequest


class Noted(Variant):
    def __init__(self, name: str, log: list[Any], *, fails: str = "", only: str = "") -> None:
        super().__init__(VariantName("redline", name))
        self.log, self.fails, self.only = log, fails, only

    def start(self, report: Report) -> None:
        self.log.append(("start", self.name.proposer))
        if self.fails == "start":
            raise RequestError("it is\nnot here")

    def takes(self, case: Case) -> bool:
        return not self.only or case.id == self.only

    def measure(self, case: Case, repeat: int) -> Sample:
        self.log.append((self.name.proposer, case.id, repeat))
        if self.fails == f"{case.id}{repeat}":
            raise ValueError("broken")
        return Sample(self.name.key, case.suite, case.id, repeat, 1, 1.0, 1.0, 1.0)

    def stop(self) -> None:
        self.log.append(("stop", self.name.proposer))


def cases(*ids: str) -> list[Case]:
    return [Case("chat", i, GenerationRequest(i, max_new_tokens=50)) for i in ids]


def test_variants_take_turns_and_who_begins_moves_on() -> None:
    log: list[Any] = []
    samples, errors = interleave([Noted(n, log) for n in "abc"], cases("p", "q"), 2)
    assert errors == {}
    assert log[:6] == [("start", "a"), ("a", "p", -1), ("start", "b"), ("b", "p", -1), ("start", "c"), ("c", "p", -1)]
    measured = [entry for entry in log[6:] if len(entry) == 3]
    assert measured == [
        ("a", "p", 0), ("b", "p", 0), ("c", "p", 0),
        ("b", "q", 0), ("c", "q", 0), ("a", "q", 0),
        ("c", "p", 1), ("a", "p", 1), ("b", "p", 1),
        ("a", "q", 1), ("b", "q", 1), ("c", "q", 1),
    ]  # fmt: skip
    assert len(samples) == 12
    assert all(s.repeat >= 0 for s in samples)
    assert log[-3:] == [("stop", "a"), ("stop", "b"), ("stop", "c")]


def test_an_error_ends_one_variant_only() -> None:
    log: list[Any] = []
    variants = [Noted("a", log), Noted("b", log, fails="start"), Noted("c", log, fails="q0"), Noted("d", log, only="z")]
    samples, errors = interleave(variants, cases("p", "q"), 2)
    assert errors == {
        "redline/b": "it is not here",
        "redline/c": "ValueError: broken",
        "redline/d": "no prompt of these suites suits it",
    }
    assert [s.variant for s in samples].count("redline/a") == 4
    assert [s.variant for s in samples].count("redline/c") == 1


def test_a_variant_measures_only_what_it_takes() -> None:
    log: list[Any] = []
    samples, _ = interleave([Noted("a", log), Noted("b", log, only="q")], cases("p", "q"), 1)
    assert [(s.variant, s.prompt) for s in samples] == [("redline/a", "p"), ("redline/b", "q"), ("redline/a", "q")]


def test_an_interrupt_stops_what_was_started() -> None:
    log: list[Any] = []

    class Stopped(Noted):
        def measure(self, case: Case, repeat: int) -> Sample:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleave([Noted("a", log), Stopped("b", log)], cases("p"), 1)
    assert {("stop", "a"), ("stop", "b")} <= set(log)


def test_turn_order() -> None:
    assert turn_order(3, 0) == [0, 1, 2]
    assert turn_order(3, 4) == [1, 2, 0]
    assert turn_order(0, 4) == []


def test_numbers_and_peers() -> None:
    assert parse_numbers("-k", "1,2, 4,2") == (1, 2, 4)
    assert parse_numbers("--batch", "0") == ()
    with pytest.raises(RequestError, match="commas"):
        parse_numbers("-k", "1;2")
    assert parse_peer("vllm=/a/b=c") == ("vllm", "/a/b=c")
    with pytest.raises(RequestError, match="vllm=PYTHON"):
        parse_peer("vllm")


def test_a_plan_survives_json_and_a_quick_one_is_smaller() -> None:
    plan = BenchPlan(ks=(2, 8), peers=(("vllm", "/bin/sh"),), suites=("chat",))
    plan.validate()
    assert BenchPlan.from_json(plan.to_json()) == plan
    assert plan.their_k == 8
    quick = plan.quick()
    quick.validate()
    assert (quick.prompts, quick.repeats, quick.ks) == (1, 1, (8,))
    assert BenchPlan(batch=()).quick().batch == ()
