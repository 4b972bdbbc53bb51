"""A head that does not fit its target is refused, and the reason is named; nothing is ever loaded loosely."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.errors import IncompatibleError, ModelError
from decoder.heads import fit
from decoder.heads.expect import TargetFacts, eagle3_settings
from decoder.heads.files import open_files
from decoder.heads.layout import find_layout, require
from decoder.heads.sizes import read_sizes
from tests import heads
from tests.heads import Checkpoint, Tensors, facts, predictable

Config = dict[str, Any]


def reasons(folder: Path, checkpoint: Checkpoint, target: TargetFacts | None = None) -> list[str]:
    files = open_files(str(heads.save(folder, checkpoint)))
    layout = find_layout(files.config, files.shapes)
    assert layout is not None
    return fit.problems(files, layout, target or facts(predictable()))


def changed(build: Callable[..., Checkpoint], change: Callable[[Config, Tensors], object], **flags: Any) -> Checkpoint:
    config, tensors = build(predictable(), **flags)
    change(config, tensors)
    return config, tensors


@pytest.mark.parametrize(
    "build",
    [
        heads.eagle,
        heads.eagle_speculators,
        heads.eagle3,
        heads.eagle3_speculators,
        heads.medusa,
        heads.medusa_vllm,
        heads.mtp,
    ],
)
def test_a_head_that_fits_has_no_problems(build: Callable[..., Checkpoint], tmp_path: Path) -> None:
    assert reasons(tmp_path, build(predictable())) == []


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
    ],
)
def test_every_architecture_name_of_eagle3_is_known(name: str, tmp_path: Path) -> None:
    checkpoint = changed(heads.eagle3, lambda c, t: c.update(architectures=[name]))
    assert reasons(tmp_path, checkpoint) == []
    layout = find_layout(checkpoint[0], {})
    assert layout is not None, "from the config alone"
    assert layout.proposer == "eagle3"


def drop(*names: str) -> Callable[[Config, Tensors], object]:
    def change(config: Config, tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[Config, Tensors], object]:
    return lambda config, tensors: tensors.update({name: tensor})


def say(**values: Any) -> Callable[[Config, Tensors], object]:
    return lambda config, tensors: config.update(values)


def nudge(name: str, at: int, by: int) -> Callable[[Config, Tensors], object]:
    def change(config: Config, tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][at] += by

    return change


MISMATCHES: dict[str, tuple[Callable[..., Checkpoint], Callable[[Config, Tensors], object], str]] = {
    "fc of EAGLE-1 in EAGLE-3": (
        heads.eagle3,
        put("fc.weight", torch.zeros(64, 128)),
        "fc.weight reads 128 values, 2 times the target's hidden size: it is an EAGLE-1/2 head, use eagle",
    ),
    "fc of EAGLE-3 in EAGLE-1": (
        heads.eagle,
        put("fc.weight", torch.zeros(64, 192)),
        "fc.weight reads 192 values, 3 times the target's hidden size: it is an EAGLE-3 head, use eagle3",
    ),
    "fc of another width": (
        heads.eagle3,
        put("fc.weight", torch.zeros(64, 300)),
        "fc.weight reads 300 values, and tiny gives 192 (3 states of 64)",
    ),
    "target hidden size": (
        heads.eagle3,
        say(target_hidden_size=96),
        "the target hidden size in its config.json is 96, and the hidden size of tiny is 64",
    ),
    "hidden size of EAGLE-1": (heads.eagle, say(hidden_size=96), "its hidden size is 96, and the hidden size of tiny"),
    "hidden size of MTP": (heads.mtp, say(hidden_size=96), "its hidden size is 96, and the hidden size of tiny is 64"),
    "hidden size of Medusa": (heads.medusa_vllm, say(hidden_size=96), "its hidden size is 96"),
    "vocabulary": (heads.eagle3, say(vocab_size=400), "its vocabulary has 400 entries, that of tiny 384"),
    "vocabulary of speculators": (
        heads.eagle3_speculators,
        lambda c, t: c["transformer_layer_config"].update(vocab_size=400),
        "its vocabulary has 400 entries, that of tiny 384",
    ),
    "length of t2d": (heads.eagle3, put("t2d", torch.ones(380, dtype=torch.bool)), "t2d is [380], expected [384]"),
    "d2t out of range": (heads.eagle3, nudge("d2t", 299, 500), "outside the target's 384 ids"),
    "d2t below zero": (heads.eagle3, nudge("d2t", 0, -500), "d2t maps draft id 0 to"),
    "d2t twice the same": (
        heads.eagle3,
        lambda c, t: t.update(d2t=torch.zeros(300, dtype=torch.long) - torch.arange(300)),
        "d2t maps two draft ids to the same target id 0",
    ),
    "d2t against t2d": (
        heads.eagle3,
        lambda c, t: t.update(d2t=torch.zeros(300, dtype=torch.long)),
        "d2t and t2d disagree, first about target id",
    ),
    "no d2t": (heads.eagle3, drop("d2t"), "missing: d2t"),
    "d2t as floats": (
        heads.eagle3,
        lambda c, t: t.update(d2t=t["d2t"].float()),
        "d2t is stored as F32; whole numbers are needed",
    ),
    "no output head": (heads.eagle3, drop("lm_head.weight"), "missing: lm_head.weight"),
    "no layer": (heads.eagle3, drop("midlayer.mlp.up_proj.weight"), "missing: layers.0.mlp.up_proj.weight"),
    "an unknown tensor": (heads.eagle3, put("midlayer.extra.weight", torch.ones(2)), "unknown: midlayer.extra.weight"),
    "P-EAGLE": (heads.eagle3, put("mask_hidden", torch.ones(1, 192)), "unknown: mask_hidden"),
    "an input norm in EAGLE-1": (
        heads.eagle,
        put("layers.0.input_layernorm.weight", torch.ones(64)),
        "unknown: layers.0.input_layernorm.weight",
    ),
    "another shape": (
        heads.eagle3,
        put("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64)),
        "midlayer.self_attn.q_proj.weight is [64, 64], expected [64, 128]",
    ),
    "a bias without its fellows": (
        heads.eagle3,
        put("midlayer.self_attn.q_proj.bias", torch.ones(64)),
        "missing: layers.0.self_attn.k_proj.bias",
    ),
    "a layer that the target lacks": (
        heads.eagle3,
        say(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        "it reads the state at layer 3, and tiny has 3 layers (0 to 2)",
    ),
    "a layer by SGLang's numbers": (
        heads.eagle3,
        say(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
        "it reads the state at layer 3",
    ),
    "layers that are no list": (heads.eagle3, say(eagle_aux_hidden_state_layer_ids="all"), "a list of layer numbers"),
    "an unknown norm flag": (heads.eagle3, say(norm_the_lot=True), "unsupported norm flag norm_the_lot"),
    "two norms before fc": (
        heads.eagle3_speculators,
        say(norm_before_fc=True, fc_norm=True),
        "norm_before_fc and fc_norm exclude each other",
    ),
    "a norm without its tensor": (heads.eagle3, say(norm_before_fc=True), "missing: input_norm.weight"),
    "a tensor without its norm flag": (heads.eagle3, put("input_norm.weight", torch.ones(192)), "unknown: input_norm"),
    "an ambiguous residual": (
        heads.eagle3_speculators,
        lambda c, t: c.pop("norm_before_residual"),
        "does not say norm_before_residual",
    ),
    "no inner states": (heads.eagle3, say(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    "parallel drafting": (heads.eagle3, say(parallel_drafting=True), "it drafts in parallel"),
    "extra norms of EAGLE": (heads.eagle_speculators, say(layernorms=True), "(layernorms) are not supported"),
    "another verifier": (
        heads.eagle3_speculators,
        say(speculators_config=heads.about("Qwen3ForCausalLM")),
        "it was made for Qwen3ForCausalLM (some/target), and tiny is LlamaForCausalLM",
    ),
    "activation": (heads.eagle3, say(hidden_act="gelu"), "its activation is gelu"),
    "positions": (
        heads.eagle3,
        say(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "its positions are scaled by dynamic",
    ),
    "a part of the positions": (heads.eagle3, say(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "quantised weights": (
        heads.eagle3,
        lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
        "fc.weight is stored as I8; only plain float weights are read",
    ),
    "Medusa: a gap in the heads": (heads.medusa, drop("1.0.linear.weight"), "missing: blocks.1.layers.0.weight"),
    "Medusa: no output matrix": (heads.medusa, drop("2.2.weight"), "missing: lm_heads.2.weight"),
    "Medusa: no token map": (heads.medusa_vllm, drop("token_map"), "missing: token_map"),
    "Medusa: biases that vLLM ignores": (
        heads.medusa_vllm,
        put("blocks.0.layers.0.bias", torch.ones(64)),
        "unknown: blocks.0.layers.0.bias",
    ),
    "Medusa: token map out of range": (heads.medusa_vllm, nudge("token_map", 199, 384), "outside the target's 384 ids"),
    "Medusa: token map twice": (
        heads.medusa_vllm,
        lambda c, t: t.update(token_map=torch.zeros(200, dtype=torch.long)),
        "token_map maps two draft ids to the same target id 0",
    ),
    "MTP: a second layer": (
        heads.mtp,
        put("mtp.layers.1.input_layernorm.weight", torch.ones(64)),
        "unknown: mtp.layers.1.input_layernorm.weight",
    ),
    "MTP: of Qwen3-Next in a folder of its own": (heads.mtp, say(model_type="qwen3_next"), "name no draft"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    build, change, reason = MISMATCHES[case]
    found = reasons(tmp_path, changed(build, change))
    assert any(reason in sentence for sentence in found), found
    name = find_layout(*_described(tmp_path))
    assert name is not None
    with pytest.raises(IncompatibleError) as refused:
        heads.load_proposer(tmp_path, name.proposer, predictable())
    assert reason in str(refused.value)


def _described(folder: Path) -> tuple[Any, Any]:
    files = open_files(str(folder))
    return files.config, files.shapes


def test_the_embeddings_of_a_head_of_another_width_must_be_there(tmp_path: Path) -> None:
    checkpoint = changed(heads.eagle3, drop("embed_tokens.weight"), hidden=48)
    assert reasons(tmp_path, checkpoint) == ["missing: embed_tokens.weight"]


def test_layer_numbers_are_read_as_their_engine_counts_them() -> None:
    """vLLM counts the stream in front of a layer, SGLang (in eagle_config) behind it."""
    target = facts(predictable())
    config, _ = heads.eagle3(predictable())
    sizes = read_sizes("x", config)
    assert eagle3_settings(config, sizes, target).aux == (2, 1, 0)
    assert eagle3_settings({**config, "eagle_aux_hidden_state_layer_ids": [0, 1]}, sizes, target).aux == (0, 1)
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    assert eagle3_settings({**config, "eagle_config": nested}, sizes, target).aux == (1, 2)
    thirty = TargetFacts("smollm", 576, 49_152, 30)
    assert eagle3_settings(config, sizes, thirty).aux == (2, 15, 27)


@pytest.mark.parametrize(
    ("proposer", "build", "use"),
    [("eagle", heads.eagle3, "eagle3"), ("eagle3", heads.eagle, "eagle"), ("medusa", heads.mtp, "mtp")],
)
def test_the_wrong_proposer_is_told_the_right_one(
    proposer: str, build: Callable[..., Checkpoint], use: str, tmp_path: Path
) -> None:
    files = open_files(str(heads.save(tmp_path, build(predictable()))))
    with pytest.raises(ModelError, match=f"choose the proposer {use}"):
        require("it", proposer, files.config, files.shapes)


def test_other_speculators_and_plain_models_are_no_heads(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a speculators model of type 'mlp'"):
        require("it", "eagle3", {"speculators_model_type": "mlp"}, {})
    with pytest.raises(ModelError, match=r"no draft head that mtp could use: it holds model\.layers"):
        require("it", "mtp", {}, {"model.layers.0.mlp.up_proj.weight": (4, 4)})


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(heads.eagle(predictable())[0]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match=r"only as pytorch_model\.bin, a pickle, which Redline never loads"):
        open_files(str(tmp_path))


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = heads.save(tmp_path, heads.mtp(predictable()))
    (folder / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match=r"model\.safetensors is no readable safetensors file"):
        open_files(str(folder))
    heads.save(tmp_path, heads.mtp(predictable()))
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        open_files(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        open_files(str(folder))


@pytest.mark.parametrize("value", [None, 0, "64", True])
def test_a_size_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(ModelError, match=r"says hidden_size = .*; a positive whole number is needed"):
        read_sizes("it", {**heads.sizes(), "hidden_size": value})


def test_a_sliding_window_shortens_the_context() -> None:
    assert read_sizes("it", heads.sizes(sliding_window=100, use_sliding_window=True)).context == 100
    assert read_sizes("it", heads.sizes(sliding_window=100, use_sliding_window=False)).context == 3072


def test_the_config_alone_is_enough_to_refuse(tmp_path: Path) -> None:
    """A Hub id whose weights are not here: what its config says is checked, the rest at loading."""
    files = open_files(str(heads.save(tmp_path, changed(heads.eagle3, say(vocab_size=400)))))
    bare = type(files)(files.name, files.config)
    layout = find_layout(bare.config, bare.shapes)
    assert layout is not None
    assert fit.problems(bare, layout, facts(predictable())) == ["its vocabulary has 400 entries, that of tiny 384"]


def test_reading_a_layout_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import decoder.heads.fit, decoder.heads.layout, decoder.heads.files, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- from the Hub ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub, without a network: ``someone/head`` is there whole, ``someone/config`` only its config."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("head", "config", "pickle"):
        place = tmp_path / f"models--someone--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("abc123")
        heads.save(place / "snapshots" / "abc123", heads.eagle3(predictable()))
        if name != "head":
            (place / "snapshots" / "abc123" / "model.safetensors").unlink()
    return tmp_path


def test_a_head_from_the_hub_is_read_from_its_cache(hub: Path) -> None:
    files = open_files("someone/head")
    assert files.revision == "abc123"
    assert fit.problems(files, require("it", "eagle3", files.config, files.shapes), facts(predictable())) == []
    assert set(files.tensors(["d2t"])) == {"d2t"}
    assert open_files("someone/head", weights=False).shapes == files.shapes, "what is here is checked whole"


def test_of_a_head_that_is_not_here_the_config_is_checked(hub: Path) -> None:
    files = open_files("someone/config", weights=False)
    assert not files.shapes
    assert fit.problems(files, require("it", "eagle3", files.config, {}), facts(predictable())) == []


def test_a_head_without_safetensors_on_the_hub_is_refused(hub: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \.safetensors weights on the Hub; Redline never loads a pickle"):
        open_files("someone/pickle")


def test_a_head_that_cannot_be_fetched_says_so(hub: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot load the draft someone/unknown: .*Hub cannot be reached"):
        open_files("someone/unknown")
