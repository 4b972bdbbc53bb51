"""A trained draft as a folder that transformers, vLLM and Redline read: weights (bf16), config, tokenizer, card.

python -m decoder.training.export --run DIR --rows rows.npz --labels DIR --target DIR --out assets/drafts/NAME
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from decoder import draft_vocabulary
from decoder.errors import RedlineError
from decoder.training.checkpoint import load_weights
from decoder.training.curve import curve_svg, read_curve
from decoder.training.evaluate import Acceptance, evaluate
from decoder.training.export_head import EARLIER, averaged_line
from decoder.training.labels import LabelCache
from decoder.training.rows import Rows, load_rows, save_split


def export_model(model: Any, target_folder: Path, out: Path) -> int:
    """Write ``model`` as bf16 with its config and the target's tokenizer; gives the size of the weights in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    # A tied head is left out: readers tie it again from the config.
    weights = {name: p.detach().to(torch.bfloat16).contiguous().cpu() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes its files private
    config = model.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config = {key: value for key, value in config.items() if value is not None and not key.startswith("_")}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (target_folder / name).is_file():
            shutil.copyfile(target_folder / name, out / name)
    if (target_folder / "tokenizer_config.json").is_file():
        found = json.loads((target_folder / "tokenizer_config.json").read_text())
        # The class that every release of transformers knows, and nothing about the folder it came from.
        about = {key: value for key, value in found.items() if key.endswith("_token") or key == "chat_template"}
        about |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        about |= {"model_max_length": model.config.max_position_embeddings}
        (out / "tokenizer_config.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    return (out / "model.safetensors").stat().st_size


def model_card(
    name: str,
    target: str,
    plan: dict[str, Any],
    point: dict[str, Any],
    rows: Rows,
    test: Acceptance,
    parameters: int,
    size: int,
    note: str = "",
    scores: int | None = None,
) -> str:
    """README.md of a draft: what it is, data, seed, steps, held-out acceptance, licence."""
    vocabulary = plan["vocab_size"]
    positions = " | ".join(f"{rate:.3f}" for rate in test.acceptance_per_position)
    heads = " | ".join(str(i + 1) for i in range(test.k))
    some = (
        ""
        if scores is None
        else f"- In Redline it scores {scores:,} frequent ids when it drafts (`draft_vocabulary.json`).\n"
    )
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model]
---

# {name}

A draft model for speculative decoding with **{target}**: a plain Llama of {parameters / 1e6:.1f} M parameters
({plan["layers"]} layers, width {plan["hidden"]}, tied embeddings, {size / 1e6:.1f} MB in bf16) with the target's own
tokenizer ({vocabulary:,} entries). It is made to guess the target's next tokens, not to be talked to.

## Data and training

- Rows: {len(rows.part("train")):,} conversations of {rows.length} tokens that the target wrote itself (digest
  `{rows.digest}`); {len(rows.part("validation"))} more chose the checkpoint, {len(rows.part("test"))} more are the test
  below. Split by conversation.
- Start: {EARLIER if "start" in plan else ""}the target's embeddings reduced to width {plan["hidden"]} by a
  frequency-weighted singular value decomposition ({plan["embedding_kept"]:.0%} of the weighted variance); fresh
  layers.{averaged_line(plan.get("averaged"))}
- Loss: {1 - plan["hard_weight"]:.0%} cross-entropy to the target's distribution at temperature 1 (its {plan["top"]}
  likeliest ids and the rest mass), {plan["hard_weight"]:.0%} to its argmax. {point["labelled_rows"]:,} rows had
  such labels by the end; the others taught their own next tokens. Softmax over the {plan["core"]:,} most frequent
  ids and a weighted sample of the others.
- {point["step"]:,} of {plan["steps"]:,} steps of {plan["batch"]} rows ({point["tokens"] / 1e6:.1f} M tokens, with
  repeats), optimizer {plan["optimizer"]}, learning rate {plan["lr"]:g} (embeddings {plan["embedding_lr"]:g}), seed
  {plan["seed"]}.
{some}
![learning curve](curve.svg)

## Held-out acceptance

Greedy, k = {test.k}, on the test rows ({test.steps:,} steps; {test.positions:,} positions):

| draft position | {heads} |
|---|{"---|" * test.k}
| accepted | {positions} |

- mean acceptance length **{test.mean_acceptance_length:.2f}** tokens per step (the target's own token included)
- agreement with the target's argmax at any position: {test.agreement:.3f}
- sampled at temperature 1, expected acceptance of one draft token (mean of the sum of min(p, q)): {test.overlap:.3f}

The test rows are the target's own conversations, as the training rows are: easier than prompts that people write.
{note}

Acceptance alone does not say whether drafting pays: that depends on the machine, the workload and k. Measure it.

## Licence

Apache-2.0, as the target's. The embeddings derive from the target's weights.
"""


def best_point(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The point whose weights are best.safetensors: the first with the largest mean acceptance length."""
    return max(points, key=lambda point: point["mean_acceptance_length"])


app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option(help="Folder that the training wrote (--out of draft_model).")],
    rows: Annotated[Path, typer.Option(help="The same rows as for the training.")],
    labels: Annotated[Path, typer.Option(help="Folder of the target's labels.")],
    target: Annotated[Path, typer.Option(help="Folder of the target (for its tokenizer).")],
    out: Annotated[Path, typer.Option(help="Folder of the draft; its last part is the draft's name.")],
    target_name: str = "SmolLM2-135M-Instruct",
    prefix: int = 24,
    k: int = 4,
    note: Annotated[str, typer.Option(help="Sentence for the card on acceptance with real prompts.")] = "",
    frequent: Annotated[
        list[Path] | None, typer.Option(help="Rows whose most frequent ids are what it scores when it drafts here.")
    ] = None,
    scores: Annotated[int, typer.Option(help="How many ids that are.")] = 16_384,
    threads: int = 0,
) -> None:
    """Export the best weights of a training RUN as a draft that can be loaded."""
    from transformers import AutoConfig, LlamaForCausalLM

    if threads:
        torch.set_num_threads(threads)
    try:
        data = load_rows(rows, prefix)
        about = json.loads((labels / "meta.json").read_text())
        cache = LabelCache.open(labels, data, target=about["target"], vocab_size=about["vocab_size"], k=about["k"])
        plan, points = json.loads((run / "plan.json").read_text()), read_curve(run / "curve.jsonl")
        config = AutoConfig.from_pretrained(run)
        plan["vocab_size"] = config.vocab_size
        model = LlamaForCausalLM(config)
        load_weights(run / "best.safetensors", model)
        size = export_model(model, target, out)
        shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
        test = evaluate(shipped, data, cache, data.part("test"), k=k)
        parameters = sum(p.numel() for p in model.parameters())
        card = model_card(
            out.name, target_name, plan, best_point(points), data, test, parameters, size, note,
            scores if frequent else None,
        )  # fmt: skip
        (out / "README.md").write_text(card)
        if frequent:
            counts = sum(load_rows(path, prefix).counts(config.vocab_size) for path in frequent)
            draft_vocabulary.write(out, np.argsort(-np.asarray(counts), kind="stable")[:scores].tolist())
        save_split(data, out / "split.json")
        (out / "curve.svg").write_text(
            curve_svg(points, "mean_acceptance_length", f"validation: mean acceptance length, k = {k}")
        )
        print(json.dumps(test.to_json()))
    except RedlineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
