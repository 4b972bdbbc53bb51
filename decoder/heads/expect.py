"""What each layout must hold for a given target: tables of tensors, and the settings that change its forward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoder.heads.layout import Shapes
from decoder.heads.names import Expected, Table, layer_table
from decoder.heads.sizes import Sizes

_NORM_FLAGS = {"norm_output", "norm_before_residual", "norm_before_fc", "fc_norm", "use_qk_norm"}


@dataclass(frozen=True)
class TargetFacts:
    """What a head must match, from the target's configuration."""

    name: str
    hidden: int
    vocab_size: int
    layers: int
    architectures: tuple[str, ...] = ()
    model_type: str = ""

    @classmethod
    def of_config(cls, name: str, config: Any) -> TargetFacts:
        """From a transformers configuration."""
        text = config.get_text_config()
        return cls(
            name=name,
            hidden=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            layers=int(text.num_hidden_layers),
            architectures=tuple(config.architectures or ()),
            model_type=str(config.model_type),
        )


@dataclass(frozen=True)
class Eagle3Settings:
    """How an EAGLE-3 head departs from the plain one.

    ``aux``: the target's states that it reads, numbered as transformers' ``hidden_states``. ``norm_before_residual``:
    the residual is the normed state; ``norm_before_fc``: one norm over all read states; ``fc_norm``: one norm for each;
    ``norm_output``: what is fed back is the normed output.
    """

    aux: tuple[int, ...]
    draft_vocab: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    problems: tuple[str, ...] = ()


def eagle3_settings(config: Mapping[str, Any], sizes: Sizes, target: TargetFacts) -> Eagle3Settings:
    """Read the settings; whatever is not understood is a problem."""
    nested = config.get("eagle_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    merged = {**config, **inner}
    problems = [
        f"unsupported norm flag {key} in its config.json"
        for key, value in sorted(merged.items())
        if "norm" in key and value is True and key not in _NORM_FLAGS
    ]
    if merged.get("use_aux_hidden_state", True) is False:
        problems.append("it reads no inner states of the target (use_aux_hidden_state is false)")
    if merged.get("parallel_drafting"):
        problems.append("it drafts in parallel (parallel_drafting)")
    if merged.get("norm_before_fc") and merged.get("fc_norm"):
        problems.append("norm_before_fc and fc_norm exclude each other")
    if "speculators_model_type" in config and "norm_before_residual" not in config:
        problems.append(
            "its config.json does not say norm_before_residual, which speculators and vLLM assume otherwise"
        )
    # Top level: numbered as vLLM does, the stream in front of that layer. In eagle_config: as SGLang does, behind it.
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    shift = 0
    if aux is None and inner.get("eagle_aux_hidden_state_layer_ids") is not None:
        aux, shift = inner["eagle_aux_hidden_state_layer_ids"], 1
    if aux is None:
        aux = [2, target.layers // 2, target.layers - 3]
    try:
        ids = tuple(int(i) + shift for i in aux)
    except (TypeError, ValueError):
        ids = ()
        problems.append(f"eagle_aux_hidden_state_layer_ids is {aux!r}, a list of layer numbers is needed")
    outside = [i for i in ids if not 0 <= i < target.layers]
    if outside:
        problems.append(
            f"it reads the state at layer {outside[0]}, and {target.name} has {target.layers} layers (0 to "
            f"{target.layers - 1})"
        )
    vocab = config.get("draft_vocab_size")
    return Eagle3Settings(
        aux=ids,
        draft_vocab=int(vocab) if isinstance(vocab, int) and not isinstance(vocab, bool) else target.vocab_size,
        norm_before_residual=bool(merged.get("norm_before_residual")),
        norm_before_fc=bool(merged.get("norm_before_fc")),
        fc_norm=bool(merged.get("fc_norm")),
        norm_output=bool(merged.get("norm_output")),
        logit_scale=float(config.get("logit_scale") or 1.0),
        problems=tuple(problems),
    )


def eagle3_tensors(sizes: Sizes, settings: Eagle3Settings, target: TargetFacts) -> Expected:
    """EAGLE-3: the first layer reads embedding and state side by side, further layers are plain."""
    h, read = sizes.hidden, len(settings.aux) * target.hidden
    must: Table = {
        "fc.weight": (h, read),
        "norm.weight": (h,),
        "lm_head.weight": (settings.draft_vocab, h),
        "layers.0.hidden_norm.weight": (h,),
    }
    may: Table = {"embed_tokens.weight": (target.vocab_size, h), "t2d": (target.vocab_size,)}
    if settings.draft_vocab == target.vocab_size:
        may["d2t"] = (settings.draft_vocab,)
    else:
        must["d2t"] = (settings.draft_vocab,)
    if h != target.hidden:
        # The target's embeddings are of another width: the head needs its own.
        must["embed_tokens.weight"] = may.pop("embed_tokens.weight")
    if settings.norm_before_fc:
        must["input_norm.weight"] = (read,)
    if settings.fc_norm:
        must.update({f"fc_norm.{i}.weight": (target.hidden,) for i in range(len(settings.aux))})
    for i in range(sizes.layers):
        layer = layer_table(sizes, f"layers.{i}.", inputs=2 * h if i == 0 else h)
        must.update(layer.must)
        may.update(layer.may)
    return Expected(must, may)


def eagle_tensors(sizes: Sizes, target: TargetFacts) -> Expected:
    """EAGLE-1/2: fc over embedding and state, a layer without input norm, the target's head."""
    h = sizes.hidden
    must: Table = {"fc.weight": (h, h + target.hidden)}
    may: Table = {
        "fc.bias": (h,),
        "embed_tokens.weight": (target.vocab_size, h),
        "lm_head.weight": (target.vocab_size, h),
    }
    for i in range(sizes.layers):
        layer = layer_table(sizes, f"layers.{i}.", norm=i > 0)
        must.update(layer.must)
        may.update(layer.may)
    return Expected(must, may)


def mtp_tensors(sizes: Sizes, style: str) -> Expected:
    """One MTP layer in the names of Qwen3-Next ("mtp") or MiMo ("mimo")."""
    h = sizes.hidden
    if style == "mimo":
        prefix = "mtp_layers.0."
        must: Table = {prefix + "input_proj.weight": (h, 2 * h)}
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    else:
        prefix = "mtp.layers.0."
        must = {"mtp.fc.weight": (h, 2 * h)}
        norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    for norm in norms:
        must[(prefix if style == "mimo" else "") + norm + ".weight"] = (h,)
    layer = layer_table(sizes, prefix)
    return Expected({**must, **layer.must}, layer.may)


@dataclass(frozen=True)
class MedusaShape:
    """What the tensors say (public configs lie about it): ``heads`` with ``blocks`` residual blocks each. ``shared``:
    one output matrix for all heads; ``own_output`` False: the target's."""

    heads: int
    blocks: int
    shared: bool
    own_output: bool


def medusa_shape(names: Shapes, config: Mapping[str, Any]) -> MedusaShape:
    """Count heads and blocks; ``names`` are canonical."""
    found = [re.match(r"blocks\.(\d+)\.layers\.(\d+)\.weight$", name) for name in names]
    pairs = {(int(m[1]), int(m[2])) for m in found if m}
    outputs = sum(1 for name in names if re.match(r"lm_heads\.\d+\.weight$", name))
    heads = 1 + max((i for i, _ in pairs), default=-1)
    shared = bool(config.get("original_lm_head")) and outputs <= 1
    return MedusaShape(heads, 1 + max((j for _, j in pairs), default=-1), shared, outputs > 0)


def medusa_tensors(shape: MedusaShape, names: Shapes, config: Mapping[str, Any], target: TargetFacts) -> Expected:
    """Medusa in vLLM's names; a matrix over the whole vocabulary may stand beside a token map, as in vLLM."""
    h = target.hidden
    must: Table = {}
    may: Table = {}
    bias = config.get("medusa_fc_bias")
    for i in range(shape.heads):
        for j in range(shape.blocks):
            must[f"blocks.{i}.layers.{j}.weight"] = (h, h)
            if bias is True:
                must[f"blocks.{i}.layers.{j}.bias"] = (h,)
            elif bias is None:
                may[f"blocks.{i}.layers.{j}.bias"] = (h,)
    truncated = config.get("truncated_vocab_size")
    size = truncated if isinstance(truncated, int) and not isinstance(truncated, bool) else None
    if size is None:
        size = names["token_map"][0] if "token_map" in names else target.vocab_size
    if size != target.vocab_size or "token_map" in names:
        must["token_map"] = (size,)
    for i in range(1 if shape.shared else shape.heads):
        name = f"lm_heads.{i}.weight"
        rows = names.get(name, (size,))[0]
        (must if shape.own_output or not shape.shared else may)[name] = (
            rows if rows in (size, target.vocab_size) else size,
            h,
        )
    return Expected(must, may)
