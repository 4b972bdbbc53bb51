"""An independent small draft model, distilled from a target with the same tokenizer.

    python -m decoder.training.draft_model --rows rows.npz --target DIR --out DIR [--steps 4000] ...

The draft is a plain Llama whose embeddings are the target's, reduced by a singular value decomposition; it learns the
target's next-token distribution on rows that the target wrote. Interrupt it whenever you like: the same command goes on
from the last checkpoint in ``--out``, with the same batches. Makes the labels it lacks first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from decoder.errors import ModelError, RedlineError
from decoder.training.checkpoint import load_weights
from decoder.training.evaluate import Acceptance, evaluate
from decoder.training.labels import LabelCache, make_labels
from decoder.training.loop import run_steps
from decoder.training.loss import Vocabulary, distillation_loss
from decoder.training.rows import Rows, load_rows
from decoder.training.schedule import batch_rows
from decoder.training.warm_start import draft_config, warm_start

LOSS_CHUNK = 512
"""Positions whose logits exist at one time: a few tens of MB instead of a few GB."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides the outcome of a training run, besides rows and target."""

    hidden: int = 256
    layers: int = 4
    intermediate: int = 768
    kv_heads: int = 2
    steps: int = 4000
    batch: int = 8
    """Rows per step."""
    lr: float = 2e-3
    embedding_lr: float = 1e-3
    optimizer: str = "muon"
    """For the matrices of the layers: muon or adamw. Embeddings and norms always use AdamW."""
    weight_decay: float = 0.05
    warmup: int = 100
    decay: float = 0.5
    """The last share of the steps, over which the learning rate falls linearly to zero."""
    hard_weight: float = 0.3
    top: int = 32
    """Of each label, this many likeliest ids are used."""
    core: int = 6144
    sample: int = 1024
    packs: tuple[int, ...] = (1, 1, 1, 1, 2, 4)
    """Rows joined into one context, drawn for each step: so the draft meets contexts longer than a row."""
    seed: int = 0


def make_optimizers(model: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """One optimizer for the matrices of the layers, one for embeddings and norms; ``base_lr`` is kept in each group."""
    embeddings = {id(model.get_input_embeddings().weight)}  # type: ignore[operator]
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    table = [p for p in model.parameters() if id(p) in embeddings]
    first: torch.optim.Optimizer
    if plan.optimizer == "muon":
        first = torch.optim.Muon(matrices, lr=plan.lr, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw")
    elif plan.optimizer == "adamw":
        first = torch.optim.AdamW(matrices, lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay)
    else:
        raise ModelError(f"optimizer {plan.optimizer!r} is unknown; muon and adamw are known")
    second = torch.optim.AdamW(
        [{"params": table, "lr": plan.embedding_lr}, {"params": vectors, "lr": plan.lr}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
    )
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [first, second]


def batch_labels(
    rows: Rows, labels: LabelCache, chosen: npt.NDArray[np.int64], top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft labels of the rows ``chosen`` for all positions that have a next id: int64 ids and float log-probabilities
    [B, L - prefix, top]. A row that the target has not labelled has its own next ids, with certainty."""
    ids = labels.ids[chosen][:, :-1, :top].astype(np.int64)
    logp = labels.logp[chosen][:, :-1, :top].astype(np.float32)
    plain = labels.done[chosen] == 0
    ids[plain] = rows.tokens[chosen[plain], rows.prefix :, None]
    logp[plain], logp[plain, :, 0] = -np.inf, 0.0
    return torch.from_numpy(ids), torch.from_numpy(logp)


def train_step(
    model: Any,
    rows: Rows,
    labels: LabelCache,
    vocabulary: Vocabulary,
    plan: Plan,
    step: int,
    chosen: npt.NDArray[np.int64],
) -> float:
    """Forward and backward over the rows ``chosen``; leaves gradients in the model. Mean loss per position in nats."""
    device = model.device
    draws = np.random.default_rng((plan.seed, 2, step))
    pack = int(draws.choice(plan.packs))
    pack = pack if len(chosen) % pack == 0 else 1
    tokens = torch.from_numpy(rows.tokens[chosen]).long().to(device)
    ids, logp = (part.to(device) for part in batch_labels(rows, labels, chosen, plan.top))  # [B, P, top]
    hard = ids[..., 0]
    generator = torch.Generator().manual_seed(int(draws.integers(1 << 62)))
    candidates = vocabulary.candidates(hard.cpu(), generator)
    place = candidates.place.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        states = model.base_model(tokens.view(len(chosen) // pack, -1), use_cache=False).last_hidden_state
    states = states.view(len(chosen), rows.length, -1)[:, rows.prefix - 1 : -1].flatten(0, 1)  # [N, d]
    weight = model.get_output_embeddings().weight[candidates.ids.to(device)]  # [C, d]

    # The head goes chunk by chunk with its own backward pass, so that [N, C] logits never exist at once.
    cut_states, cut_weight = states.detach().requires_grad_(), weight.detach().requires_grad_()
    bf16_weight = cut_weight.bfloat16()
    head = bf16_weight.detach().requires_grad_()
    log_weight = candidates.log_weight.to(device)
    flat_ids, flat_logp, flat_hard = place[ids.flatten(0, 1)], logp.flatten(0, 1), place[hard.flatten()]
    total = 0.0
    for begin in range(0, len(states), LOSS_CHUNK):
        part = slice(begin, begin + LOSS_CHUNK)
        logits = cut_states[part].bfloat16() @ head.T
        loss = distillation_loss(
            logits + log_weight, flat_ids[part], flat_logp[part], flat_hard[part], plan.hard_weight
        ) / len(states)
        loss.backward()
        total += loss.item()
    bf16_weight.backward(head.grad)
    torch.autograd.backward([states, weight], [cut_states.grad, cut_weight.grad])
    return total


def train(
    model: Any,
    rows: Rows,
    labels: LabelCache,
    plan: Plan,
    out: Path,
    *,
    eval_every: int = 250,
    eval_rows: int = 64,
    stop_after: int | None = None,
    say: Any = print,
) -> Acceptance | None:
    """Train ``model`` in place up to ``plan.steps``, going on from the checkpoint in ``out`` if there is one.

    Writes checkpoint/, best.safetensors (best mean acceptance length on ``eval_rows`` validation rows) and curve.jsonl.
    ``stop_after``: leave after this many steps of this call, as an interrupt would. Gives the last evaluation.
    """
    vocabulary = Vocabulary(rows.counts(model.config.vocab_size), plan.core, plan.sample)
    train_rows, validation = rows.part("train"), rows.part("validation")[:eval_rows]
    measured: Acceptance | None = None

    def step(number: int) -> tuple[float, int]:
        loss = train_step(model, rows, labels, vocabulary, plan, number, batch_rows(plan, number, train_rows))
        return loss, plan.batch * (rows.length - rows.prefix)

    def measure() -> tuple[dict[str, Any], float]:
        nonlocal measured
        measured = evaluate(model, rows, labels, validation)
        point = {"labelled_rows": int(labels.done[train_rows].sum())} | measured.to_json()
        return point, measured.mean_acceptance_length

    run_steps(
        model, make_optimizers(model, plan), plan, out, step=step, evaluate=measure,
        eval_every=eval_every, stop_after=stop_after, say=say,
    )  # fmt: skip
    return measured


app = typer.Typer(add_completion=False)


@app.command()
def main(
    rows: Annotated[Path, typer.Option(help="Rows that the target wrote (.npz).")],
    target: Annotated[str, typer.Option(help="The target: a local folder or Hugging Face id.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, learning curve and best weights.")],
    labels: Annotated[Path | None, typer.Option(help="Folder of the target's labels (default: OUT/labels).")] = None,
    prefix: Annotated[int, typer.Option(help="Ids at the start of each row that carry no information.")] = 24,
    hidden: int = 256,
    layers: int = 4,
    intermediate: int = 768,
    kv_heads: int = 2,
    steps: int = 4000,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    lr: float = 2e-3,
    embedding_lr: float = 1e-3,
    optimizer: Annotated[str, typer.Option(help="For the layers' matrices: muon or adamw.")] = "muon",
    decay: Annotated[
        float, typer.Option(help="Last share of the steps over which the learning rate falls to zero.")
    ] = 0.5,
    hard_weight: Annotated[float, typer.Option(help="Weight of the target's argmax against its distribution.")] = 0.3,
    core: Annotated[int, typer.Option(help="Frequent ids in every softmax (0: the whole vocabulary).")] = 6144,
    sample: Annotated[int, typer.Option(help="Rarer ids drawn for each step.")] = 1024,
    seed: int = 0,
    eval_every: int = 250,
    eval_rows: Annotated[int, typer.Option(help="Validation rows of each evaluation.")] = 64,
    stop_after: Annotated[int | None, typer.Option(help="Leave after this many steps; run again to go on.")] = None,
    make_missing_labels: Annotated[
        bool, typer.Option(help="Label all rows first. Off: those of training teach their own next ids.")
    ] = True,
    start: Annotated[
        Path | None, typer.Option(help="Folder of an earlier run of this size: begin with its best weights.")
    ] = None,
    device: str = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads (0: torch's choice).")] = 0,
) -> None:
    """Distil a small Llama draft model from TARGET on ROWS."""
    from transformers import AutoModelForCausalLM

    if threads:
        torch.set_num_threads(threads)
    plan = Plan(
        hidden, layers, intermediate, kv_heads, steps, batch, lr, embedding_lr, optimizer,
        decay=decay, hard_weight=hard_weight, core=core, sample=sample, seed=seed,
    )  # fmt: skip

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        data = load_rows(rows, prefix)
        teacher: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, trust_remote_code=False)
        teacher = teacher.eval().to(device)
        vocab_size = teacher.config.vocab_size
        cache = LabelCache.open(labels or out / "labels", data, target=Path(target).name, vocab_size=vocab_size)
        out.mkdir(parents=True, exist_ok=True)
        # Held-out rows are measured against the target's own choices, whatever the others teach.
        parts = ("validation", "test", "train") if make_missing_labels else ("validation", "test")
        order = np.concatenate([data.part(name) for name in parts])
        make_labels(data, order, teacher, cache, progress=lambda n, of, rate: say(f"labels {n}/{of}, {rate:.1f}/s"))
        config = draft_config(
            teacher.config, hidden=hidden, layers=layers, intermediate=intermediate, kv_heads=kv_heads
        )
        model, kept = warm_start(config, teacher, data.counts(vocab_size), seed)
        del teacher
        if start is not None:
            load_weights(start / "best.safetensors", model)
        model = model.to(torch.device(device)).train()
        say(f"{model.num_parameters():,} parameters; the embeddings keep {kept:.1%} of the target's variance")
        config.save_pretrained(out)
        about = {"rows": data.digest, "embedding_kept": kept} | ({} if start is None else {"start": str(start)})
        (out / "plan.json").write_text(json.dumps(asdict(plan) | about))
        train(
            model, data, cache, plan, out,
            eval_every=eval_every, eval_rows=eval_rows, stop_after=stop_after, say=say,
        )  # fmt: skip
    except RedlineError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
