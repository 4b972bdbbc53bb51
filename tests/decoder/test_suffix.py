"""Suffix decoding: counts against a plain search, drafts by hand, losslessness, earlier runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoder.errors import RequestError
from decoder.proposers.base import Proposal
from decoder.proposers.suffix import MAX_EARLIER_TOKENS, SuffixProposer
from decoder.proposers.suffix_automaton import Place, SuffixAutomaton
from decoder.request import GenerationRequest
from decoder.trace import violations
from tests.decoder.test_pitfalls import V, _pairs_after_first, certain, p_row
from tests.statistics import LIMIT, fits
from tests.toys import ask, toy_decoder


def automaton(tokens: list[int], depth: int = 24) -> SuffixAutomaton:
    built = SuffixAutomaton(depth)
    built.extend(tokens)
    return built


def draft(tokens: list[int], k: int, *, depth: int = 24, factor: float = 1.0, min_prob: float = 0.1) -> list[int]:
    built = automaton(tokens, depth)
    return built.draft(built.end, k, depth, factor, min_prob)[0]


def occurrences(tokens: list[int], piece: list[int]) -> list[int]:
    """Where ``piece`` ends."""
    return [i + len(piece) for i in range(len(tokens) - len(piece) + 1) if tokens[i : i + len(piece)] == piece]


def plain_draft(tokens: list[int], k: int, depth: int, factor: float, min_prob: float) -> float:
    """The best score by searching the text from scratch for every match length."""
    best = 0.0
    for m in range(1, min(depth, len(tokens)) + 1):
        room = min(k, int(m * factor + 1e-6), depth - m)
        piece, prob, score = tokens[len(tokens) - m :], 1.0, 0.0
        for _ in range(room):
            follow = [tokens[end] for end in occurrences(tokens, piece) if end < len(tokens)]
            if not follow:
                break
            share = max(follow.count(t) for t in follow) / len(follow)
            # Of equally frequent followers the latest counts, as in the automaton.
            likely = [t for t in follow if follow.count(t) == share * len(follow)]
            prob *= share
            if prob < min_prob:
                break
            piece = [*piece, likely[-1]]
            score += prob
        best = max(best, score)
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(2, 8))
def test_every_short_piece_is_counted_exactly(tokens: list[int], depth: int) -> None:
    built = automaton(tokens, depth)
    for start in range(len(tokens)):
        for size in range(1, min(depth, len(tokens) - start) + 1):
            piece = tokens[start : start + size]
            assert built.count(piece) == len(occurrences(tokens, piece))
    assert built.count([0, 9]) == 0
    assert built.states <= 2 * len(tokens) + 1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(2, 10),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_draft_promises_what_a_plain_search_promises(
    tokens: list[int], k: int, depth: int, factor: float, min_prob: float
) -> None:
    built = automaton(tokens, depth)
    found, score = built.draft(built.end, k, depth, factor, min_prob)
    assert score == pytest.approx(plain_draft(tokens, k, depth, factor, min_prob))
    assert len(found) <= k


def test_the_most_frequent_continuation_wins_not_the_latest() -> None:
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    assert draft(text, 1) == [7]
    assert draft([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8], "equally frequent: the latest"


def test_a_short_match_drafts_little() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 8, 1]
    assert draft(text, 6) == [2]
    assert draft(text, 6, factor=3.0) == [2, 3, 4]
    assert draft([7, 7, 1, 2, 3, 4, 5, 6, 9, 7, 7, 1], 6) == [2, 3, 4]


def test_an_unlikely_continuation_is_not_followed() -> None:
    text = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert draft(text, 1, min_prob=0.3) == []
    assert draft(text, 1, min_prob=0.25) == [5]


def test_match_and_draft_together_stay_within_the_depth() -> None:
    text = list(range(30)) * 2
    assert len(draft(text, 64, depth=24)) == 12
    assert len(draft(text, 64, depth=8)) == 4


def test_nothing_that_occurred_before_drafts_nothing() -> None:
    assert draft([1, 2, 3], 4) == []
    assert draft([], 4) == []


def test_a_foreign_text_finds_its_place_and_never_crosses_a_separator() -> None:
    built = SuffixAutomaton(8)
    built.extend([1, 2, 3, 4])
    built.separate()
    built.extend([5, 6])
    place = Place()
    for token in [9, 2, 3]:
        built.advance(place, token)
    assert built.draft(place, 4, 8, 1.0, 0.1)[0] == [4]
    built.advance(place, 4)
    assert built.draft(place, 4, 8, 1.0, 0.1)[0] == [], "what begins another run does not follow"


def test_a_long_repetitive_text_stays_small() -> None:
    """6,000 equal tokens are the worst case of naive counting; the states stay linear and the counts exact."""
    built = automaton([5] * 6000)
    assert built.states <= 12_001
    assert built.count([5] * 24) == 6000 - 23
    rng = random.Random(0)
    text = [rng.randrange(400) for _ in range(6000)]
    built = automaton(text + text[:300])
    assert built.states <= 2 * 6300
    assert built.draft(built.end, 8, 24, 1.0, 0.1)[0] == text[300:308]


@pytest.mark.parametrize("k", [1, 2, 4, 32])
@pytest.mark.parametrize("limit", [1, 2, 4, 5, 40])
def test_greedy_output_and_length_are_exact(k: int, limit: int) -> None:
    script = [(i % 9) + 1 for i in range(200)]
    decoder = toy_decoder(certain(script), 26, SuffixProposer())
    run = decoder.run(ask(k=k, max_new_tokens=limit, proposer="suffix"))
    assert list(run.output_ids) == script[:limit]
    assert violations(run) == []
    if limit == 40:
        assert run.metrics["num_accepted_draft_tokens"] >= 10


def test_a_stop_inside_a_draft_leaves_nothing_behind() -> None:
    script = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 7, 3, 4]
    run = toy_decoder(certain(script), 26, SuffixProposer()).run(ask(k=4, max_new_tokens=30, stop_ids=(7,)))
    assert run.output_ids == (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 7)
    assert run.finish_reason == "stop"


def sampled(proposer: SuffixProposer) -> tuple[float, int]:
    """p-value of sampled pairs behind a prompt full of repeats, and how many tokens were drafted."""
    decoder = toy_decoder(p_row, V, proposer)
    outputs, drafted = [], 0
    for seed in range(3000):
        run = decoder.run(ask("bcdefa" * 2, proposer="suffix", k=3, max_new_tokens=3, temperature=1.0, seed=seed))
        outputs.append(run.output_ids)
        drafted += run.metrics["num_draft_tokens"]
    return fits([o[1:3] for o in outputs], _pairs_after_first()), drafted


def test_sampled_output_keeps_the_distribution() -> None:
    p_value, drafted = sampled(SuffixProposer())
    assert drafted > 1000
    assert p_value > LIMIT


def test_counts_taken_for_the_drafts_own_probabilities_would_be_caught() -> None:
    """Negative control: the likeliest token is drafted, and verified as if it had been drawn."""

    class Biased(SuffixProposer):
        def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
            proposal = super().propose(ks, u)
            proposal.q = torch.full((*proposal.ids.shape, V), 1 / V)
            return proposal

    assert sampled(Biased())[0] < 1e-6


def test_rows_of_a_batch_give_what_they_give_alone() -> None:
    requests = [
        ask("abcabcab", proposer="suffix", k=4, max_new_tokens=20, temperature=1.0, seed=3),
        ask("a", proposer="suffix", k=2, max_new_tokens=9),
        ask("fedfed", proposer="suffix", k=3, max_new_tokens=14, temperature=0.7, seed=8),
    ]
    alone = [toy_decoder(p_row, V, SuffixProposer()).run(request).output_ids for request in requests]
    together = toy_decoder(p_row, V, SuffixProposer()).generate(requests)
    assert [run.output_ids for run in together] == alone


# --- earlier runs ---------------------------------------------------------------------------------------------------

SCRIPT = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 12, 11, 10, 13]


def with_earlier(runs: list[list[int]], **changes: object):
    decoder = toy_decoder(certain(SCRIPT), 26, SuffixProposer())
    decoder.remember(runs)
    return decoder.run(ask(proposer="suffix", k=4, max_new_tokens=len(SCRIPT), **changes))


def test_earlier_runs_are_used_only_where_the_request_allows_it_and_the_run_says_so() -> None:
    plain = with_earlier([SCRIPT])
    assert plain.metrics["num_draft_tokens"] == 0
    fast = with_earlier([SCRIPT], suffix_earlier=True)
    assert fast.output_ids == plain.output_ids == tuple(SCRIPT)
    assert fast.metrics["num_accepted_draft_tokens"] >= 8
    assert fast.request["suffix_earlier"] is True
    assert fast.versions["earlier_runs"] == "1 run, 14 tokens"


def test_a_run_of_other_text_and_ids_that_do_not_exist_only_cost_time() -> None:
    run = with_earlier([[3, 1, 999, 4], [], [3, 20, 20]], suffix_earlier=True)
    assert list(run.output_ids) == SCRIPT
    assert all(0 <= d.id < 26 for s in run.steps for d in s.drafts)


def test_the_text_itself_counts_more_than_earlier_runs_that_promise_no_more() -> None:
    script = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    decoder = toy_decoder(certain(script), 26, SuffixProposer())
    decoder.remember([[1, 2, 9], [1, 2, 9]])
    run = decoder.run(ask(proposer="suffix", k=1, max_new_tokens=9, suffix_earlier=True))
    late = [d.id for s in run.steps[3:] for d in s.drafts]
    assert late
    assert 9 not in late


def test_what_is_kept_of_earlier_runs_is_bounded() -> None:
    proposer = SuffixProposer()
    kept = proposer.remember([[1] * 30_000, [2] * 30_000, [3] * 30_000])
    assert kept == f"2 runs, {MAX_EARLIER_TOKENS:,} tokens"


def test_other_proposers_have_no_use_for_earlier_runs() -> None:
    decoder = toy_decoder(certain(SCRIPT), 26, None)
    decoder.remember([SCRIPT])
    assert "earlier_runs" not in decoder.run(ask(proposer="none", max_new_tokens=4)).versions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suffix_depth": 1}, "suffix depth"),
        ({"suffix_factor": 0}, "suffix factor"),
        ({"suffix_min_prob": 1.5}, "suffix least probability"),
        ({"suffix_earlier": "yes"}, "suffix earlier must be true or false"),
    ],
)
def test_bad_options_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationRequest("x", proposer="suffix").replace(**changes).validate()
