"""Heads of every public layout draft what an independent forward says, step after step of a real run.

The forward in ``tests/heads.py`` computes each draft from the beginning, without a cache; what a run recorded as q of
its drafts must be that. Wrong positions, stale states after a rejection, a wrong tensor or order all show up here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.target import ModelRunner
from decoder.trace import Run
from tests import head_forward, heads
from tests.heads import Checkpoint, predictable
from tests.tiny import CONTEXT, tiny_decoder
from tests.toys import ask

layers_both_ways = heads.layers_both_ways
pytestmark = pytest.mark.usefixtures("layers_both_ways")

Build = Callable[[Any], Checkpoint]

RECURRENT: dict[str, tuple[str, Build]] = {
    "EAGLE-1/2": ("eagle", heads.eagle),
    "EAGLE-1/2, speculators": ("eagle", heads.eagle_speculators),
    "EAGLE-3": ("eagle3", heads.eagle3),
    "EAGLE-3, other states": ("eagle3", lambda m: heads.eagle3(m, eagle_aux_hidden_state_layer_ids=[0, 1, 2])),
    "EAGLE-3, layers.0": ("eagle3", lambda m: heads.eagle3(m, prefix="layers.0.")),
    "EAGLE-3, model. in front": ("eagle3", lambda m: prefixed(heads.eagle3(m))),
    "EAGLE-3, of another width": ("eagle3", lambda m: heads.eagle3(m, hidden=48)),
    "EAGLE-3, two layers with biases": ("eagle3", lambda m: more_layers(heads.eagle3(m))),
    "EAGLE-3, speculators": ("eagle3", heads.eagle3_speculators),
    "EAGLE-3, norm_output": ("eagle3", lambda m: heads.eagle3_speculators(m, norm_output=True, norm_before_fc=True)),
    "EAGLE-3, fc_norm": ("eagle3", lambda m: heads.eagle3_speculators(m, norm_before_residual=False, fc_norm=True)),
    "MTP": ("mtp", heads.mtp),
}


def prefixed(checkpoint: Checkpoint) -> Checkpoint:
    config, tensors = checkpoint
    return config, {name if name in ("d2t", "t2d") else f"model.{name}": t for name, t in tensors.items()}


def more_layers(checkpoint: Checkpoint) -> Checkpoint:
    """A second, plain layer; the first with norms of queries and keys and with biases."""
    config, tensors = checkpoint
    make = heads.noise(11)
    tensors |= heads.layer_tensors(make, "midlayer.", inputs=2 * heads.H, bias=True, qk_norm=True)
    tensors |= heads.layer_tensors(make, "layers.1.")
    config["num_hidden_layers"] = 2
    return config, tensors


def decode(folder: Path, proposer: str, model: Any, **request: Any) -> Run:
    decoder = tiny_decoder(
        heads.load_proposer(folder, proposer, model), ModelRunner(model, context=CONTEXT, device="cpu")
    )
    defaults: dict[str, Any] = {"k": 4, "max_new_tokens": 26, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    run = decoder.run(ask("the quick brown fox", **{**defaults, **request}))
    assert run.error is None
    return run


def assert_drafts_are(run: Run, expected: Callable[[list[int], list[int]], torch.Tensor]) -> None:
    """``expected(text, drafts)`` are the logits of the next draft."""
    text, lengths = list(run.prompt_ids), set()
    for step in run.steps:
        drafts: list[int] = []
        for draft in step.drafts:
            probs = expected(text, drafts).softmax(-1)
            assert draft.q == pytest.approx(float(probs[draft.id]), abs=2e-4)
            assert draft.top_q[0].id == int(probs.argmax())
            assert draft.top_q[0].probability == pytest.approx(float(probs.max()), abs=2e-4)
            drafts.append(draft.id)
        if step.drafts:
            lengths.add(step.num_accepted)
        text += [token.id for token in step.emitted]
    assert len(lengths) > 1, "rounds of one kind only: nothing was rolled back"


@pytest.mark.parametrize("layout", RECURRENT)
def test_a_recurrent_head_drafts_what_an_independent_forward_drafts(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import decoder.heads.runner
    import decoder.target

    # The prompt goes through target and head in parts.
    monkeypatch.setattr(decoder.heads.runner, "PREFILL_CHUNK", 5)
    monkeypatch.setattr(decoder.target, "PREFILL_CHUNK", 7)
    proposer, build = RECURRENT[layout]
    model = predictable()
    config, tensors = build(model)
    run = decode(heads.save(tmp_path, (config, tensors)), proposer, model)
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_drafts_are(run, lambda text, drafts: head_forward.forward(proposer, config, plain, model, text, drafts)[1])


@pytest.mark.parametrize(
    "build",
    [heads.medusa, heads.medusa_vllm, lambda m: heads.medusa_vllm(m, shared=False)],
    ids=["original names", "vLLM, one matrix", "vLLM, a matrix each"],
)
def test_medusa_heads_draft_what_an_independent_forward_drafts(build: Build, tmp_path: Path) -> None:
    model = predictable()
    config, tensors = build(model)
    run = decode(heads.save(tmp_path, (config, tensors)), "medusa", model)
    assert_drafts_are(run, lambda text, drafts: head_forward.medusa_logits(tensors, model, text, len(drafts)))


def test_only_so_many_tokens_are_drafted_as_there_are_medusa_heads(tmp_path: Path) -> None:
    """The config says two heads and the tensors three: the tensors are right."""
    model = predictable()
    folder = heads.save(tmp_path, heads.medusa(model, count=3))
    run = decode(folder, "medusa", model, k=8)
    assert {len(step.drafts) for step in run.steps[1:-3]} == {3}


def test_a_head_shares_the_targets_embeddings_and_output_head(tmp_path: Path) -> None:
    """Stored once more in the checkpoint or not: in memory there is one table."""
    model = predictable()
    proposer: Any = heads.load_proposer(heads.save(tmp_path, heads.eagle(model)), "eagle", model)
    assert proposer.runner.head.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert proposer.runner.head.borrowed.head.data_ptr() == model.lm_head.weight.data_ptr()


def test_embeddings_of_its_own_are_used(tmp_path: Path) -> None:
    """A head whose embeddings differ from the target's (even in one entry) reads its own."""
    model = predictable()
    config, tensors = heads.eagle(model)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].clone() * 1.5
    run = decode(heads.save(tmp_path, (config, tensors)), "eagle", model, max_new_tokens=12)
    assert_drafts_are(run, lambda text, drafts: head_forward.forward("eagle", config, tensors, model, text, drafts)[1])
