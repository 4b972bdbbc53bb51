"""An independent forward of every draft head, the plainest there is: no cache, no batch, everything from the beginning
for every draft."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

H, V, L, THETA, EPS = 64, 384, 3, 10_000.0, 1e-6
"""The tiny target: hidden size, vocabulary, layers; and what its heads share with it."""
HEADS, KV, D, FF = 4, 2, 16, 96

Tensors = dict[str, Tensor]


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
