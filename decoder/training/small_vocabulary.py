"""A tiny draft with a small vocabulary of its own: what drafting across vocabularies (TLI, re-encoding) is shown with.

    python -m decoder.training.small_vocabulary --rows rows.npz --target DIR --out DIR [--steps 1250] ...
    python -m decoder.training.small_vocabulary_export --run DIR --rows rows.npz --target DIR --out assets/drafts/NAME

The rows are turned into text with the target's tokenizer; a byte-level BPE of ``--entries`` entries is trained on the
training rows, and a plain Llama learns the next token of that text. Distributions of a target with other tokens cannot
be distilled token by token, so the text alone teaches. Interrupt it whenever you like: the same command goes on from
the last checkpoint in ``--out``, with the same batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from decoder.errors import ModelError, RedlineError
from decoder.training.draft_model import Plan, make_optimizers
from decoder.training.loop import run_steps
from decoder.training.rows import Rows, load_rows

BLOCK = 512
"""Draft tokens per context of a training step; some steps join several, so that longer contexts are met too."""
PLAN = Plan(
    hidden=192, layers=2, intermediate=512, kv_heads=1, steps=1250, batch=8, lr=4e-3, embedding_lr=4e-3,
    weight_decay=0.02, packs=(1, 1, 1, 2, 4),
)  # fmt: skip


def texts_of(rows: Rows, part: str, tokenizer: Any) -> list[str]:
    """The rows of ``part`` as text, special tokens spelled out; a character that a row's end cuts off is left out."""
    ids = rows.tokens[rows.part(part)].tolist()
    return [str(text).rstrip("\ufffd") for text in tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)]


def train_tokenizer(texts: Sequence[str], entries: int, special: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of ``entries`` entries with all bytes and ``special`` first; single digits, as the target's."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer, length=len(texts))
    return raw


def save_tokenizer(raw: Tokenizer, target: Any, out: Path) -> None:
    """``raw`` as a tokenizer that transformers reads, with the special tokens and the chat template of ``target``."""
    from transformers import PreTrainedTokenizerFast

    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special: Any = {name: getattr(target, name) for name in names if getattr(target, name, None)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = target.chat_template
    tokenizer.save_pretrained(out)


def encode(raw: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """Ids of each text."""
    return [np.array(e.ids, np.int64) for e in raw.encode_batch(list(texts), add_special_tokens=False)]


def epoch_blocks(
    sequences: Sequence[npt.NDArray[np.int64]], seed: int, epoch: int, length: int = BLOCK
) -> npt.NDArray[np.int64]:
    """All sequences of one epoch, joined in an order of its own and cut: [N, length + 1]; block i + 1 begins with the
    id that block i ends with, so that every id is foretold once."""
    order = np.random.default_rng((seed, epoch)).permutation(len(sequences))
    joined = np.concatenate([sequences[i] for i in order])
    count = (len(joined) - 1) // length
    if count < 1:
        raise ModelError(f"{len(joined):,} tokens are not one block of {length}: more rows are needed")
    return np.stack([joined[i * length : (i + 1) * length + 1] for i in range(count)])


class Batches:
    """``of(step)`` [B, T + 1]: a function of plan and step alone; the epoch's blocks are kept while it lasts."""

    def __init__(self, sequences: Sequence[npt.NDArray[np.int64]], plan: Plan, length: int = BLOCK) -> None:
        self._sequences, self._plan, self._length = sequences, plan, length
        self._epoch = -1
        self.per_epoch = max(1, (sum(map(len, sequences)) - 1) // length // plan.batch)

    def of(self, step: int) -> npt.NDArray[np.int64]:
        epoch, at = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._blocks, self._epoch = epoch_blocks(self._sequences, self._plan.seed, epoch, self._length), epoch
        blocks = self._blocks[at * self._plan.batch : (at + 1) * self._plan.batch]
        pack = int(np.random.default_rng((self._plan.seed, 2, step)).choice(self._plan.packs))
        if pack == 1 or len(blocks) % pack:
            return blocks
        joined = blocks[:, :-1].reshape(len(blocks) // pack, -1)  # neighbouring blocks go on with each other's text
        return np.concatenate([joined, blocks[pack - 1 :: pack, -1:]], 1)


@torch.inference_mode()
def evaluate(model: Any, sequences: Sequence[npt.NDArray[np.int64]], texts: Sequence[str]) -> dict[str, float]:
    """On unseen rows: the share of ids that argmax foretells, and bits per byte (comparable across vocabularies)."""
    right, count, nats = 0, 0, 0.0
    for ids in sequences:
        tokens = torch.from_numpy(ids)[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1]).logits[0].float()
        right += int((logits.argmax(-1) == tokens[0, 1:]).sum())
        count += len(ids) - 1
        nats += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
    size = sum(len(text.encode()) for text in texts)
    return {"agreement": round(right / count, 4), "bits_per_byte": round(nats / math.log(2) / size, 4)}


def train(
    model: Any,
    batches: Batches,
    validation: tuple[Sequence[npt.NDArray[np.int64]], Sequence[str]],
    plan: Plan,
    out: Path,
    *,
    eval_every: int = 250,
    stop_after: int | None = None,
    say: Any = print,
) -> None:
    """Train ``model`` in place up to ``plan.steps``, going on from ``out/checkpoint``.

    Writes best.safetensors (fewest bits per byte on validation rows) and curve.jsonl. ``stop_after``: leave after so
    many steps, as an interrupt would.
    """

    def step(number: int) -> tuple[float, int]:
        block = torch.from_numpy(batches.of(number))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(block[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), block[:, 1:].flatten())
        loss.backward()
        return loss.item(), block[:, 1:].numel()

    def measure() -> tuple[dict[str, Any], float]:
        measured = evaluate(model, *validation)
        return dict(measured), measured["bits_per_byte"]

    run_steps(
        model, make_optimizers(model, plan), plan, out, step=step, evaluate=measure,
        larger=False, eval_every=eval_every, stop_after=stop_after, say=say,
    )  # fmt: skip


def new_model(plan: Plan, raw: Tokenizer, target: Any, head_dim: int = 64) -> Any:
    """A fresh Llama (float32) for the vocabulary ``raw``, with the special tokens and the context of ``target``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(plan.seed)
    ids: dict[str, Any] = {
        f"{name}_id": raw.token_to_id(str(getattr(target, name))) for name in ("bos_token", "eos_token", "pad_token")
    }
    config = LlamaConfig(
        vocab_size=raw.get_vocab_size(),
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.hidden // head_dim,
        num_key_value_heads=plan.kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    return LlamaForCausalLM(config).train()


app = typer.Typer(add_completion=False)


@app.command()
def main(
    rows: Annotated[Path, typer.Option(help="Rows that the target wrote (.npz).")],
    target: Annotated[str, typer.Option(help="The target's tokenizer: a local folder or Hugging Face id.")],
    out: Annotated[Path, typer.Option(help="Folder for tokenizer, checkpoints, learning curve and best weights.")],
    prefix: Annotated[int, typer.Option(help="Ids at the start of each row that carry no information.")] = 24,
    entries: Annotated[int, typer.Option(help="Entries of the draft's vocabulary.")] = 4096,
    hidden: int = PLAN.hidden,
    layers: int = PLAN.layers,
    intermediate: int = PLAN.intermediate,
    steps: int = PLAN.steps,
    batch: Annotated[int, typer.Option(help=f"Blocks of {BLOCK} draft tokens per step.")] = PLAN.batch,
    lr: float = PLAN.lr,
    seed: int = PLAN.seed,
    eval_every: int = 250,
    eval_rows: Annotated[int, typer.Option(help="Validation rows of each evaluation.")] = 64,
    stop_after: Annotated[int | None, typer.Option(help="Leave after this many steps; run again to go on.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads (0: torch's choice).")] = 0,
) -> None:
    """Train a small BPE and a tiny Llama on what TARGET wrote in ROWS."""
    from transformers import AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    plan = replace(
        PLAN, hidden=hidden, layers=layers, intermediate=intermediate, steps=steps, batch=batch, lr=lr,
        embedding_lr=lr, seed=seed,
    )  # fmt: skip
    try:
        data = load_rows(rows, prefix)
        tokenizer: Any = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
        texts = texts_of(data, "train", tokenizer)
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "tokenizer.json").is_file():
            save_tokenizer(train_tokenizer(texts, entries, tokenizer.all_special_tokens), tokenizer, out)
        raw = Tokenizer.from_file(str(out / "tokenizer.json"))
        unseen = texts_of(data, "validation", tokenizer)[:eval_rows]
        model = new_model(plan, raw, tokenizer)
        batches = Batches(encode(raw, texts), plan)
        about = {"rows": data.digest, "entries": raw.get_vocab_size(), "steps_per_epoch": batches.per_epoch}
        print(f"{model.num_parameters():,} parameters; {json.dumps(about)}", flush=True)
        model.config.save_pretrained(out)
        (out / "plan.json").write_text(json.dumps(asdict(plan) | about))
        train(
            model, batches, (encode(raw, unseen), unseen), plan, out,
            eval_every=eval_every, stop_after=stop_after, say=lambda text: print(text, flush=True),
        )  # fmt: skip
    except RedlineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
