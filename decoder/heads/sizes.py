"""The sizes of a head's decoder layers, from its config.json (which speculators nest once more)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoder.errors import ModelError

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


@dataclass(frozen=True)
class Sizes:
    """One or more Llama-shaped layers. ``context`` is the longest text in tokens that they were made for."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    context: int
    rope: Mapping[str, Any]
    """Rope settings, in the names of transformers' LlamaConfig."""
    problems: tuple[str, ...] = ()
    """What the layers ask for that Redline does not compute."""


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a head's config that describes its layers."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) else config


def read_sizes(name: str, config: Mapping[str, Any]) -> Sizes:
    """Raises ModelError where a size is missing or no number."""
    layer = layer_config(config)

    def size(key: str, default: int | None = None) -> int:
        value = layer.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"the config.json of {name} says {key} = {value!r}; a positive whole number is needed")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    eps = layer.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise ModelError(f"the config.json of {name} says rms_norm_eps = {eps!r}; a number is needed")
    rope = {key: layer[key] for key in _ROPE if layer.get(key) is not None}
    context, window = size("max_position_embeddings", 2048), _window(layer)
    return Sizes(
        hidden=hidden,
        intermediate=size("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        layers=size("num_hidden_layers", 1),
        eps=float(eps),
        # A layer that forgets what lies behind its window is exact only within it.
        context=min(context, window) if window else context,
        rope=rope,
        problems=tuple(_problems(layer, rope)),
    )


def _window(layer: Mapping[str, Any]) -> int | None:
    window, kinds = layer.get("sliding_window"), layer.get("layer_types")
    sliding = "sliding_attention" in kinds if kinds else layer.get("use_sliding_window", False)
    return int(window) if window and sliding else None


def _problems(layer: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    found = []
    activation = layer.get("hidden_act", "silu")
    if activation != "silu":
        found.append(f"its activation is {activation}, Redline's heads compute silu")
    scaling = {**(rope.get("rope_scaling") or {}), **(rope.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("dynamic", "longrope"):
        found.append(f"its positions are scaled by {kind}, which depends on the length of the text")
    partial = rope.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        found.append(f"only a part of each head is rotated (partial_rotary_factor {partial})")
    return found
