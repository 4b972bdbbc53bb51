"""A trained head as a folder in the public layout: weights (bf16), config, card, learning curve, and the split.

EAGLE-3 and Medusa folders are what vLLM reads; the MTP layer uses Qwen3-Next's names. The target's embeddings and (MTP)
its head are not stored: every reader shares the target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from decoder.training.curve import curve_svg
from decoder.training.evaluate import Acceptance
from decoder.training.features import eagle3_layers
from decoder.training.head_models import HeadModel
from decoder.training.heads import HeadPlan
from decoder.training.rows import Rows, save_split

_TITLES = {
    "eagle3": "An EAGLE-3 head",
    "mtp": "A multi-token-prediction layer",
    "medusa": "Medusa heads",
}
_SENTENCES = {
    "eagle3": "It reads three hidden states of the target and the next token, and drafts one token after the other.",
    "mtp": "One more layer behind the target's last state, with the target's own embeddings and head.",
    "medusa": "Each head foretells one position from the target's last state alone, all in one go.",
}


def tensors(kind: str, head: HeadModel, vocabulary: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The head's parameters by their public names (bf16), with the maps of its draft vocabulary."""
    own = {name: p.detach().to(torch.bfloat16).contiguous().cpu() for name, p in head.named_parameters()}
    if kind == "eagle3":
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[vocabulary] = True
        return own | {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}
    if kind == "medusa":
        renamed = {}
        for name, value in own.items():
            number, _, rest = name.partition(".")
            renamed[
                f"lm_heads.{number}.weight" if rest == "1.weight" else f"blocks.{number}.layers.0.{rest.split('.')[-1]}"
            ] = value
        return renamed | {"token_map": vocabulary.clone()}
    return own


def config(kind: str, target: Any, plan: HeadPlan) -> dict[str, Any]:
    """config.json for a head of ``target`` (a transformers config)."""
    found = {
        key: value for key, value in target.to_diff_dict().items() if not key.startswith("_") and value is not None
    }
    for key in ("transformers_version", "quantization_config", "architectures", "use_cache", "is_llama_config"):
        found.pop(key, None)
    rope = getattr(target, "rope_parameters", None) or {}
    # Readers older than transformers 5 look for rope_theta at the top.
    found |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    found |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    if kind == "eagle3":
        return found | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": plan.vocabulary,
            "eagle_aux_hidden_state_layer_ids": list(eagle3_layers(target.num_hidden_layers)),
        }
    if kind == "mtp":
        return found | {
            "architectures": ["RedlineMTP"],
            "model_type": "mtp",
            "num_hidden_layers": 1,
            "num_nextn_predict_layers": 1,
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": plan.vocabulary,
        "num_heads": plan.unroll,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


EARLIER = "the best weights of an earlier training on other rows (`docs/training.md` of Redline), which began with\n  "
"""How a card begins to tell where a run started that went on from another one."""


def averaged_line(share: float | None) -> str:
    """A card's line on averaging, "" where there was none."""
    if share is None:
        return ""
    return f"\n- Shipped is the mean of both trainings' weights: {share:.0%} of this one's, the rest the earlier one's."


def export_head(
    kind: str,
    head: HeadModel,
    vocabulary: Tensor,
    target: Any,
    plan: HeadPlan,
    rows: Rows,
    points: list[dict[str, Any]],
    test: Acceptance,
    out: Path,
    *,
    target_name: str,
    base_model: str,
    note: str = "",
    started: bool = False,
    averaged: float | None = None,
) -> int:
    """Write everything; gives the size of the weights in bytes. ``target`` is its transformers config, ``started`` says
    that the run began with the weights of an earlier one, ``averaged`` its share where both were averaged."""
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "model.safetensors"
    save_file(tensors(kind, head, vocabulary, target.vocab_size), weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes its files private
    (out / "config.json").write_text(json.dumps(config(kind, target, plan), indent=2, sort_keys=True) + "\n")
    save_split(rows, out / "split.json")
    size = weights.stat().st_size
    parameters = sum(p.numel() for p in head.parameters())
    start = (EARLIER if started else "") + _start_line(kind) + averaged_line(averaged)
    card = _card(kind, out.name, target_name, base_model, plan, rows, points, test, parameters, size, note, start)
    (out / "README.md").write_text(card)
    title = f"validation: mean acceptance length, k = {test.k}"
    (out / "curve.svg").write_text(curve_svg(points, "mean_acceptance_length", title))
    return size


def _card(
    kind: str,
    name: str,
    target: str,
    base_model: str,
    plan: HeadPlan,
    rows: Rows,
    points: list[dict[str, Any]],
    test: Acceptance,
    parameters: int,
    size: int,
    note: str,
    start: str,
) -> str:
    best = max(points, key=lambda point: point["mean_acceptance_length"])
    covered = _coverage(rows, plan.vocabulary)
    heads = " | ".join(str(i + 1) for i in range(test.k))
    rates = " | ".join(f"{rate:.3f}" for rate in test.acceptance_per_position)
    return f"""---
license: apache-2.0
base_model: {base_model}
tags: [speculative-decoding, {kind}]
---

# {name}

{_TITLES[kind]} for speculative decoding with **{target}**: {parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB.
{_SENTENCES[kind]}

## Data and training

- Rows: {len(rows.part("train")):,} conversations of {rows.length} tokens that the target wrote itself (digest
  `{rows.digest}`); {len(rows.part("validation"))} more chose the checkpoint, {len(rows.part("test"))} more are the
  test below. Split by conversation: `split.json`.
- {_vocabulary_line(kind, plan, covered)}
- Start: {start}
- Loss: cross-entropy to the target's distribution, {plan.unroll} draft positions, weight {plan.position_weight:g} to
  the power of the position. Target and embeddings frozen.
- Best of {points[-1]["step"]:,} steps of {plan.batch} rows: step {best["step"]:,} ({best["tokens"] / 1e6:.1f} M
  tokens, with repeats). Muon for the inner matrices ({plan.lr:g}), AdamW for the rest ({plan.head_lr:g}); seed
  {plan.seed}.

![learning curve](curve.svg)

## Held-out acceptance

Greedy, k = {test.k}, on the test rows ({test.steps:,} steps; {test.positions:,} positions):

| draft position | {heads} |
|---|{"---|" * test.k}
| accepted | {rates} |

- mean acceptance length **{test.mean_acceptance_length:.2f}** tokens per step (the target's own token included)
- agreement of the first draft with the target's argmax: {test.agreement:.3f}
- sampled at temperature 1, expected acceptance of the first draft (mean of the sum of min(p, q)): {test.overlap:.3f}

The test rows are the target's own conversations, as the training rows are: easier than prompts that people write.
{note}

Acceptance alone does not say whether drafting pays: that depends on the machine, the workload and k. Measure it.

## Licence

Apache-2.0, as the target's. Parts of the head begin as copies of the target's weights.
"""


def _coverage(rows: Rows, size: int) -> float:
    """Share of the training rows' tokens that the draft vocabulary has."""
    counts = np.sort(rows.counts(int(rows.tokens.max()) + 1))[::-1]
    return float(counts[:size].sum() / counts.sum())


def _vocabulary_line(kind: str, plan: HeadPlan, covered: float) -> str:
    if kind == "mtp":
        return (
            f"Scores the whole vocabulary with the target's head; the loss saw the {plan.vocabulary:,} most frequent "
            f"ids ({covered:.1%} of the tokens) and {plan.sample:,} others, drawn for each step."
        )
    most = f"the {plan.vocabulary:,} most frequent ids of the training rows"
    return f"Draft vocabulary: {most} ({covered:.1%} of their tokens)."


def _start_line(kind: str) -> str:
    lines: Mapping[str, str] = {
        "eagle3": "the target's last layer, norm and head rows, on the deepest state; embeddings as its first layer.",
        "mtp": "the target's last layer, norm and head on the stream before its final norm; little of the embedding.",
        "medusa": "the target's own head rows; the residual blocks begin at zero.",
    }
    return lines[kind]
