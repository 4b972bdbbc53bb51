"""Training of draft heads on the toy target: what is unrolled is what drafting gives; stopping changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from decoder.errors import ModelError
from decoder.training.average import average
from decoder.training.checkpoint import load_checkpoint, save_weights
from decoder.training.export_head import export_head
from decoder.training.features import FeatureCache, eagle3_layers
from decoder.training.head_models import HEADS
from decoder.training.heads import (
    HeadPlan,
    Material,
    SoftCrossEntropy,
    draft_vocabulary,
    evaluate_head,
    inputs,
    make_optimizers,
    save_vocabulary,
    start_from,
    train,
    train_step,
)
from decoder.training.rows import Rows
from tests.training.conftest import VOCAB

LAYERS = (0, 1, 1, 2)
PLAN = HeadPlan(steps=12, batch=4, vocabulary=48, sample=16, warmup=2, lr=5e-3, head_lr=5e-3)


@pytest.fixture
def material(rows: Rows, target: Any, tmp_path: Path) -> Material:
    cache = FeatureCache.open(tmp_path / "features", rows, target="toy", layers=LAYERS, hidden=32)
    return Material(rows, target.requires_grad_(False), cache)


def new_head(kind: str, material: Material, plan: HeadPlan = PLAN) -> tuple[Any, torch.Tensor]:
    vocabulary = draft_vocabulary(material.rows, VOCAB, plan.vocabulary)
    torch.manual_seed(plan.seed)
    head = HEADS[kind](material.target.config, material.target, vocabulary)
    head.warm_start(material.target, vocabulary)
    return head, vocabulary


def test_states_are_the_targets_and_are_computed_once(material: Material, target: Any, rows: Rows) -> None:
    chosen = np.array([5, 1])
    got = material.features.get(rows, chosen, target)
    with torch.no_grad():
        wanted = target(torch.from_numpy(rows.tokens[chosen]).long(), output_hidden_states=True).hidden_states
    for i, layer in enumerate(LAYERS):
        assert torch.equal(got[:, :, i], wanted[layer].bfloat16())
    assert material.features.done.sum() == 2
    again = FeatureCache.open(material.features.folder, rows, target="toy", layers=LAYERS, hidden=32)
    assert torch.equal(again.get(rows, chosen, None), got)  # without a model: nothing is computed
    with pytest.raises(ModelError, match="choose another folder"):
        FeatureCache.open(material.features.folder, rows, target="other", layers=LAYERS, hidden=32)


def test_the_layers_of_eagle3_are_the_public_ones() -> None:
    assert eagle3_layers(30) == (2, 15, 27)
    assert eagle3_layers(32) == (2, 16, 29)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_unrolling_is_what_drafting_one_after_the_other_gives(kind: str, material: Material) -> None:
    """At every index and step the unrolled state equals that of a plain causal pass over the target's states up to the
    index, followed by the head's own states of the steps before."""
    head, _ = new_head(kind, material)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    tokens, states = material.states(np.array([8]))
    embedded = material.target.get_input_embeddings()(tokens).float()
    read = inputs(head, states).float()
    steps = 3
    with torch.no_grad():
        unrolled = head.unroll(embedded, read, steps)
        first = head._first(read)
        for t in (3, 17, 40):
            own: list[torch.Tensor] = []
            for j in range(steps):
                x = torch.cat([first[:, : t + 1], *own], 1)
                positions = torch.arange(x.shape[1])[None]
                cos, sin = material.target.model.rotary_emb(x, positions)
                state, out = head._step(embedded[:, 1 : x.shape[1] + 1], x, (cos[:, None], sin[:, None]), [])
                torch.testing.assert_close(unrolled[j][:, t], out[:, -1], rtol=1e-4, atol=1e-4)
                own.append(state[:, -1:])


def test_medusa_heads_begin_as_the_targets_own_head(material: Material) -> None:
    head, vocabulary = new_head("medusa", material)
    _, states = material.states(np.array([3]))
    out = head.unroll(torch.zeros(1), inputs(head, states).float(), 4)
    assert len(out) == 4
    for j in range(4):
        assert torch.equal(out[j], states[:, :, -1].float())
        assert torch.equal(head.scoring(j), material.target.get_output_embeddings().weight[vocabulary])


def test_cross_entropy_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoftCrossEntropy, "PART", 3)
    torch.manual_seed(0)
    logits = torch.randn(10, 7, requires_grad=True)
    p = torch.randn(10, 7).softmax(-1)
    wanted = F.cross_entropy(logits, p)
    (slope,) = torch.autograd.grad(wanted * 3, logits)
    got = SoftCrossEntropy.apply(logits, p)
    (own,) = torch.autograd.grad(got * 3, logits)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(own, slope)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_a_head_learns_and_foretells_better_than_it_began(kind: str, material: Material) -> None:
    plan = replace(PLAN, kind=kind, steps=60)
    head, vocabulary = new_head(kind, material, plan)
    optimizers = make_optimizers(head, plan)
    assert sum(len(g["params"]) for o in optimizers for g in o.param_groups) == len(list(head.parameters()))
    chosen = material.rows.part("train")
    before = evaluate_head(head, material, vocabulary, chosen)
    losses = []
    for step in range(plan.steps):
        losses.append(train_step(head, material, plan, vocabulary, step, chosen))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = evaluate_head(head, material, vocabulary, chosen)
    assert np.mean(losses[-10:]) < np.mean(losses[:5])
    assert after.agreement > before.agreement
    assert after.positions == len(chosen) * (material.rows.length - material.rows.prefix + 1)


def test_stopping_and_going_on_gives_what_one_run_gives(material: Material, tmp_path: Path) -> None:
    def run(folder: Path, stops: list[int | None]) -> Any:
        for stop in stops:
            head, vocabulary = new_head("eagle3", material)
            train(
                head, material, PLAN, vocabulary, folder, eval_every=3, eval_rows=2, stop_after=stop, say=lambda _: None
            )
        return head

    whole, parts = run(tmp_path / "a", [None]), run(tmp_path / "b", [5, 3, None])
    for (name, p), (_, q) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    again, _ = new_head("eagle3", material)
    state = load_checkpoint(tmp_path / "b" / "checkpoint", again, make_optimizers(again, PLAN))
    assert state is not None
    assert state["step"] == PLAN.steps


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_the_exported_folder_has_the_public_names(kind: str, material: Material, tmp_path: Path) -> None:
    plan = replace(PLAN, kind=kind, unroll=4 if kind == "medusa" else 3)
    head, vocabulary = new_head(kind, material, plan)
    test = evaluate_head(head, material, vocabulary, material.rows.part("test"))
    point = {"step": 3, "tokens": 10} | test.to_json()
    out = tmp_path / f"toy-{kind}"
    export_head(
        kind, head, vocabulary, material.target.config, plan, material.rows, [point, point | {"tokens": 20}], test, out,
        target_name="toy", base_model="someone/toy", started=kind == "mtp",
    )  # fmt: skip
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    if kind == "eagle3":
        assert {"fc.weight", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight", "d2t", "t2d"} <= set(
            tensors
        )
        assert torch.equal(torch.arange(48) + tensors["d2t"], vocabulary)
        assert tensors["t2d"].nonzero()[:, 0].tolist() == vocabulary.tolist()
        assert config["draft_vocab_size"] == 48
    elif kind == "mtp":
        assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= set(tensors)
    else:
        assert {f"lm_heads.{i}.weight" for i in range(4)} | {"token_map"} <= set(tensors)
        assert torch.equal(tensors["token_map"], vocabulary)
    assert all(t.dtype == torch.bfloat16 for n, t in tensors.items() if n not in ("d2t", "t2d", "token_map"))
    card = (out / "README.md").read_text()
    assert "apache-2.0" in card
    assert ("an earlier training on other rows" in card) == (kind == "mtp")
    assert f"seed\n  {plan.seed}" in card or f"seed {plan.seed}" in card
    split = json.loads((out / "split.json").read_text())
    assert split["test"] == [4, 5, 6, 7]
    assert split["rows"] == material.rows.digest


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_a_run_starts_from_the_weights_of_another(kind: str, material: Material, tmp_path: Path) -> None:
    """Output rows follow their ids: the new vocabulary is a part of the old one, and a few ids that it did not have."""
    head, vocabulary = new_head(kind, material)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_weights(tmp_path / "best.safetensors", head)
    save_vocabulary(tmp_path, vocabulary)
    others = torch.tensor(sorted(set(range(VOCAB)) - set(vocabulary.tolist()))[:5])
    mixed = torch.cat([vocabulary[5:], others]).sort().values
    fresh = HEADS[kind](material.target.config, material.target, mixed)
    fresh.warm_start(material.target, mixed)
    before = {name: p.clone() for name, p in fresh.named_parameters()}
    heads = fresh.heads if kind == "medusa" else 1
    assert start_from(fresh, tmp_path, mixed, heads) == len(vocabulary) - 5
    old, scoring = dict(head.named_parameters()), {id(fresh.scoring(i)) for i in range(heads)}
    for name, parameter in fresh.named_parameters():
        if id(parameter) not in scoring:
            assert torch.equal(parameter, old[name])
            continue
        for at, token in enumerate(mixed.tolist()):
            place = vocabulary.tolist().index(token) if token in vocabulary else None
            wanted = before[name][at] if place is None else old[name][place]
            assert torch.equal(parameter[at], wanted)
    later = tmp_path / "later"
    save_weights(later / "best.safetensors", fresh)
    save_vocabulary(later, mixed)
    (later / "plan.json").write_text("{}")
    average(tmp_path, later, 0.25, tmp_path / "mean")
    for name, parameter in load_file(tmp_path / "mean" / "best.safetensors").items():
        assert torch.allclose(parameter, dict(fresh.named_parameters())[name]), "both hold the same, row by row"
    with pytest.raises(ModelError, match="not the folder of a trained head"):
        start_from(fresh, tmp_path / "nothing", mixed, heads)
    other, _ = new_head("medusa" if kind != "medusa" else "eagle3", material)
    with pytest.raises(ModelError, match="another kind or size"):
        start_from(other, tmp_path, vocabulary, 1)
