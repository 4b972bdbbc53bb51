"""What the trainer measures of a head is what the engine finds when it drafts with the exported folder."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder.engine import SpeculativeDecoder
from decoder.request import GenerationRequest
from decoder.training.evaluate import summarise
from decoder.training.export_head import export_head
from decoder.training.features import eagle3_layers
from decoder.training.head_models import HEADS
from decoder.training.heads import HeadPlan, Material, draft_vocabulary, evaluate_head, make_optimizers, train_step
from decoder.training.rows import Rows
from tests.head_forward import L, V
from tests.heads import load_proposer, predictable
from tests.tiny import runner_of, tiny_decoder

PREFIX, LENGTH, K = 6, 96, 3
PLAN = HeadPlan(steps=100, batch=8, vocabulary=256, sample=32, warmup=5, lr=1e-2, head_lr=1e-2, unroll=K)


class Exact:
    """States as the engine has them: in the target's dtype, not rounded for the disk."""

    def get(self, rows: Rows, chosen: Any, target: Any) -> torch.Tensor:
        found = target(torch.from_numpy(rows.tokens[chosen]).long(), output_hidden_states=True).hidden_states
        return torch.stack([found[i] for i in (*eagle3_layers(L), L)], 2)


@pytest.fixture(scope="module")
def material() -> Material:
    """Rows that the target wrote greedily behind prompts of its own."""
    target = predictable()
    tokens = torch.randint(1, V, (16, PREFIX), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        while tokens.shape[1] < LENGTH:
            tokens = torch.cat([tokens, target(tokens).logits[:, -1:].argmax(-1)], 1)
    split = np.zeros(16, np.uint8)
    split[12:] = 2
    rows = Rows(tokens.numpy().astype(np.int32), split, PREFIX, "none")
    return Material(rows, target, Exact())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_what_the_trainer_measures_is_what_drafting_finds(
    kind: str, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, rows, target = replace(PLAN, kind=kind), material.rows, material.target
    vocabulary = draft_vocabulary(rows, V, plan.vocabulary)
    torch.manual_seed(0)
    options = {"heads": K} if kind == "medusa" else {}
    head: Any = HEADS[kind](target.config, target, vocabulary, **options)
    head.warm_start(target, vocabulary)
    optimizers = make_optimizers(head, plan)
    for step in range(plan.steps):
        train_step(head, material, plan, vocabulary, step, rows.part("train"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    head = head.bfloat16().float()  # as it is written
    with monkeypatch.context() as exactly:
        exactly.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
        measured = evaluate_head(head, material, vocabulary, rows.part("test"), k=K)
    out = tmp_path / f"toy-{kind}"
    point = {"step": 1, "tokens": 1} | measured.to_json()
    export_head(
        kind, head, vocabulary, target.config, plan, rows, [point], measured, out,
        target_name="toy", base_model="someone/toy",
    )  # fmt: skip
    decoder = tiny_decoder(load_proposer(out, kind, target), runner_of(target))
    found = []
    for tokens in rows.tokens[rows.part("test")].tolist():
        found.append(accepted(decoder, tokens))
    # The trainer stops walking where a row has fewer than K tokens left.
    walked = [counts[: _walked(counts)] for counts in found]
    length, positions, steps = summarise(walked, K)
    assert steps == measured.steps
    assert positions == pytest.approx(measured.acceptance_per_position)
    assert length == pytest.approx(measured.mean_acceptance_length)
    assert 1.1 < length < K + 1  # neither nothing nor everything was accepted


def accepted(decoder: SpeculativeDecoder, tokens: list[int]) -> list[int]:
    """Accepted drafts of each step while the engine writes a row again."""
    decoder.prompt_ids = lambda request: tokens[:PREFIX]  # type: ignore[method-assign]
    # A little more than the row, so that its last steps may draft as far as the trainer looks.
    request = GenerationRequest("-", chat=False, proposer="draft-model", k=K, max_new_tokens=LENGTH, ignore_eos=True)
    run = decoder.run(request)
    assert list(run.output_ids[: LENGTH - PREFIX]) == tokens[PREFIX:]
    return [step.num_accepted for step in run.steps if step.k]


def _walked(counts: list[int]) -> int:
    """How many of these steps lie inside a row with K tokens to spare."""
    at, number = PREFIX - 1, 0
    for count in counts:
        if at + K >= LENGTH - 1:
            break
        number, at = number + 1, at + count + 1
    return number
