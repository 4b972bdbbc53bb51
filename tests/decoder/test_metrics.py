"""Metrics by hand-worked numbers."""

from __future__ import annotations

import pytest

from decoder.metrics import (
    acceptance,
    baseline_fits,
    best_k,
    break_even,
    derive,
    expected_speedup,
    expected_tokens,
    floor_ms,
    pool,
    timing,
)
from decoder.trace import DraftToken, Emitted, Run, Source, Step, Verdict

KINDS = {"a": Verdict.ACCEPTED, "r": Verdict.REJECTED, "u": Verdict.UNTESTED}


def step(index: int, verdicts: str = "", draft: float = 0.0, verify: float = 0.0, overhead: float = 0.0) -> Step:
    drafts = tuple(
        DraftToken(i, "x", i - 1 if i else None, 0.5, 0.5, 1.0, None, KINDS[v]) for i, v in enumerate(verdicts)
    )
    emitted = [Emitted(i, "x", Source.ACCEPTED, 0.5) for i, v in enumerate(verdicts) if v == "a"]
    own = Source.TARGET if not verdicts else Source.CORRECTED if "r" in verdicts else Source.BONUS
    emitted.append(Emitted(99, "y", own, 0.5))
    return Step(index, len(verdicts), drafts, tuple(emitted), (), draft, verify, overhead)


def run(steps: list[Step], **changes: object) -> Run:
    fields = {
        "id": "r1",
        "request": {"sampling": {"temperature": 0.0}, "max_new_tokens": 9},
        "target": "t",
        "proposer": "ngram",
        "draft": None,
        "k": 4,
        "seed": 0,
        "dtype": "float32",
        "device": "cpu",
        "versions": {},
        "fingerprint": "f",
        "prompt_ids": (1, 2),
        "steps": tuple(steps),
    }
    return Run(**{**fields, **changes})  # type: ignore[arg-type]


STEPS = [step(0), step(1, "aaaa"), step(2, "aruu"), step(3), step(4, "ruuu"), step(5, "aa")]


def test_acceptance_counts() -> None:
    a = acceptance(STEPS)
    assert (a.num_spec_steps, a.num_plain_steps) == (4, 1)
    assert (a.num_draft_tokens, a.num_accepted_draft_tokens) == (14, 7)
    assert (a.num_rejected_draft_tokens, a.num_untested_draft_tokens) == (2, 5)
    assert a.draft_acceptance_rate == 0.5
    assert a.mean_acceptance_length == 1 + 7 / 4
    assert a.acceptance_histogram == (1, 1, 1, 0, 1)
    assert a.acceptance_per_position == (3 / 4, 2 / 4, 1 / 4, 1 / 4)
    assert a.per_step_accepted == (4, 1, 0, 2)
    assert a.per_step_drafted == (4, 4, 4, 2)


def test_nothing_drafted_has_no_rate() -> None:
    a = acceptance([step(0), step(1)])
    assert a.draft_acceptance_rate is None
    assert a.mean_acceptance_length is None
    assert a.acceptance_histogram == ()


def test_the_prefills_token_is_no_decode_time() -> None:
    t = timing([step(0), step(1, "aa", 1, 8, 1), step(2, "ru", 2, 9, 1)])
    assert (t.num_decode_steps, t.num_decode_tokens, t.decode_ms) == (2, 4, 22)
    assert t.ms_per_token == 5.5
    assert t.tokens_per_second == pytest.approx(1000 / 5.5)
    assert t.tokens_per_step == 2


def test_derive_is_json() -> None:
    metrics = derive(STEPS, not_speculating=None)
    assert metrics["acceptance_histogram"] == [1, 1, 1, 0, 1]
    assert metrics["not_speculating"] is None
    assert derive([step(0)], not_speculating="why")["not_speculating"] == "why"


def test_pooled_rates_are_by_tokens_not_a_mean_of_means() -> None:
    long = run([step(0), *[step(i, "aaaa") for i in range(1, 10)]], id="long")
    short = run([step(0), step(1, "ruuu")], id="short")
    pooled = pool([long, short])
    assert pooled.pooled.draft_acceptance_rate == 36 / 40
    assert pooled.per_run == {"long": 1.0, "short": 0.0}


def plain(ms: float, n: int = 4, **changes: object) -> Run:
    return run([step(0), *[step(i, "", 0, ms, 0) for i in range(1, n)]], proposer="none", **{"id": "b", **changes})


def test_break_even_pays() -> None:
    fast = run([step(0), step(1, "aa", 5, 30, 1), step(2, "aa", 5, 30, 1)])
    even = break_even(fast, plain(23.8))
    assert even is not None
    assert even.pays
    assert even.blame is None
    assert even.ms_per_token == pytest.approx(12.0)
    assert even.speedup == pytest.approx(23.8 / 12)
    assert even.sentence == "Pays: 12.0 ms per token against 23.8 ms."


@pytest.mark.parametrize(
    ("spec", "blame"),
    [
        (step(1, "ar", 60, 30, 1), "draft"),
        (step(1, "ar", 2, 90, 1), "verify"),
        (step(1, "ar", 2, 26, 40), "overhead"),
        (step(1, "ru", 2, 25, 1), "acceptance"),
    ],
)
def test_break_even_says_which_term_is_to_blame(spec: Step, blame: str) -> None:
    even = break_even(run([step(0), spec]), plain(24.0))
    assert even is not None
    assert not even.pays
    assert even.blame == blame
    assert even.sentence.startswith("Does not pay")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": "other"}, "target"),
        ({"fingerprint": "g"}, "weights"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"device": "cuda"}, "device"),
        ({"prompt_ids": (1, 3)}, "prompt"),
        ({"request": {"sampling": {"temperature": 1.0}, "max_new_tokens": 9}}, "sampling"),
        ({"proposer": "ngram"}, "drafted"),
    ],
)
def test_only_a_baseline_with_everything_else_held_fixed_counts(changes: dict, reason: str) -> None:
    other = plain(20.0).replace(**changes)
    mine = run([step(0), step(1, "a", 1, 1, 1)])
    assert reason in (baseline_fits(mine, other) or "")
    assert break_even(mine, other) is None


def test_a_run_that_drafted_nothing_gets_no_verdict() -> None:
    idle = run([step(0), step(1, "", 1, 19, 0)])
    assert baseline_fits(idle, plain(20.0)) == "this run did not speculate"
    assert break_even(idle, plain(20.0)) is None


def test_stops_must_be_the_same_too() -> None:
    mine = run([step(0), step(1, "a", 1, 1, 1)])
    other = plain(20.0).replace(request={**mine.request, "stop": ["x"]})
    assert baseline_fits(mine, other) == "stop differs"


def test_no_baseline_no_number() -> None:
    assert break_even(run([step(0), step(1, "a", 1, 1, 1)]), None) is None


def test_the_papers_example() -> None:
    assert expected_tokens(0.7, 3) == pytest.approx(2.533)
    assert expected_speedup(0.7, 3, 0.2) == pytest.approx(1.583, abs=1e-3)
    assert expected_tokens(1.0, 4) == 5


def test_best_k_is_zero_when_nothing_pays() -> None:
    assert best_k(0.05, 10.0, {1: 25, 2: 26, 4: 28}, 1.0, 24.0) == (0, 24.0)
    k, ms = best_k(0.8, 1.0, {1: 25, 2: 26, 4: 28, 8: 60}, 1.0, 24.0)
    assert k == 4
    assert ms < 24


def test_the_floor_is_known_only_where_both_of_its_numbers_are() -> None:
    """269 MB at 28 GB/s are 9.6 ms; a run from elsewhere may hold anything."""
    known = {"target_bytes_per_token": "269030016", "read_bytes_per_second": "28000000000"}
    assert floor_ms(run([], versions=known)) == pytest.approx(9.608, abs=1e-3)
    assert floor_ms(run([])) is None
    for wrong in ("", "fast", "0", "-1", "nan", "inf"):
        for name in known:
            assert floor_ms(run([], versions={**known, name: wrong})) is None
