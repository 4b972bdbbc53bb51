"""Ratios and rows from samples, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from decoder.bench.batches import BatchSample, batch_rows
from decoder.bench.floor import Floor
from decoder.bench.goals import Goal, goals
from decoder.bench.measure import Sample
from decoder.bench.memory import Memory, measure_memory
from decoder.bench.plan import BenchPlan
from decoder.bench.result import BenchResult
from decoder.bench.summary import ALL, OUR_PLAIN, THEIR_PLAIN, Spread, ratio, rows, spread
from decoder.bench.widths import Width


def sample(variant: str, prompt: str, tokens: int, ms: float, *, suite: str = "chat", **more: float) -> Sample:
    values = {"repeat": 0, "wall_ms": 2 * ms, "ttft_ms": 1.0, **more}
    return Sample(variant=variant, suite=suite, prompt=prompt, tokens=tokens, decode_ms=ms, **values)  # type: ignore[arg-type]


def test_a_ratio_is_pooled_and_its_spread_is_over_prompts() -> None:
    base = [sample("b", "p", 10, 1000), sample("b", "q", 30, 1000), sample("b", "r", 10, 1000)]
    ours = [sample("a", "p", 10, 500), sample("a", "q", 30, 250), sample("a", "r", 10, 1000)]
    found = ratio(ours, base)
    assert found is not None
    # 50 tokens in 1750 ms against 50 in 3000 ms; prompts alone: 2, 4, 1.
    assert found.pooled == pytest.approx(3000 / 1750)
    assert (found.low, found.median, found.high, found.prompts) == (1.5, 2.0, 3.0, 3)


def test_a_ratio_pools_repeats_before_it_compares_prompts() -> None:
    base = [sample("b", "p", 10, 100), sample("b", "p", 10, 300)]
    ours = [sample("a", "p", 20, 100), sample("a", "p", 20, 100)]
    found = ratio(ours, base)
    assert found is not None
    # 40 / 200 against 20 / 400.
    assert found.pooled == found.median == pytest.approx(4.0)


def test_a_ratio_is_over_prompts_that_both_decoded() -> None:
    base = [sample("b", "p", 10, 100), sample("b", "q", 10, 9999)]
    ours = [sample("a", "p", 10, 50), sample("a", "z", 10, 1), sample("a", "q", 0, 0)]
    found = ratio(ours, base)
    assert found is not None
    assert (found.pooled, found.prompts) == (pytest.approx(2.0), 1)
    assert ratio([], base) is None
    assert ratio([sample("a", "q", 0, 0)], base) is None


def test_spread() -> None:
    assert spread([]) is None
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)


def ours(prompt: str, tokens: int, ms: float, suite: str = "chat") -> Sample:
    return sample(
        "redline/ngram/4", prompt, tokens, ms, suite=suite, rounds=10, draft_ms=10.0, verify_ms=80.0, overhead_ms=10.0,
        spec_steps=4, drafted=16, accepted=6,
    )  # fmt: skip


def test_rows_by_suite_and_over_all() -> None:
    samples = [
        sample(OUR_PLAIN, "p", 10, 200),
        sample(THEIR_PLAIN, "p", 10, 400),
        ours("p", 20, 100),
        sample(OUR_PLAIN, "q", 10, 200, suite="edit"),
        ours("q", 10, 100, "edit"),
    ]
    names = [THEIR_PLAIN, OUR_PLAIN, "redline/ngram/4", "vllm/plain"]
    found = rows(samples, names, {"vllm/plain": "it is not here"}, ["chat", "edit"], floor_ms=2.5)
    keys = [(row.suite, row.variant) for row in found]
    assert keys == [
        ("chat", THEIR_PLAIN),
        ("chat", OUR_PLAIN),
        ("chat", "redline/ngram/4"),
        ("edit", OUR_PLAIN),
        ("edit", "redline/ngram/4"),
        (ALL, THEIR_PLAIN),
        (ALL, OUR_PLAIN),
        (ALL, "redline/ngram/4"),
        (ALL, "vllm/plain"),
    ]
    row = found[7]
    assert row.prompts == 2
    assert row.tokens_per_second == pytest.approx(150.0)
    assert row.wall_tokens_per_second == pytest.approx(75.0)
    assert row.ms_per_token == pytest.approx(200 / 30)
    assert row.vs_plain is not None
    assert row.vs_plain.pooled == pytest.approx((30 / 200) / (20 / 400))
    assert row.vs_transformers is not None
    assert row.vs_transformers.pooled == pytest.approx((20 / 100) / (10 / 400))
    assert row.draft_acceptance_rate == pytest.approx(12 / 32)
    assert row.mean_acceptance_length == pytest.approx(1 + 12 / 8)
    assert row.tokens_per_step == pytest.approx(30 / 20)
    assert (row.draft_ms, row.verify_ms, row.overhead_ms) == (1.0, 8.0, 1.0)
    assert row.overhead_share == pytest.approx(0.1)
    assert row.floor_times == pytest.approx((200 / 30) / 2.5)
    # What transformers does not tell is absent, not 0.
    assert found[5].draft_ms is None
    assert found[5].draft_acceptance_rate is None
    assert found[8].error == "it is not here"
    assert found[8].tokens_per_second is None


def test_batch_rows_compare_the_same_number_of_rows() -> None:
    samples = [
        BatchSample(OUR_PLAIN, 1, 0, 10, 100, 110, 1.0),
        BatchSample(OUR_PLAIN, 4, 0, 40, 200, 250, 4.0),
        BatchSample(OUR_PLAIN, 4, 1, 40, 200, 250, 3.0),
        BatchSample("redline/ngram/4", 4, 0, 40, 100, 125, 2.0),
        BatchSample("redline/ngram/4", 4, 1, 40, 300, 375, 2.0),
    ]
    found = batch_rows(samples, {("redline/ngram/4", 1): "no"})
    assert [(r.batch, r.variant) for r in found] == [
        (1, OUR_PLAIN), (1, "redline/ngram/4"), (4, OUR_PLAIN), (4, "redline/ngram/4"),
    ]  # fmt: skip
    assert found[1].error == "no"
    assert found[1].speedup is None
    assert found[2].tokens_per_second == pytest.approx(200.0)
    assert found[2].rows_alive == pytest.approx(3.5)
    assert found[3].speedup == pytest.approx(1.0)
    assert found[3].spread is not None
    assert (found[3].spread.low, found[3].spread.high) == (pytest.approx(1.0), pytest.approx(5 / 3))


def test_memory_is_read_after_the_fifth_run_and_after_the_last() -> None:
    done: list[int] = []
    readings = []

    def read() -> int:
        readings.append(len(done))
        return 100_000_000 + 1_000_000 * len(done)

    found = measure_memory(done.append, 12, read=read)
    assert readings == [5, 12]
    assert found == Memory(12, 105.0, 112.0)
    assert found.ratio == pytest.approx(112 / 105)


def test_the_floor_is_bytes_over_bandwidth() -> None:
    floor = Floor(270_000_000, 27e9, 2, "sum", 1)
    assert floor.ms == pytest.approx(10.0)
    assert Floor.from_json(floor.to_json()) == floor


def result(**changes: object) -> BenchResult:
    samples = (
        sample(OUR_PLAIN, "p", 10, 200, draft_ms=0.0, verify_ms=192.0, overhead_ms=8.0, rounds=10),
        sample(THEIR_PLAIN, "p", 10, 400),
        ours("p", 20, 100),
        sample("transformers/prompt lookup/4", "p", 10, 100),
        ours("q", 30, 100, "edit"),
        sample("transformers/prompt lookup/4", "q", 10, 100, suite="edit"),
    )
    values = {
        "plan": BenchPlan(suites=("chat", "edit"), peers=(("vllm", "/bin/python"),)),
        "created": "2030-01-02T03:04:05Z",
        "machine": {"device": "cpu", "device_name": "a machine", "cores": 2, "threads": 2, "dtype": "bfloat16",
                    "torch": "2", "transformers": "5"},
        "variants": (THEIR_PLAIN, "transformers/prompt lookup/4", OUR_PLAIN, "redline/ngram/4", "vllm/plain"),
        "samples": samples,
        "errors": {"vllm/plain": "it is not here"},
        "floor": Floor(100_000_000, 1e10, 2, "sum", 1 << 29),
        "widths": (
            Width(1, Spread(10, 9, 11, 5), None, 1.0), Width(5, Spread(12, 11, 13, 5), Spread(9, 9, 9, 5), 1.2),
        ),
        "batches": (BatchSample(OUR_PLAIN, 2, 0, 10, 100, 110, 2.0),),
        "batch_errors": {("redline/ngram/4", 2): "no | pipe"},
        "memory": Memory(200, 100.0, 102.0),
        **changes,
    }  # fmt: skip
    return BenchResult(**values)  # type: ignore[arg-type]


def test_goals_are_set_beside_what_was_measured() -> None:
    found = {g.what: g for g in goals(result())}
    assert found["our plain / transformers plain"].measured == pytest.approx(2.0)
    assert found["our plain / transformers plain"].verdict == "at least"
    assert found["our plain ms per token / floor"].measured == pytest.approx(2.0)
    assert found["verify 5 tokens / decode 1 token"].verdict == "at least"
    # Edit prompts only: 30 tokens in 100 ms against 10.
    assert found["our n-gram / transformers prompt lookup, edit"].measured == pytest.approx(3.0)
    assert found["our n-gram / transformers prompt lookup, edit"].verdict == "goal"
    assert found[f"overhead share of a step, {OUR_PLAIN}"].measured == pytest.approx(0.04)
    assert found["memory after 200 runs / after 5"].verdict == "at least"
    # What was not measured has no line.
    assert not any("early exit" in what for what in found)


@pytest.mark.parametrize(("value", "verdict"), [(1.2, "goal"), (1.5, "at least"), (2.5, "missed")])
def test_lower_is_better_where_it_is(value: float, verdict: str) -> None:
    assert Goal("x", value, 1.3, 2.0, False).verdict == verdict
