"""Processors by hand, and against transformers' own; drawing from a distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import decoder.sampling as sampling
from decoder.errors import RequestError
from decoder.request import SamplingParams
from decoder.sampling import Draws, Sampler, draw, filter_logits
from tests.statistics import LIMIT, fits


def logits(seed: int, rows: int = 3, width: int = 50) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("params", "theirs"),
    [
        (SamplingParams(temperature=0.3), [TemperatureLogitsWarper(0.3)]),
        (SamplingParams(temperature=1.0, top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(temperature=0.7, top_p=0.6), [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.6)]),
        (SamplingParams(temperature=1.4, min_p=0.1), [TemperatureLogitsWarper(1.4), MinPLogitsWarper(0.1)]),
        (
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
            [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
        ),
    ],
)
def test_filters_equal_transformers(params: SamplingParams, theirs: list) -> None:
    raw = logits(1)
    expected = raw
    for warper in theirs:
        expected = warper(None, expected)
    assert torch.allclose(filter_logits(raw, params).softmax(-1), expected.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("few", [1, 4, 512])
def test_top_p_does_not_depend_on_how_many_tokens_are_looked_at_first(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = logits(3, rows=20)
    whole = TopPLogitsWarper(0.8)(None, raw)
    monkeypatch.setattr(sampling, "_NUCLEUS", few)
    assert torch.allclose(
        filter_logits(raw, SamplingParams(temperature=1.0, top_p=0.8)), whole - raw.amax(-1, keepdim=True)
    )


def test_repetition_penalty_equals_transformers_over_prompt_and_output() -> None:
    raw = logits(2, rows=1)
    sampler = Sampler(SamplingParams(repetition_penalty=1.3), 50, [3, 4], "cpu")
    sampler.commit([7, 7])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[3, 4, 7, 7]]), raw.clone())
    assert torch.allclose(sampler.logits(raw), theirs)


def test_presence_and_frequency_count_the_output_only() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), 6, [1, 1, 1], "cpu")
    sampler.commit([2, 2, 3])
    assert sampler.logits(torch.zeros(1, 6))[0].tolist() == [0, 0, -1.0, -0.75, 0, 0]


def test_each_row_ahead_has_its_own_history_and_nothing_is_kept() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=1.0), 4, [], "cpu")
    ahead = torch.tensor([1, 2, 1])
    rows = sampler.logits(torch.zeros(4, 4), ahead)
    assert rows.tolist() == [[0, 0, 0, 0], [0, -1, 0, 0], [0, -1, -1, 0], [0, -2, -1, 0]]
    assert sampler.logits(torch.zeros(1, 4), ahead, skip=3).tolist() == [[0, -2, -1, 0]]
    assert sampler.logits(torch.zeros(1, 4))[0].tolist() == [0, 0, 0, 0]


def test_tree_rows_follow_their_ancestors_only() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=1.0), 5, [], "cpu")
    rows = sampler.logits(torch.zeros(5, 5), torch.tensor([1, 2, 3, 4]), [None, None, 0, 1])
    assert rows[1:].tolist() == [[0, -1, 0, 0, 0], [0, 0, -1, 0, 0], [0, -1, 0, -1, 0], [0, 0, -1, 0, -1]]


def test_heads_of_other_sizes_are_fitted_to_the_targets() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), 6, [], "cpu")
    narrow = sampler.probs(sampler.logits(torch.zeros(1, 4)))
    assert narrow[0].tolist() == pytest.approx([0.25] * 4 + [0, 0])
    wide = sampler.probs(sampler.logits(torch.zeros(1, 9)))
    assert wide[0].tolist() == pytest.approx([1 / 6] * 6)


def test_logit_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="vocabulary ends at 9"):
        Sampler(SamplingParams(logit_bias=((10, 1.0),)), 10, [], "cpu")


def test_a_tiny_temperature_stays_finite() -> None:
    row = Sampler(SamplingParams(temperature=1e-6), 3, [], "cpu").probs(torch.tensor([[1.0, 2.0, 3.0]]))
    assert row.tolist() == [[0, 0, 1]]


def test_draws_follow_the_distribution() -> None:
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = draw(p.expand(20_000, 4), u).tolist()
    assert fits(samples, {0: 0.1, 2: 0.6, 3: 0.3}) > LIMIT


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], u: float) -> None:
    p = torch.tensor(weights)
    if float(p.sum()) <= 0:
        return
    assert float(p[int(draw(p, torch.tensor(u, dtype=torch.float64)))]) > 0


def test_the_largest_u_takes_the_last_token_with_a_probability() -> None:
    p = torch.tensor([0.5, 0.5, 0.0])
    assert int(draw(p, torch.tensor(1 - 2**-53, dtype=torch.float64))) == 1


def test_draws_depend_on_the_seed_alone() -> None:
    assert Draws(5).take(3).tolist() == Draws(5).take(3).tolist() != Draws(6).take(3).tolist()
