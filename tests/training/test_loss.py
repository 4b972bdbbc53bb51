from __future__ import annotations

import numpy as np
import pytest
import torch

from decoder.training.loss import Vocabulary, distillation_loss


def test_hand_worked_value() -> None:
    """q = (1/2, 1/4, 1/4); p lists id 0 with 1/2, the rest mass 1/2 meets a rest of 1/2: soft = log 2; hard = log 4."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    soft_place, soft_logp = torch.tensor([[0, -1]]), torch.tensor([[0.5, 0.3]]).log()
    for weight, expected in ((0.0, np.log(2)), (1.0, np.log(4)), (0.5, (np.log(2) + np.log(4)) / 2)):
        loss = distillation_loss(logits, soft_place, soft_logp, torch.tensor([1]), weight)
        assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_equals_dense_cross_entropy_when_everything_is_listed() -> None:
    torch.manual_seed(0)
    logits, p = torch.randn(5, 7), torch.randn(5, 7).softmax(-1)
    ids = torch.arange(7).expand(5, 7)
    loss = distillation_loss(logits, ids, p.log(), p.argmax(-1), 0.0)
    assert loss.item() == pytest.approx(-(p * logits.log_softmax(-1)).sum().item(), rel=1e-4)


def test_an_entry_that_says_nothing_counts_for_nothing() -> None:
    logits = torch.randn(1, 6)
    certain = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    loss = distillation_loss(logits, torch.tensor([[2, 2, 2]]), certain, torch.tensor([2]), 0.3)
    assert loss.item() == pytest.approx(-logits.log_softmax(-1)[0, 2].item(), rel=1e-5)
    assert torch.isfinite(loss)


def test_candidates_hold_core_and_wanted_and_weigh_the_sample() -> None:
    counts = np.arange(100)[::-1].copy()  # id 0 is the most frequent
    vocabulary = Vocabulary(counts, core=10, sample=16)
    found = vocabulary.candidates(torch.tensor([3, 50, 99, 50]), torch.Generator().manual_seed(0))
    ids = found.ids.tolist()
    assert ids[:10] == list(range(10))
    assert ids[10:12] == [50, 99]
    assert len(ids) == len(set(ids)) == 28
    assert found.log_weight[:12].eq(0).all()
    assert found.log_weight[12:].exp().sum().item() == pytest.approx(88, rel=1e-5)  # 16 stand for 90 - 2 others
    assert [found.place[i].item() for i in (0, 50, 99)] == [0, 10, 11]
    assert all(found.place[i] == -1 for i in ids[12:])


def test_sampled_normaliser_is_right_on_average() -> None:
    torch.manual_seed(0)
    logits = torch.randn(400)
    vocabulary = Vocabulary(np.arange(400)[::-1].copy(), core=40, sample=60)
    generator = torch.Generator().manual_seed(0)
    totals = []
    for _ in range(400):
        found = vocabulary.candidates(torch.tensor([0]), generator)
        totals.append((logits[found.ids] + found.log_weight).exp().sum().item())
    assert np.mean(totals) == pytest.approx(logits.exp().sum().item(), rel=0.02)


def test_core_zero_is_the_whole_vocabulary() -> None:
    found = Vocabulary(np.ones(9, dtype=np.int64), 0, 5).candidates(torch.tensor([1]), torch.Generator())
    assert found.ids.tolist() == list(range(9))
