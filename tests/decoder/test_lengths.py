"""Draft length policies as pure functions: what they choose from what they were told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.lengths import Lengths, MovingAverage, Round
from decoder.lengths_auto import Acceptance, Auto, Costs, Estimate
from decoder.request import GenerationRequest

# --- moving average ---------------------------------------------------------------------------------------------------


def rounds(policy: MovingAverage, accepted: Callable[[int], int], n: int) -> list[int]:
    """The lengths that ``policy`` chooses in ``n`` rounds of which ``accepted(k)`` tokens are kept."""
    ks = []
    for _ in range(n):
        k = policy.choose().k
        ks.append(k)
        policy.observe(Round(k, k, min(k, accepted(k))))
    return ks


def test_the_average_climbs_tier_by_tier_while_everything_is_kept() -> None:
    ks = rounds(MovingAverage(32), lambda k: k, 80)
    assert ks[0] == 4
    assert ks[-1] == 32
    assert [k for k, before in zip(ks[1:], ks, strict=False) if k != before] == [8, 16, 32]


def test_the_average_falls_to_one_while_nothing_is_kept_and_comes_back() -> None:
    policy = MovingAverage(8)
    ks = rounds(policy, lambda k: 0, 60)
    assert ks[-1] == 1
    assert 0 not in ks
    assert rounds(policy, lambda k: k, 60)[-1] == 8


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4, 5, 8])
def test_a_steady_acceptance_never_swings(kept: int) -> None:
    """Hysteresis: after it has found its tier it stays there."""
    ks = rounds(MovingAverage(16), lambda k: kept, 200)
    assert len(set(ks[60:])) == 1


def test_a_change_of_tier_takes_a_few_rounds() -> None:
    ks = rounds(MovingAverage(32), lambda k: k, 60)
    stays = [ks.count(k) for k in (4, 8, 16)]
    assert min(stays) >= MovingAverage.SETTLE


@pytest.mark.parametrize(("k", "tiers"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (32, [1, 2, 4, 8, 16, 32])])
def test_k_is_the_highest_tier(k: int, tiers: list[int]) -> None:
    policy = MovingAverage(k)
    assert policy.tiers == tiers
    assert max(rounds(policy, lambda n: n, 100)) == k


def test_rounds_that_drafted_nothing_or_were_cut_short_change_no_tier() -> None:
    policy = MovingAverage(8)
    for _ in range(50):
        policy.observe(Round(4, 0, 0))
    assert policy.average == MovingAverage(8).average
    for _ in range(50):
        policy.observe(Round(1, 1, 0))
    assert policy.choose().k == 4


# --- estimates --------------------------------------------------------------------------------------------------------


def test_an_estimate_forgives_a_cold_start_and_a_pause() -> None:
    cold = Estimate()
    cold.add(500.0)
    cold.add(10.0)
    assert cold.value == 10.0
    steady = Estimate()
    for _ in range(20):
        steady.add(10.0)
    steady.add(10_000.0)
    assert steady.value == pytest.approx(10 + 0.25 * (30 - 10))


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs()
    for k, width, times in [(0, 1, (0.0, 10.0, 1.0)), (4, 5, (8.0, 14.0, 1.0))]:
        for _ in range(3):
            costs.observe(1, k, width, times)
    assert costs.draft_ms(2) == pytest.approx(4.0)
    assert costs.draft_ms(8) == pytest.approx(16.0)
    assert costs.verify_ms(3) == pytest.approx(12.0)
    assert costs.verify_ms(9) == pytest.approx(18.0)
    assert costs.round_ms(0, 0.0) == pytest.approx(11.0)
    assert costs.round_ms(4, 0.0) == pytest.approx(8 + 14 + 1)
    # Half of the rounds find nothing: they verify one token.
    assert costs.round_ms(4, 0.5) == pytest.approx(8 + 12 + 1)


def test_drafting_that_had_to_catch_up_does_not_count() -> None:
    costs = Costs()
    costs.observe(1, 4, 5, (900.0, 14.0, 1.0), draft_counts=False)
    costs.observe(1, 4, 5, (8.0, 14.0, 1.0))
    assert costs.draft_ms(4) == pytest.approx(8.0)


def test_rows_that_leave_make_all_estimates_cheaper() -> None:
    costs = Costs()
    for _ in range(3):
        costs.observe(8, 0, 1, (0.0, 40.0, 1.0))
        costs.observe(8, 4, 5, (16.0, 80.0, 1.0))
    costs.observe(2, 0, 1, (0.0, 20.0, 1.0))
    assert costs.verify_ms(5) == pytest.approx(40.0)
    assert costs.draft_ms(4) == pytest.approx(8.0)


def test_a_trees_width_is_remembered_for_its_depth() -> None:
    costs = Costs()
    costs.observe(1, 0, 1, (0.0, 10.0, 0.0))
    costs.observe(1, 3, 17, (2.0, 30.0, 0.0))
    costs.observe(1, 3, 17, (2.0, 30.0, 0.0))
    assert costs.round_ms(3, 0.0) == pytest.approx(32.0)


def test_acceptance_per_position() -> None:
    chance = Acceptance()
    assert chance.expected(2) == pytest.approx([1.0, 1.7, 1.7 + 0.49])
    for _ in range(200):
        chance.observe(4, 2)
    one, two, three, four = (b - a for a, b in zip(chance.expected(4), chance.expected(4)[1:], strict=False))
    assert one > 0.96
    assert two > 0.95
    # The third draft was tested and refused each time; the fourth was never tested.
    assert three < 0.12
    assert four < three
    before = chance.expected(4)
    for _ in range(200):
        chance.observe(0, 0)
    assert chance.empty > 0.99
    assert chance.expected(4)[4] < 1.02 < before[4]


# --- auto -------------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What a round truly costs, and how likely each draft is kept."""

    alpha: float
    draft: float
    verify: float = 10.0
    per_token: float = 0.2
    overhead: float = 0.5
    empty: float = 0.0

    def round_ms(self, k: int) -> tuple[float, float, float]:
        return (k * self.draft, self.verify + self.per_token * k, self.overhead)

    def per_token_ms(self, k: int) -> float:
        full, nothing = sum(self.round_ms(k)), k * self.draft + self.verify + self.overhead
        tokens = 1 + (1 - self.empty) * sum(self.alpha**j for j in range(1, k + 1))
        return ((1 - self.empty) * full + self.empty * nothing) / tokens


def play(auto: Auto, world: World, most: int, n: int, seed: int = 0) -> list[int]:
    """``n`` rounds of one row; the lengths that were asked for."""
    rng = random.Random(seed)
    ks = []
    for at in range(n):
        choice = auto.choose({0: most})
        assert choice is not None
        k, reason = choice
        assert 0 <= k <= most
        assert reason
        ks.append(k)
        drafted = 0 if rng.random() < world.empty else k
        accepted = 0
        while accepted < drafted and rng.random() < world.alpha:
            accepted += 1
        draft, _, overhead = world.round_ms(k)
        # The first round is cold and takes in the prompt; later ones scatter.
        cold = 4 if at == 0 else 1
        verify = cold * world.round_ms(drafted)[1] * rng.uniform(0.97, 1.03)
        auto.observe({0: (drafted, accepted)}, k, drafted + 1, (draft + 50 * (cold - 1), verify, overhead))
    return ks


@pytest.mark.parametrize(
    "world",
    [
        World(alpha=0.95, draft=0.3),
        World(alpha=0.8, draft=1.0),
        World(alpha=0.7, draft=2.0),
        World(alpha=0.5, draft=3.0),
        World(alpha=0.6, draft=0.02, empty=0.8),
        World(alpha=0.2, draft=4.0),
        World(alpha=0.05, draft=1.0, per_token=3.0),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_auto_comes_near_the_best_length(world: World, seed: int) -> None:
    """What it settles on takes at most a tenth more per token than the true best, and never more than plain decoding
    by more than its tries."""
    most = 16
    ks = play(Auto({0: most}, Costs()), world, most, 400, seed)
    best = min(world.per_token_ms(k) for k in range(most + 1))
    settled = ks[100:]
    usual = max(set(settled), key=settled.count)
    assert world.per_token_ms(usual) < 1.1 * best
    spent = sum(sum(world.round_ms(k)) for k in settled)
    gained = sum(sum(world.round_ms(k)) / world.per_token_ms(k) for k in settled)
    assert spent / gained < 1.15 * best


def test_auto_decodes_plainly_when_nothing_pays_and_tries_again_ever_more_rarely() -> None:
    ks = play(Auto({0: 8}, Costs()), World(alpha=0.02, draft=5.0), 8, 600)
    assert sum(k == 0 for k in ks[20:]) > 0.93 * len(ks[20:])
    tries = [i for i in range(20, 600) if ks[i] and not ks[i - 1]]
    assert len(tries) >= 3
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)


def test_auto_comes_back_when_drafts_begin_to_pay() -> None:
    auto = Auto({0: 8}, Costs())
    play(auto, World(alpha=0.02, draft=2.0), 8, 150)
    ks = play(auto, World(alpha=0.95, draft=0.5), 8, 300)
    assert sum(k >= 4 for k in ks[-100:]) > 80


def test_auto_gives_up_when_drafts_cease_to_pay() -> None:
    auto = Auto({0: 8}, Costs())
    assert max(play(auto, World(alpha=0.95, draft=0.5), 8, 100)[-20:]) == 8
    ks = play(auto, World(alpha=0.02, draft=3.0), 8, 150)
    assert sum(k == 0 for k in ks[-50:]) > 40


def test_rows_of_a_batch_decide_together() -> None:
    """One row's drafts are kept, the other's are not: what counts is the tokens of both for the time of the round."""
    auto = Auto({0: 8, 1: 8}, Costs())
    ks = []
    for _ in range(60):
        k, _ = auto.choose({0: 8, 1: 8}) or (0, "")
        ks.append(k)
        auto.observe({0: (k, k), 1: (k, 0)}, k, k + 1, (0.2 * k, 10 + 0.1 * k, 0.5))
    assert ks[30:].count(8) > 25
    assert set(auto.per_token(8, [0, 1])) == {0, 1, 2, 3, 4, 5, 6, 8}
    assert auto.per_token(8, [1])[8] > auto.per_token(8, [0])[8]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_auto_survives_any_times(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 32))
    auto = Auto({0: most}, Costs())
    ms = st.sampled_from([0.0, 1e-9, 0.1, 3.0, 1e6])
    for _ in range(40):
        room = data.draw(st.integers(0, most))
        k, _ = auto.choose({0: room}) or (0, "")
        k = min(k, room)
        drafted = data.draw(st.integers(0, k))
        accepted = data.draw(st.integers(0, drafted))
        auto.observe({0: (drafted, accepted)}, k, drafted + 1, (data.draw(ms), data.draw(ms), data.draw(ms)))


# --- all rows ---------------------------------------------------------------------------------------------------------


def asked(**changes: object) -> GenerationRequest:
    return GenerationRequest("x", proposer="draft-model").replace(**changes)


def test_nobody_drafts_what_could_not_be_written_any_more() -> None:
    for policy in ("fixed", "confidence", "moving-average", "auto"):
        lengths = Lengths([asked(k=8, draft_length=policy)])
        assert lengths.choose({0: 100})[0].k >= 1
        for left, k in ((3, 2), (2, 1), (1, 0)):
            choice = lengths.choose({0: left})[0]
            assert choice.k <= k
            if policy == "fixed":
                assert (choice.k, choice.reason) == (k, f"only {left} more token{'s' if k else ''} may be written")


def test_a_fixed_length_needs_no_reason() -> None:
    assert Lengths([asked(k=8)]).choose({0: 100})[0].reason is None


def test_each_row_keeps_to_its_own_policy_and_its_own_most() -> None:
    lengths = Lengths(
        [
            asked(k=3),
            asked(k=2, draft_length="auto"),
            asked(k=16, draft_length="auto"),
            asked(k=16, draft_length="moving-average"),
        ]
    )
    chosen = lengths.choose(dict.fromkeys(range(4), 50))
    assert [chosen[i].k for i in range(4)] == [3, 2, 4, 4]
    chosen = lengths.choose({1: 50, 3: 50})
    assert set(chosen) == {1, 3}
