"""Draft heads for tests: small synthetic checkpoints in every public layout, and an independent forward of each.

The forwards here are the plainest ones: no cache, no batch, everything from the beginning for every draft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from decoder.heads.expect import TargetFacts
from decoder.heads.files import open_files
from decoder.heads.layout import require
from decoder.heads.load import borrow, load_head
from decoder.heads.models import MedusaHeads
from decoder.heads.runner import HeadRunner
from decoder.proposers.base import Proposer
from decoder.proposers.heads import HeadProposer, MedusaProposer
from tests.tiny import tiny_llama

H, V, L, THETA, EPS = 64, 384, 3, 10_000.0, 1e-6
HEADS, KV, D, FF = 4, 2, 16, 96

Tensors = dict[str, Tensor]
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


def load_proposer(folder: Path, name: str, model: Any) -> Proposer:
    """The proposer ``name`` with the head in ``folder``, for a target that computes on the CPU."""
    files = open_files(str(folder))
    layout = require(str(folder), name, files.config, files.shapes)
    head = load_head(files, layout, facts(model), borrow(model))
    if isinstance(head, MedusaHeads):
        return MedusaProposer(head, device="cpu")
    return HeadProposer(name, HeadRunner(head, vocab_size=V, device="cpu"))


# --- the independent forward ----------------------------------------------------------------------------------------


@torch.no_grad()
def states(model: Any, ids: Sequence[int]) -> list[Tensor]:
    """The target's hidden states [T, H], numbered as transformers numbers them."""
    output = model.model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    return [state[0] for state in output.hidden_states]


@torch.no_grad()
def scores(model: Any, ids: Sequence[int]) -> Tensor:
    """The target's logits [T, V]."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0]


@lru_cache
@torch.no_grad()
def sample_text(model: Any, rows: int = 24, length: int = 25) -> tuple[int, ...]:
    """Text that the target writes itself: half of the rows at temperature 1, half greedy."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (rows, 1), generator=generator)
    for _ in range(length):
        logits = model(input_ids=ids).logits[:, -1]
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        drawn[rows // 2 :] = logits[rows // 2 :].argmax(-1, keepdim=True)
        ids = torch.cat([ids, drawn], 1)
    return tuple(ids.flatten().tolist())


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of x [T, heads, D]: pair (i, i + D/2) turns by position / theta^(2i/D)."""
    angles = positions[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def layer_forward(t: Tensors, at: str, read: Tensor, residual: Tensor) -> Tensor:
    """One Llama layer over the whole text [T, ...], position by position from 0."""
    width, positions = len(read), torch.arange(len(read))

    def project(name: str, count: int) -> Tensor:
        key = f"{at}self_attn.{name}_proj."
        return F.linear(read, t[key + "weight"], t.get(key + "bias")).view(width, count, D)

    q, k, v = project("q", HEADS), project("k", KV), project("v", KV)
    if f"{at}self_attn.q_norm.weight" in t:
        q, k = rms(q, t[f"{at}self_attn.q_norm.weight"]), rms(k, t[f"{at}self_attn.k_norm.weight"])
    q, k = turn(q, positions), turn(k, positions)
    mixed = []
    for head in range(HEADS):
        group = head * KV // HEADS
        weights = q[:, head] @ k[:, group].T / D**0.5
        weights = weights.masked_fill(torch.ones(width, width).triu(1).bool(), -torch.inf).softmax(-1)
        mixed.append(weights @ v[:, group])
    key = f"{at}self_attn.o_proj."
    hidden = residual + F.linear(torch.cat(mixed, -1), t[key + "weight"], t.get(key + "bias"))
    x = rms(hidden, t[f"{at}post_attention_layernorm.weight"])
    gate, up = x @ t[f"{at}mlp.gate_proj.weight"].T, x @ t[f"{at}mlp.up_proj.weight"].T
    return hidden + (F.silu(gate) * up) @ t[f"{at}mlp.down_proj.weight"].T


def medusa_state(t: Tensors, x: Tensor, head: int) -> Tensor:
    """The residual blocks of one head, in either layout's names."""
    for j in range(8):
        for name in (f"{head}.{j}.linear", f"blocks.{head}.layers.{j}"):
            if f"{name}.weight" in t:
                x = x + F.silu(F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")))
    return x


def forward(
    kind: str, config: dict[str, Any], t: Tensors, model: Any, ids: Sequence[int], drafts: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """(what the head feeds back [T, hidden], logits [V] of the next draft) behind the text ``ids`` and ``drafts``."""
    every = states(model, ids[:-1])
    embeddings = t.get("embed_tokens.weight", model.model.embed_tokens.weight)
    if kind == "eagle3":
        aux = config.get("eagle_aux_hidden_state_layer_ids", [2, L // 2, L - 3])
        parts = [every[i] for i in aux]
        if config.get("fc_norm"):
            parts = [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        wide = torch.cat(parts, -1)
        if config.get("norm_before_fc"):
            wide = rms(wide, t["input_norm.weight"])
        state = wide @ t["fc.weight"].T
    else:
        state = every[-1]
    tokens = list(ids[1:])
    run = {"eagle3": _eagle3, "eagle": _eagle, "mtp": _mtp, "mimo": _mimo}[kind]
    with torch.no_grad():
        for draft in (*drafts, None):
            out = run(config, t, embeddings[torch.tensor(tokens)], state)
            if draft is not None:
                tokens.append(draft)
                state = torch.cat([state, out[-1:]])
        return out, _score(kind, config, t, model, out[-1])


def _eagle3(config: dict[str, Any], t: Tensors, embedded: Tensor, state: Tensor) -> Tensor:
    at = "midlayer." if "midlayer.hidden_norm.weight" in t else "layers.0."
    normed = rms(state, t[f"{at}hidden_norm.weight"])
    read = torch.cat([rms(embedded, t[f"{at}input_layernorm.weight"]), normed], -1)
    x = layer_forward(t, at, read, normed if config.get("norm_before_residual") else state)
    i = 1
    while f"layers.{i}.input_layernorm.weight" in t:
        x = layer_forward(t, f"layers.{i}.", rms(x, t[f"layers.{i}.input_layernorm.weight"]), x)
        i += 1
    return rms(x, t["norm.weight"]) if config.get("norm_output") else x


def _eagle(config: dict[str, Any], t: Tensors, embedded: Tensor, state: Tensor) -> Tensor:
    fc, at = ("fusion_fc", "transformer.") if "fusion_fc.weight" in t else ("fc", "layers.0.")
    x = F.linear(torch.cat([embedded, state], -1), t[f"{fc}.weight"], t.get(f"{fc}.bias"))
    return layer_forward(t, at, x, x)


def _mtp(config: dict[str, Any], t: Tensors, embedded: Tensor, state: Tensor) -> Tensor:
    parts = [rms(embedded, t["mtp.pre_fc_norm_embedding.weight"]), rms(state, t["mtp.pre_fc_norm_hidden.weight"])]
    x = torch.cat(parts, -1) @ t["mtp.fc.weight"].T
    x = layer_forward(t, "mtp.layers.0.", rms(x, t["mtp.layers.0.input_layernorm.weight"]), x)
    return rms(x, t["mtp.norm.weight"])


def _mimo(config: dict[str, Any], t: Tensors, embedded: Tensor, state: Tensor) -> Tensor:
    at = "model.mtp_layers.0."
    embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
    parts = [rms(state, t[f"{at}hidden_layernorm.weight"]), rms(embedded, t[f"{at}token_layernorm.weight"])]
    x = torch.cat(parts, -1) @ t[f"{at}input_proj.weight"].T
    x = layer_forward(t, at, rms(x, t[f"{at}input_layernorm.weight"]), x)
    return rms(x, t[f"{at}final_layernorm.weight"])


def _score(kind: str, config: dict[str, Any], t: Tensors, model: Any, out: Tensor) -> Tensor:
    if kind != "eagle3":
        return out @ model.lm_head.weight.T
    normed = out if config.get("norm_output") else rms(out, t["norm.weight"])
    logits = normed @ t["lm_head.weight"].T
    full = torch.full((V,), -torch.inf)
    for i, score in enumerate(logits):
        full[i + int(t["d2t"][i])] = score
    return full


def medusa_logits(t: Tensors, model: Any, ids: Sequence[int], head: int) -> Tensor:
    """Logits [V] of a Medusa head's draft behind the text ``ids``, whose newest token the target just gave."""
    x = medusa_state(t, states(model, ids[:-1])[-1][-1], head)
    if "token_map" in t:
        full = torch.full((V,), -torch.inf)
        full[t["token_map"]] = x @ t.get(f"lm_heads.{head}.weight", t["lm_heads.0.weight"]).T
        return full
    (matrix,) = (v for n, v in t.items() if re.match(rf"{head}\.\d+\.weight$", n))
    return x @ matrix.T
