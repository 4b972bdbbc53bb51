"""MTP layers inside the target's own checkpoint: DeepSeek-V3, Qwen3-Next and MiMo, as tiny models with those layouts.

For the first two the reference is transformers' own MTP layer, without a cache and from the beginning for every draft.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_layers import MtpModel

from decoder import assemble_heads, catalog
from decoder.engine import SpeculativeDecoder
from decoder.errors import ModelError
from decoder.loading import load_config
from decoder.request import GenerationRequest, SamplingParams
from decoder.trace import violations
from tests import head_forward, heads
from tests.decoder.test_head_forward import assert_drafts_are
from tests.tiny import tiny_tokenizer

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def deepseek() -> Any:
    """Latent attention and experts."""
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            num_hidden_layers=LAYERS + 1,
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    )


def qwen3_next() -> Any:
    """Gated attention, experts, norms of 1 + w; without the layers whose state cannot be rolled back."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            num_hidden_layers=LAYERS + 1,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            layer_types=["full_attention"] * (LAYERS + 1),
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    )


def write(folder: Path, model: Any, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Save ``model``, then replace its tensors and change its config."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, **config}))
    return folder


def saved(folder: Path, model: Any) -> dict[str, Tensor]:
    """The tensors of a model as its checkpoint names them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def with_last_layer_as_mtp(folder: Path, style: str) -> Path:
    """A model of one layer more becomes one whose checkpoint holds that layer as its MTP layer."""
    torch.manual_seed(0)
    model = {"deepseek": deepseek, "qwen3-next": qwen3_next}[style]()
    tensors = saved(folder, model)
    make, at = heads.noise(3), f"model.layers.{LAYERS}."
    around = {"enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128)}
    config: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if style == "deepseek":
        extra = {f"{at}{n}.weight": make(*s, scale=0.0 if len(s) == 1 else 0.2) for n, s in around.items()}
        extra[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        extra[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        config |= {"num_nextn_predict_layers": 1}
    else:
        tensors = {name.replace(at, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        names = {"pre_fc_norm_embedding": (64,), "pre_fc_norm_hidden": (64,), "norm": (64,), "fc": (64, 128)}
        extra = {f"mtp.{n}.weight": make(*s, scale=0.2) for n, s in names.items()}
        config |= {"layer_types": ["full_attention"] * LAYERS}
    return write(folder, model, {**tensors, **extra}, **config)


def mimo(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=heads.L, num_key_value_heads=2))
    config, tensors = heads.mimo(model)
    kept = {key: config[key] for key in ("architectures", "model_type", "num_nextn_predict_layers")}
    return write(folder, model, {k: v.detach().clone() for k, v in tensors.items()}, **kept, num_hidden_layers=heads.L)


def ask(target: Path, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        "the quick brown fox",
        chat=False,
        target=str(target),
        proposer="mtp",
        max_new_tokens=20,
        ignore_eos=True,
        dtype="float32",
        device="cpu",
    ).replace(**changes)


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(catalog, "DRAFTS_DIR", tmp_path / "none")
    yield
    assemble_heads._kept.clear()


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_layer(folder: Path, style: str) -> tuple[Any, Any]:
    """The target and its MTP layer, loaded by transformers alone."""
    model = plain_model(folder)
    described = copy.copy(model)
    described.config = copy.deepcopy(model.config)
    described.config.num_mtp_layers = 1
    described.config.mtp_layer_types = ["full_attention"]
    pattern = rf"^model\.layers\.{LAYERS}\." if style == "deepseek" else r"^mtp\."
    described._keys_to_ignore_on_load_unexpected = [pattern]
    return model, MtpModel.from_pretrained(described).eval()


@torch.no_grad()
def from_scratch(model: Any, mtp: Any, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Logits [V] of the next draft: one MTP layer over the whole text, once for every draft before it."""
    state = model.model(input_ids=torch.tensor([list(text[:-1])])).last_hidden_state
    tokens = list(text[1:])
    for draft in (*drafts, None):
        embedded = model.get_input_embeddings()(torch.tensor([tokens]))
        positions = torch.arange(len(tokens))[None]
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
        rope = mtp.rotary_emb(embedded, positions)
        out = mtp.layers[0](
            embedded, state, position_embeddings=rope, attention_mask=mask, position_ids=positions, cache=None
        )
        if draft is not None:
            tokens.append(draft)
            state = torch.cat([state, out[:, -1:]], 1)
    return model.lm_head(out[0, -1])


def check(folder: Path, expected: Callable[[list[int], list[int]], Tensor]) -> SpeculativeDecoder:
    """A sampled run drafts what ``expected`` says, and a greedy one changes nothing."""
    decoder = SpeculativeDecoder.load(ask(folder))
    assert decoder.not_speculating is None
    run = decoder.run(ask(folder, sampling=SamplingParams(temperature=1.0, seed=5)))
    assert violations(run) == []
    assert_drafts_are(run, expected)
    greedy = decoder.run(ask(folder, max_new_tokens=40))
    assert greedy.output_ids == SpeculativeDecoder(decoder.target).run(ask(folder, max_new_tokens=40)).output_ids
    assert greedy.metrics["num_draft_tokens"] > 0
    assert greedy.draft == str(folder)
    return decoder


@pytest.mark.parametrize("style", ["deepseek", "qwen3-next"])
def test_an_mtp_layer_of_the_targets_own_kind_drafts(style: str, tmp_path: Path) -> None:
    folder = with_last_layer_as_mtp(tmp_path / "target", style)
    model, mtp = transformers_layer(folder, style)
    decoder = check(folder, lambda text, drafts: from_scratch(model, mtp, text, drafts))
    run = decoder.run(ask(folder, tree="static", tree_nodes=6, k=3))
    assert run.output_ids == SpeculativeDecoder(decoder.target).run(ask(folder)).output_ids


def test_mimo_drafts_with_its_own_layer(tmp_path: Path) -> None:
    """The state stands before the embedding, the layer has biases, and no code of the checkpoint is run."""
    folder = mimo(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.M"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mimo.py").write_text("raise RuntimeError('code of a checkpoint was run')")
    model, tensors = plain_model(folder), load_file(folder / "model.safetensors")
    decoder = check(folder, lambda text, drafts: head_forward.forward("mimo", {}, tensors, model, text, drafts)[1])
    assert decoder.target.versions["target_implementation"] == "MiMoForCausalLM"
    assert load_config(str(folder)).model_type == "mimo"
    assert decoder.target.runner.path.startswith("eager, fused")


def test_a_layer_with_a_missing_tensor_is_not_used(tmp_path: Path) -> None:
    folder = with_last_layer_as_mtp(tmp_path / "target", "deepseek")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.eh_proj.weight"]
    tensors[f"model.layers.{LAYERS}.eh_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"the MTP layer of .* cannot be loaded: .*missing.*eh_proj"):
        SpeculativeDecoder.load(ask(folder, draft=str(folder)))
    run = SpeculativeDecoder.load(ask(folder)).run(ask(folder))
    assert "cannot be loaded" in run.metrics["not_speculating"]
