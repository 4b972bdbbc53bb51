"""Proposers that need no network: prompt lookup and predicted outputs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.proposers.ngram import NgramIndex
from decoder.proposers.prediction import Follower, PredictionProposer
from tests.toys import ask, toy_decoder


def lookup(tokens: list[int], k: int, smallest: int = 1, largest: int = 4) -> list[int]:
    index = NgramIndex(smallest, largest)
    index.extend(tokens)
    return index.lookup(k)


def test_the_longest_match_wins() -> None:
    assert lookup([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], 1) == [9]


def test_of_equally_long_matches_the_latest_wins() -> None:
    assert lookup([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_at_most_k_tokens_and_never_more_than_follow() -> None:
    assert lookup([1, 2, 3, 4, 5, 1], 3) == [2, 3, 4]
    assert lookup([4, 4], 3) == [4]


def test_nothing_matches() -> None:
    assert lookup([1, 2, 3], 4) == []
    assert lookup([1, 2, 1, 3], 4) == []
    assert lookup([5, 1, 6, 1], 4, smallest=2) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 2), st.integers(1, 5))
def test_the_index_equals_a_plain_search(tokens: list[int], smallest: int, more: int, k: int) -> None:
    """Fed token by token, it finds what a search from scratch finds."""
    largest = smallest + more
    index = NgramIndex(smallest, largest)
    for n in range(len(tokens) + 1):
        text = tokens[:n]
        index.extend(text)
        expected: list[int] = []
        for size in range(largest, smallest - 1, -1):
            starts = [s for s in range(n - size) if text[s : s + size] == text[n - size :]] if size < n else []
            if starts:
                expected = text[starts[-1] + size : starts[-1] + size + k]
                break
        assert index.lookup(k) == expected


def test_prediction_is_followed_from_the_start() -> None:
    follower = Follower([1, 2, 3, 4])
    assert follower.ahead(2) == [1, 2]
    follower.extend([1, 2])
    assert follower.ahead(5) == [3, 4]


def test_prediction_finds_its_place_after_a_replacement_an_insertion_and_a_deletion() -> None:
    expected = list(range(10, 40))
    replaced = Follower(expected)
    replaced.extend([10, 11, 99, 13, 14])
    assert replaced.ahead(2) == [15, 16]
    inserted = Follower(expected)
    inserted.extend([10, 11, 99, 98, 97, 12, 13])
    assert inserted.ahead(2) == [14, 15]
    deleted = Follower(expected)
    deleted.extend([10, 11, 18, 19])
    assert deleted.ahead(2) == [20, 21]


def test_prediction_prefers_the_next_place_over_an_earlier_one() -> None:
    expected = [1, 2, 5, 1, 2, 6, 1, 2, 7]
    follower = Follower(expected)
    follower.extend([1, 2, 5, 99, 1, 2])
    assert follower.ahead(1) == [6]


def found_by_search(follower: Follower) -> int | None:
    """Where a plain search through the expected text finds the place again."""
    expected, seen, last = follower.expected, follower._seen, follower._last_good
    for size in range(min(8, len(seen)), 0, -1):
        limit = len(expected) if size > 1 else min(last + 32, len(expected))
        ahead = range(max(0, last - size + 1), limit - size + 1)
        behind = range(last - size, -1, -1) if size > 2 else range(0)
        for start in (*ahead, *behind):
            if expected[start : start + size] == seen[-size:]:
                return start + size
    return None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 4), max_size=60))
def test_the_place_is_found_as_a_plain_search_finds_it(expected: list[int], output: list[int]) -> None:
    follower = Follower(expected)
    for n in range(1, len(output) + 1):
        at, last, seen = follower._at, follower._last_good, list(follower._seen)
        follower.extend(output[:n])
        # The same step again, by hand.
        plain = Follower(expected)
        plain._at, plain._last_good, plain._seen = at, last, [*seen, output[n - 1]]
        if at is not None and at < len(expected) and expected[at] == output[n - 1]:
            assert follower._at == at + 1
        else:
            assert follower._at == found_by_search(plain)


def test_a_used_up_prediction_drafts_nothing() -> None:
    follower = Follower([1, 2])
    follower.extend([1, 2])
    assert follower.ahead(3) == []
    follower.extend([1, 2, 9])
    assert follower.ahead(3) == []


def test_prediction_in_the_engine_resynchronises() -> None:
    script = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]

    def rows(prefix: tuple[int, ...]) -> list[float]:
        at = len(prefix) - 1
        return [9.0 if i == script[at % 12] else 0.0 for i in range(26)]

    wrong = [1, 2, 25, 4, 5, 6, 24, 23, 7, 8, 9, 10, 11, 12]
    decoder = toy_decoder(rows, 26, PredictionProposer(lambda text: wrong))
    run = decoder.run(ask(k=4, proposer="prediction", prediction="anything", max_new_tokens=12))
    assert list(run.output_ids) == script
    assert run.metrics["num_accepted_draft_tokens"] >= 6
