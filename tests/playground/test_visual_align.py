"""Alignment of several runs, and the value of the compare view."""

from __future__ import annotations

import json
import time

from hypothesis import given
from hypothesis import strategies as st

from playground.align import align, compare_value
from tests.playground.visual_runs import baseline_of, hostile_run, make_run

ids = st.lists(st.integers(0, 4), max_size=25)


def test_equal_texts_stand_token_against_token() -> None:
    assert align([[5, 6, 7], [5, 6, 7], [5, 6, 7]]) == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_a_replaced_token_stands_against_what_it_replaces() -> None:
    assert align([[1, 2, 3], [1, 9, 3]]) == [[0, 0], [1, 1], [2, 2]]


def test_an_inserted_token_gets_a_column_of_its_own() -> None:
    assert align([[1, 2], [1, 9, 2]]) == [[0, 0], [None, 1], [1, 2]]


def test_a_missing_token_leaves_a_gap() -> None:
    assert align([[1, 2, 3], [1, 3]]) == [[0, 0], [1, None], [2, 1]]


def test_two_runs_share_the_columns_that_the_reference_lacks() -> None:
    assert align([[1, 2], [1, 8, 2], [1, 9, 9, 2]]) == [[0, 0, 0], [None, 1, 1], [None, None, 2], [1, 2, 3]]


def test_another_reference_and_no_runs() -> None:
    assert align([[1, 9, 2], [1, 2]], reference=1) == [[0, 0], [1, None], [2, 1]]
    assert align([]) == []
    assert align([[], [3]]) == [[None, 0]]


@given(st.lists(ids, min_size=1, max_size=4), st.data())
def test_every_token_appears_once_and_in_order(sequences: list[list[int]], data: st.DataObject) -> None:
    reference = data.draw(st.integers(0, len(sequences) - 1))
    columns = align(sequences, reference)
    for run, sequence in enumerate(sequences):
        assert [column[run] for column in columns if column[run] is not None] == list(range(len(sequence)))
    assert all(any(index is not None for index in column) for column in columns)


def test_long_texts_are_aligned_quickly() -> None:
    base = [n % 50 for n in range(2000)]
    other = [*base[:900], 77, *base[901:]]
    start = time.perf_counter()
    columns = align([base, other, base])
    assert time.perf_counter() - start < 2
    assert len(columns) == 2000


def test_the_value_names_marks_steps_and_what_was_struck() -> None:
    run = make_run()
    value = json.loads(compare_value([run, baseline_of(run)], ["drafted", "plain"]))
    assert [entry["label"] for entry in value["runs"]] == ["drafted", "plain"]
    first = value["runs"][0]
    assert [token["id"] for token in first["tokens"]] == list(run.output_ids)
    assert {token["source"] for token in first["tokens"]} >= {"accepted", "corrected", "bonus", "target"}
    at = next(iter(first["rejected"]))
    assert first["tokens"][int(at)]["source"] == "corrected"
    assert first["rejected"][at][0]["verdict"] == "rejected"
    assert value["alignment"] == [[n, n] for n in range(len(run.output_ids))]


def test_the_value_holds_no_tag() -> None:
    assert "<" not in compare_value([hostile_run()])


def test_a_comma_in_common_does_not_tear_two_texts_apart() -> None:
    one = [1, 2, 3, 4, 5, 99, 6]
    other = [11, 99, 12, 13, 14, 15, 16]
    assert align([one, other]) == [[n, n] for n in range(7)]


def test_a_long_insertion_is_kept_where_enough_follows() -> None:
    base = list(range(20))
    other = [*range(5), *range(100, 110), *range(5, 20)]
    columns = align([base, other])
    assert columns[5] == [None, 5]
    assert columns[-1] == [19, 29]
    assert len(columns) == 30
