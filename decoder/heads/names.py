"""Which tensors a head of each layout holds, and of which shape. Whatever else it holds, or lacks, refuses it.

A table maps canonical names to shapes; ``canonical`` turns a file's own name into a canonical one. Nothing is ever
loaded loosely: a tensor that no table names may change what the head computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from decoder.heads.layout import Layout, Shapes, strip
from decoder.heads.sizes import Sizes

Table = dict[str, tuple[int, ...]]

_DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Old exporters store tables that follow from the config."""
_MEDUSA_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_MEDUSA_HEAD = re.compile(r"^(\d+)\.\d+\.weight$")
_RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0.", "midlayer.": "layers.0."}


@dataclass(frozen=True)
class Expected:
    """``must`` be there, ``may`` be there."""

    must: Table
    may: Table = field(default_factory=dict)

    def problems(self, shapes: Shapes, own: Mapping[str, str]) -> list[str]:
        """What differs from ``shapes`` (by canonical name; ``own`` gives the file's names), as sentences."""
        found = []
        missing = sorted(self.must.keys() - shapes.keys())
        unknown = sorted(own[name] for name in shapes.keys() - self.must.keys() - self.may.keys())
        if missing:
            found.append(f"missing: {_some(missing)}")
        if unknown:
            found.append(f"unknown: {_some(unknown)}")
        for name, shape in sorted({**self.must, **self.may}.items()):
            if name in shapes and shapes[name] != shape:
                found.append(f"{own[name]} is {list(shapes[name])}, expected {list(shape)}")
        return found


def canonical(shapes: Shapes, layout: Layout) -> dict[str, str]:
    """Canonical name -> the file's own, without tables that are derived."""
    found = {}
    for own in shapes:
        name = strip(own)
        if _DERIVED.search(name):
            continue
        if layout.proposer in ("eagle", "eagle3"):
            for old, new in _RENAMED.items():
                if name.startswith(old):
                    name = new + name.removeprefix(old)
        elif layout.proposer == "medusa":
            name = _MEDUSA_BLOCK.sub(r"blocks.\1.layers.\2.\3", name)
            name = _MEDUSA_HEAD.sub(r"lm_heads.\1.weight", name)
        found[name] = own
    return found


def layer_table(sizes: Sizes, prefix: str, *, inputs: int | None = None, norm: bool = True) -> Expected:
    """One Llama layer; ``inputs`` is what q, k and v read, ``norm`` whether it has an input_layernorm."""
    h, rows, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    inputs = inputs or h
    must: Table = {
        "self_attn.q_proj.weight": (rows, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (h, rows),
        "mlp.gate_proj.weight": (sizes.intermediate, h),
        "mlp.up_proj.weight": (sizes.intermediate, h),
        "mlp.down_proj.weight": (h, sizes.intermediate),
        "post_attention_layernorm.weight": (h,),
    }
    if norm:
        must["input_layernorm.weight"] = (h,)
    may: Table = {
        "self_attn.q_proj.bias": (rows,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.bias": (h,),
        "self_attn.q_norm.weight": (sizes.head_dim,),
        "self_attn.k_norm.weight": (sizes.head_dim,),
    }
    return Expected({prefix + k: v for k, v in must.items()}, {prefix + k: v for k, v in may.items()})


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
