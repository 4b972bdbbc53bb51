from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder.errors import ModelError
from decoder.training.checkpoint import load_checkpoint
from decoder.training.draft_model import Plan, batch_labels, train, train_step
from decoder.training.labels import LabelCache
from decoder.training.loss import Vocabulary, distillation_loss
from decoder.training.rows import Rows
from decoder.training.schedule import batch_rows, learning_rate
from decoder.training.warm_start import draft_config, reduce_embeddings, warm_start
from tests.training.conftest import PREFIX, VOCAB

PLAN = Plan(
    hidden=16, layers=1, intermediate=24, kv_heads=1, steps=12, batch=4,
    warmup=2, top=16, core=48, sample=16, packs=(1, 2),
)  # fmt: skip


def new_model(target: Any, rows: Rows, plan: Plan = PLAN) -> Any:
    shape: dict[str, Any] = {"hidden": plan.hidden, "layers": plan.layers, "intermediate": 24}
    config = draft_config(target.config, head_dim=16, kv_heads=1, **shape)
    return warm_start(config, target, rows.counts(VOCAB), plan.seed)[0].train()


def test_full_width_reduction_keeps_every_inner_product() -> None:
    table = torch.randn(50, 8)
    reduced, kept = reduce_embeddings(table, np.arange(50), 8)
    assert kept == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(reduced @ reduced.T, table @ table.T, rtol=1e-3, atol=1e-3)


def test_frequent_tokens_are_kept_better() -> None:
    torch.manual_seed(0)
    table, counts = torch.randn(400, 32), np.zeros(400, dtype=np.int64)
    counts[:20] = 10_000
    reduced, _ = reduce_embeddings(table, counts, 20)
    kept = reduced.norm(dim=1) / table.norm(dim=1)
    assert kept[:20].mean() > kept[20:].mean() + 0.1


def test_draft_has_the_targets_vocabulary_and_context(target: Any, rows: Rows) -> None:
    config = new_model(target, rows).config
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_id) == (VOCAB, 256, 2)
    assert config.tie_word_embeddings
    with pytest.raises(ModelError, match="a width of 20"):
        draft_config(target.config, hidden=20, layers=1, intermediate=24)


def test_learning_rate_rises_stays_and_falls_to_zero() -> None:
    plan = Plan(steps=100, warmup=10, decay=0.5)
    assert learning_rate(plan, 0) == pytest.approx(0.1)
    assert learning_rate(plan, 30) == 1.0
    assert learning_rate(plan, 75) == pytest.approx(0.5)
    assert learning_rate(plan, 100) == 0.0


def test_each_epoch_visits_each_row_once() -> None:
    train_rows = np.arange(100, 112)
    first = np.concatenate([batch_rows(PLAN, step, train_rows) for step in range(3)])
    second = np.concatenate([batch_rows(PLAN, step, train_rows) for step in range(3, 6)])
    assert sorted(first) == sorted(second) == train_rows.tolist()
    assert first.tolist() != second.tolist()


def test_unlabelled_rows_teach_their_own_next_ids(rows: Rows, labels: LabelCache) -> None:
    labels.done[9] = 0
    ids, logp = batch_labels(rows, labels, np.array([9, 10]), 3)
    assert ids[0, :, 0].tolist() == rows.tokens[9, PREFIX:].tolist()
    assert logp[0].exp().sum(-1).eq(1).all()
    assert ids[1, :, 0].tolist() == labels.ids[10, :-1, 0].tolist()


def test_chunked_gradients_equal_dense_ones(rows: Rows, labels: LabelCache, target: Any) -> None:
    plan, chosen = replace(PLAN, core=0, packs=(1,)), np.array([10, 11, 12, 13])
    model = new_model(target, rows)
    loss = train_step(model, rows, labels, Vocabulary(rows.counts(VOCAB), 0, 0), plan, 0, chosen)
    chunked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    ids, logp = (part.flatten(0, 1) for part in batch_labels(rows, labels, chosen, plan.top))
    logits = model(torch.from_numpy(rows.tokens[chosen]).long()).logits[:, PREFIX - 1 : -1].flatten(0, 1)
    dense = distillation_loss(logits, ids, logp, ids[:, 0], plan.hard_weight) / len(ids)
    dense.backward()
    assert loss == pytest.approx(dense.item(), rel=2e-2)  # bf16 against float32
    for name, parameter in model.named_parameters():
        cosine = torch.nn.functional.cosine_similarity(chunked[name].flatten(), parameter.grad.flatten(), dim=0)
        assert cosine > 0.99, name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_interrupted_training_ends_where_uninterrupted_does(
    rows: Rows, labels: LabelCache, target: Any, tmp_path: Path, optimizer: str
) -> None:
    plan = replace(PLAN, optimizer=optimizer)
    whole, first, second = (new_model(target, rows) for _ in range(3))
    options: dict[str, Any] = {"eval_every": 6, "say": lambda _: None}
    train(whole, rows, labels, plan, tmp_path / "whole", **options)
    train(first, rows, labels, plan, tmp_path / "parts", stop_after=5, **options)
    train(second, rows, labels, plan, tmp_path / "parts", **options)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    points = [json.loads(line) for line in (tmp_path / "parts" / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [5, 6, 12]
    assert not list((tmp_path / "parts").rglob("*.pt"))


def test_training_learns(rows: Rows, labels: LabelCache, target: Any, tmp_path: Path) -> None:
    losses: list[str] = []
    plan = replace(PLAN, hidden=32, steps=60, lr=5e-3, embedding_lr=5e-3)
    train(new_model(target, rows, plan), rows, labels, plan, tmp_path, eval_every=30, say=losses.append)
    points = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert points[-1]["loss"] < points[0]["loss"]
    assert (tmp_path / "best.safetensors").is_file()


def test_a_checkpoint_of_another_shape_is_refused(rows: Rows, labels: LabelCache, target: Any, tmp_path: Path) -> None:
    train(new_model(target, rows), rows, labels, PLAN, tmp_path, stop_after=1, say=lambda _: None)
    with pytest.raises(ModelError, match="expected"):
        load_checkpoint(tmp_path / "checkpoint", new_model(target, rows, replace(PLAN, hidden=32)), [])
