"""The draft that small_vocabulary trained as a folder that transformers and Redline read: weights, tokenizer, card.

python -m decoder.training.small_vocabulary_export --run DIR --rows rows.npz --target DIR --out assets/drafts/NAME
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer

from decoder.errors import RedlineError
from decoder.training.checkpoint import load_weights
from decoder.training.curve import curve_svg, read_curve
from decoder.training.export import export_model
from decoder.training.rows import Rows, load_rows, save_split
from decoder.training.small_vocabulary import encode, evaluate, texts_of
from decoder.vocabulary import SharedVocabulary, Spelling


def card(
    name: str,
    target: str,
    plan: dict[str, Any],
    point: dict[str, Any],
    rows: Rows,
    shared: SharedVocabulary,
    test: dict[str, float],
    parameters: int,
    size: int,
    note: str,
) -> str:
    """README.md of the draft: what it is, data, seed, steps, held-out numbers, licence."""
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model]
---

# {name}

A tiny draft for **{target}** with a vocabulary of its own, to show drafting across vocabularies: a plain Llama of
{parameters / 1e6:.1f} M parameters ({plan["layers"]} layers, width {plan["hidden"]}, tied embeddings,
{size / 1e6:.1f} MB in bf16) over a byte-level BPE of {plan["entries"]:,} entries that was trained on the same text.
{len(shared.target_ids):,} of its tokens are also among the target's {shared.target.entries:,}. It is made to guess, not
to be talked to; a draft with the target's own vocabulary is accepted more often.

## Data and training

- Text: {len(rows.part("train")):,} conversations of {rows.length} target tokens that the target wrote itself (digest
  `{rows.digest}`), control tokens included; {len(rows.part("validation"))} more chose the checkpoint,
  {len(rows.part("test"))} more are the test below. Split by conversation; the split is in `split.json`.
- Vocabulary: BPE by `tokenizers` on the training conversations; all 256 bytes, single digits, the target's control
  tokens.
- Loss: cross-entropy to the next token of the text. The target's distributions cannot be distilled token by token
  into other tokens.
- {point["step"]:,} of {plan["steps"]:,} steps of {plan["batch"]} blocks of 512 tokens ({point["tokens"] / 1e6:.1f} M
  tokens, {point["step"] / plan["steps_per_epoch"]:.1f} passes over the text), optimizer {plan["optimizer"]}, learning
  rate {plan["lr"]:g}, seed {plan["seed"]}; on one CPU thread.

![learning curve](curve.svg)

## Held-out acceptance

- on the test conversations: {test["bits_per_byte"]:.3f} bits per byte; {test["agreement"]:.1%} of its own tokens
  foretold
- {note}

Acceptance alone does not say whether drafting pays: that depends on the machine, the workload and k. Measure it.

## Licence

Apache-2.0, as the target's, whose text it was trained on.
"""


app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option(help="Folder that the training wrote (--out of small_vocabulary).")],
    rows: Annotated[Path, typer.Option(help="The same rows as for the training.")],
    target: Annotated[Path, typer.Option(help="Folder of the target (for its tokenizer).")],
    out: Annotated[Path, typer.Option(help="Folder of the draft; its last part is the draft's name.")],
    target_name: str = "SmolLM2-135M-Instruct",
    prefix: int = 24,
    note: Annotated[
        str, typer.Option(help="Sentence for the card on acceptance in real decoding.")
    ] = "not measured yet",
    threads: int = 0,
) -> None:
    """Export the best weights of a training RUN as a draft that can be loaded."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    if threads:
        torch.set_num_threads(threads)
    try:
        data = load_rows(rows, prefix)
        plan, points = json.loads((run / "plan.json").read_text()), read_curve(run / "curve.jsonl")
        model = LlamaForCausalLM(AutoConfig.from_pretrained(run))
        load_weights(run / "best.safetensors", model)
        size = export_model(model, run, out)
        save_split(data, out / "split.json")
        tokenizer: Any = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
        texts = texts_of(data, "test", tokenizer)
        shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
        test = evaluate(shipped, encode(Tokenizer.from_file(str(out / "tokenizer.json")), texts), texts)
        shared = SharedVocabulary(Spelling(tokenizer), Spelling(AutoTokenizer.from_pretrained(out)))
        best = min(points, key=lambda point: point["bits_per_byte"])
        parameters = sum(p.numel() for p in model.parameters())
        (out / "README.md").write_text(
            card(out.name, target_name, plan, best, data, shared, test, parameters, size, note)
        )
        (out / "curve.svg").write_text(curve_svg(points, "bits_per_byte", "validation: bits per byte"))
        print(json.dumps(test | {"shared": len(shared.target_ids), "bytes": size}))
    except RedlineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
