"""Which public layout a draft head has: read from its config and the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoder.errors import IncompatibleError, ModelError

HEADS = ("eagle", "eagle3", "medusa", "mtp")
"""The proposers that draft with a head."""
_EAGLE3 = {
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3Qwen3ForCausalLM",
}
_TITLES = {"eagle": "an EAGLE-1/2 head", "eagle3": "an EAGLE-3 head", "medusa": "Medusa heads", "mtp": "an MTP layer"}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """``proposer`` is who drafts with it; ``style`` tells layouts of one proposer apart:

    eagle: "eagle" (SafeAILab) or "speculators"; eagle3: "midlayer" (SafeAILab, vLLM) or "speculators"; medusa: "medusa"
    (the original names) or "vllm"; mtp: "mtp" (Qwen3-Next's names), "mimo" or "deepseek".
    """

    proposer: str
    style: str

    @property
    def title(self) -> str:
        """For a sentence."""
        return _TITLES[self.proposer]


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names under ``architectures``."""
    found = config.get("architectures") or ()
    return tuple(str(name) for name in found) if isinstance(found, list | tuple) else ()


def find_layout(config: Mapping[str, Any], shapes: Shapes) -> Layout | None:
    """The layout, or None for what is no draft head; ``shapes`` may be empty, then the config alone decides."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return Layout(str(kind), "speculators") if kind in ("eagle", "eagle3") else None
    if shapes:
        return _from_names(shapes)
    names = set(architectures(config))
    if names & _EAGLE3 or config.get("draft_vocab_size"):
        return Layout("eagle3", "midlayer")
    if "medusa_num_heads" in config or "MedusaModel" in names or config.get("model_type") == "medusa":
        return Layout("medusa", "medusa")
    if config.get("model_type") == "mtp":
        return Layout("mtp", "mtp")
    return None


def _from_names(shapes: Shapes) -> Layout | None:
    names = {strip(name) for name in shapes}
    if any(name.startswith("mtp.") for name in names):
        return Layout("mtp", "mtp")
    if any(re.match(r"mtp_layers\.\d+\.", name) for name in names):
        return Layout("mtp", "mimo")
    if any(re.match(r"layers\.\d+\.eh_proj\.", name) for name in names):
        return Layout("mtp", "deepseek")
    if any(re.match(r"blocks\.\d+\.layers\.\d+\.weight$", name) for name in names):
        return Layout("medusa", "vllm")
    if any(re.match(r"\d+\.\d+\.linear\.weight$", name) for name in names):
        return Layout("medusa", "medusa")
    if "fc.weight" not in names:
        return None
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return Layout("eagle3", "midlayer")
    return Layout("eagle", "eagle") if any(name.startswith("layers.0.") for name in names) else None


def strip(name: str) -> str:
    """A tensor's name without the prefixes that exporters put before it."""
    for prefix in ("model.", "medusa_heads.", "medusa_head."):
        name = name.removeprefix(prefix)
    return name


def require(name: str, proposer: str, config: Mapping[str, Any], shapes: Shapes) -> Layout:
    """The layout of ``name`` for ``proposer``. Raises ModelError when it is another head or none."""
    found = find_layout(config, shapes)
    if found is None:
        kind = config.get("speculators_model_type")
        if kind is not None:
            raise ModelError(f"{name} is a speculators model of type {kind!r}; Redline reads eagle and eagle3")
        some = ", ".join(sorted(shapes)[:3]) or ", ".join(architectures(config)) or "nothing that tells"
        raise ModelError(f"{name} is no draft head that {proposer} could use: it holds {some}")
    if found.proposer != proposer:
        raise IncompatibleError(
            f"{name} is {found.title}, which {proposer} cannot use: choose the proposer {found.proposer}"
        )
    return found
