"""Draft heads for tests: small synthetic checkpoints in every public layout, made so that they foretell something."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from decoder import kernel
from decoder.heads.expect import TargetFacts
from decoder.heads.files import open_files
from decoder.heads.layer import HeadLayer, Output
from decoder.heads.layout import require
from decoder.heads.load import borrow, load_head
from decoder.heads.models import MedusaHeads, RecurrentHead
from decoder.heads.runner import HeadRunner
from decoder.kernel_runner import give_layers
from decoder.proposers.base import Proposer
from decoder.proposers.heads import HeadProposer, MedusaProposer
from tests.compiled_steps import compiling
from tests.head_forward import (
    EPS,
    FF,
    HEADS,
    KV,
    THETA,
    D,
    H,
    L,
    Tensors,
    V,
    forward,
    medusa_state,
    rms,
    sample_text,
    scores,
    states,
)
from tests.tiny import tiny_llama

Checkpoint = tuple[dict[str, Any], Tensors]


@lru_cache
def predictable(seed: int = 0) -> Any:
    """A tiny Llama whose next token hangs mostly on the current one: a head can foretell some of it, not all."""
    import copy

    model = copy.deepcopy(tiny_llama(seed, L, V))
    model.config.architectures = ["LlamaForCausalLM"]
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(120)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    return model


def facts(model: Any, name: str = "tiny") -> TargetFacts:
    """What heads are checked against."""
    return TargetFacts.of_config(name, model.config)


# --- building -------------------------------------------------------------------------------------------------------


def noise(seed: int) -> Callable[..., Tensor]:
    """Normal weights of a given scale; norms (one dimension, scale 0) around 1."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, scale: float = 0.2) -> Tensor:
        if scale == 0:
            return 1 + 0.1 * torch.randn(*shape, generator=generator)
        return scale * torch.randn(*shape, generator=generator)

    return make


def layer_tensors(
    make: Callable[..., Tensor],
    prefix: str,
    *,
    hidden: int = H,
    inputs: int | None = None,
    norm: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
) -> Tensors:
    inputs = inputs or hidden
    sizes = {"q": (HEADS * D, inputs), "k": (KV * D, inputs), "v": (KV * D, inputs), "o": (hidden, HEADS * D)}
    found = {f"{prefix}self_attn.{n}_proj.weight": make(*shape) for n, shape in sizes.items()}
    if bias:
        found |= {f"{prefix}self_attn.{n}_proj.bias": make(shape[0]) for n, shape in sizes.items() if n != "o"}
    if qk_norm:
        found |= {f"{prefix}self_attn.{n}_norm.weight": make(D, scale=0) for n in ("q", "k")}
    for n, shape in {"gate": (FF, hidden), "up": (FF, hidden), "down": (hidden, FF)}.items():
        found[f"{prefix}mlp.{n}_proj.weight"] = make(*shape)
    found[f"{prefix}post_attention_layernorm.weight"] = make(hidden, scale=0)
    if norm:
        found[f"{prefix}input_layernorm.weight"] = make(hidden, scale=0)
    return found


def quiet(tensors: Tensors) -> Tensors:
    """A layer that adds little to what passes through it."""
    return {k: 0.08 * v if k.endswith(("o_proj.weight", "down_proj.weight")) else v for k, v in tensors.items()}


def sizes(hidden: int = H, **more: Any) -> dict[str, Any]:
    """The part of a config that describes the layers."""
    return {
        "hidden_size": hidden,
        "intermediate_size": FF,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 3072,
        "vocab_size": V,
        **more,
    }


def eagle(model: Any, seed: int = 1) -> Checkpoint:
    """EAGLE-1/2 as SafeAILab publishes it: embeddings stored once more, a bias in fc. Made to foretell: fc passes the
    embedding on."""
    make = noise(seed)
    tensors = quiet(layer_tensors(make, "layers.0.", norm=False))
    passing = torch.cat([torch.eye(H) / 24, 0.02 * make(H, H)], 1)
    tensors |= {"fc.weight": passing, "fc.bias": 0.01 * make(H), "embed_tokens.weight": model.model.embed_tokens.weight}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes()}, tensors


def eagle_speculators(model: Any, seed: int = 2) -> Checkpoint:
    """The same in the names of speculators."""
    _, plain = eagle(model, seed)
    renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    tensors = {}
    for name, tensor in plain.items():
        if name != "embed_tokens.weight":
            old = next(old for old in renamed if name.startswith(old))
            tensors[renamed[old] + name.removeprefix(old)] = tensor
    config = {
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "layernorms": False,
        "fusion_bias": True,
        "transformer_layer_config": sizes(model_type="llama"),
        "speculators_config": about(),
    }
    return config, tensors


def about(architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """The speculators_config of a head."""
    return {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target", "architectures": [architecture]},
    }


def draft_ids(count: int = 300) -> Tensor:
    """A draft vocabulary: ``count`` of the target's ids, ascending, with gaps."""
    generator = torch.Generator().manual_seed(7)
    return torch.randperm(V, generator=generator)[:count].sort().values


def vocabulary(ids: Tensor) -> Tensors:
    """d2t and t2d of a draft vocabulary."""
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}


def eagle3(model: Any, seed: int = 3, prefix: str = "midlayer.", hidden: int = H, **flags: Any) -> Checkpoint:
    """EAGLE-3 as vLLM reads it; ``flags`` go to the config. Its output matrix is fitted to the target."""
    make, ids = noise(seed), draft_ids()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        **sizes(hidden),
        **flags,
    }
    aux = flags.get("eagle_aux_hidden_state_layer_ids", [2, L // 2, L - 3])
    tensors = {
        "fc.weight": make(hidden, len(aux) * H, scale=0.1),
        "norm.weight": make(hidden, scale=0),
        f"{prefix}hidden_norm.weight": make(hidden, scale=0),
        **layer_tensors(make, prefix, hidden=hidden, inputs=2 * hidden),
        **vocabulary(ids),
    }
    # Queries are like keys, so that a token looks at itself most: its own embedding then reaches the output.
    key = tensors[f"{prefix}self_attn.k_proj.weight"].view(KV, D, -1)
    tensors[f"{prefix}self_attn.q_proj.weight"] = key.repeat_interleave(HEADS // KV, 0).flatten(0, 1)
    if hidden != H:
        config["target_hidden_size"] = H
        tensors["embed_tokens.weight"] = make(V, hidden, scale=1.0)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = make(len(aux) * H, scale=0)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": make(H, scale=0) for i in range(len(aux))}
    tensors["lm_head.weight"] = make(len(ids), hidden)
    fit_output(model, config, tensors)
    return config, tensors


def eagle3_speculators(model: Any, seed: int = 4, **flags: Any) -> Checkpoint:
    """EAGLE-3 in the speculators format: nested config, layers.0.*, explicit norm flags."""
    flags = {"norm_before_residual": True, **flags}
    config, tensors = eagle3(model, seed, prefix="layers.0.", **flags)
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": about(),
        "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": sizes(model_type="llama"),
        **flags,
    }
    return nested, tensors


def fit_output(model: Any, config: dict[str, Any], tensors: Tensors) -> None:
    """Least squares: the output matrix that comes closest to the target's own scores on some text of its own."""
    ids = sample_text(model)
    out = forward("eagle3", config, tensors, model, ids)[0]
    normed = out if config.get("norm_output") else rms(out, tensors["norm.weight"])
    wanted = scores(model, ids)[1:]  # entry p foretells the token at p + 2
    chosen = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    gram = normed.T @ normed + 1e-2 * torch.eye(normed.shape[1])
    tensors["lm_head.weight"] = torch.linalg.solve(gram, normed.T @ wanted[:, chosen]).T.contiguous()


def medusa(model: Any, seed: int = 5, count: int = 4, blocks: int = 2) -> Checkpoint:
    """Medusa in its original names, with biases; a lying config, as public ones are."""
    make = noise(seed)
    tensors = {}
    for i in range(count):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = make(H, H, scale=0.05)
            tensors[f"{i}.{j}.linear.bias"] = make(H, scale=0.05)
        tensors[f"{i}.{blocks}.weight"] = make(V, H)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/target"}
    fit_medusa(model, tensors)
    return config, tensors


def medusa_vllm(model: Any, seed: int = 6, count: int = 4, shared: bool = True) -> Checkpoint:
    """Medusa as vLLM reads it, with a truncated vocabulary; ``shared``: one output matrix."""
    make, ids = noise(seed), draft_ids(200)
    tensors = {f"blocks.{i}.layers.0.weight": make(H, H) for i in range(count)}
    tensors |= {f"lm_heads.{i}.weight": make(len(ids), H) for i in range(1 if shared else count)}
    tensors["token_map"] = ids
    fit_medusa(model, tensors)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": count,
        "num_hidden_layers": 1,
        "truncated_vocab_size": len(ids),
        "original_lm_head": shared,
        "medusa_fc_bias": False,
    }
    return config, tensors


def fit_medusa(model: Any, tensors: Tensors) -> None:
    """Least squares as above: head i foretells the token at p + 2 + i; a shared matrix is fitted to the first."""
    ids = sample_text(model)
    last, wanted = states(model, ids)[-1], scores(model, ids)
    chosen = tensors.get("token_map", torch.arange(V))
    for name in [n for n in tensors if re.match(r"(lm_heads\.)?\d+(\.\d+)?\.weight$", n)]:
        i = int(name.removeprefix("lm_heads.").split(".")[0])
        x = medusa_state(tensors, last, i)[: -1 - i]
        gram = x.T @ x + 1e-2 * torch.eye(H)
        tensors[name] = torch.linalg.solve(gram, x.T @ wanted[1 + i :][:, chosen]).T.contiguous()


def mtp(model: Any, seed: int = 8) -> Checkpoint:
    """Our own: one Llama layer in the names of Qwen3-Next, in a folder of its own."""
    make = noise(seed)
    tensors = quiet(layer_tensors(make, "mtp.layers.0."))
    tensors |= {f"mtp.{n}.weight": make(H, scale=0) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(H), 0.02 * make(H, H)], 1)
    return {"architectures": ["RedlineMTP"], "model_type": "mtp", "num_nextn_predict_layers": 1, **sizes()}, tensors


def mimo(model: Any, seed: int = 9) -> Checkpoint:
    """MiMo's MTP layer (a Qwen2 layer: biases) as it stands in the target's own checkpoint."""
    make = noise(seed)
    at = "model.mtp_layers.0."
    tensors = layer_tensors(make, at, bias=True)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    tensors |= {f"{at}{n}.weight": make(H, scale=0) for n in norms}
    tensors[f"{at}input_proj.weight"] = make(H, 2 * H)
    tensors.update(model.state_dict())
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        **sizes(),
    }, tensors


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write config.json and model.safetensors."""
    config, tensors = checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


ON_KERNEL = False
"""Whether heads that are loaded from now on compute their layers with the kernel (``layers_both_ways`` sets it)."""


@pytest.fixture(params=["eager", "kernel"] if kernel.compiler() else ["eager"])
def layers_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test runs with eager layers and with the kernel's."""
    monkeypatch.setattr("tests.heads.ON_KERNEL", request.param == "kernel")


def load(folder: Path, name: str, model: Any) -> RecurrentHead | MedusaHeads:
    """The head in ``folder`` for the proposer ``name``."""
    files = open_files(str(folder))
    layout = require(str(folder), name, files.config, files.shapes)
    head = load_head(files, layout, facts(model), borrow(model))
    if ON_KERNEL:
        with compiling(kernel=True):
            give_layers(head, "float32")
            for layer in head.modules():
                if isinstance(layer, HeadLayer | Output):
                    assert layer.held is not None
                    layer.held.settle()
                    assert layer.held.steps
    return head


def proposer_of(name: str, head: RecurrentHead | MedusaHeads) -> Proposer:
    """The proposer ``name`` around ``head``, on the CPU."""
    if isinstance(head, MedusaHeads):
        return MedusaProposer(head, device="cpu")
    return HeadProposer(name, HeadRunner(head, vocab_size=V, device="cpu"))


def load_proposer(folder: Path, name: str, model: Any) -> Proposer:
    """The proposer ``name`` with the head in ``folder``, for a target that computes on the CPU."""
    return proposer_of(name, load(folder, name, model))


def tiny_head(name: str) -> Proposer:
    """A fresh proposer with a plain head for ``predictable()``."""
    return proposer_of(name, load_tiny(name))


def load_tiny(name: str) -> RecurrentHead | MedusaHeads:
    """The plain head of a kind for ``predictable()``."""
    return _load_tiny(name, ON_KERNEL)


@lru_cache
def _load_tiny(name: str, on_kernel: bool) -> RecurrentHead | MedusaHeads:
    with tempfile.TemporaryDirectory() as folder:
        build = {"eagle": eagle, "eagle3": eagle3, "mtp": mtp, "medusa": medusa}[name]
        return load(save(Path(folder), build(predictable())), name, predictable())
