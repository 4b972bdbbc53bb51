"""Training of draft heads (EAGLE-3, MTP, Medusa) on a target's hidden states.

    python -m decoder train eagle3 --rows rows.npz --target DIR --out DIR [--steps 2500] ...

Every head is unrolled over ``unroll`` draft positions ("training-time test"): from the second on it reads its own
states, as it will in use. The loss is the cross-entropy to the target's distribution over the draft vocabulary,
weighted by 0.8 to the power of the position (EAGLE-3's recipe). Target, embeddings and, for MTP, the head are frozen.
Interrupt it whenever you like: the same command goes on from the last checkpoint in ``--out``, with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decoder.errors import ModelError
from decoder.training.evaluate import SHORTEST_STRETCH, Acceptance, greedy_stretches, summarise
from decoder.training.features import FeatureCache
from decoder.training.head_models import HeadModel
from decoder.training.loop import run_steps
from decoder.training.rows import Rows
from decoder.training.schedule import batch_rows


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Everything that decides the outcome of a training run, besides head, rows and target."""

    kind: str = "eagle3"
    steps: int = 2500
    batch: int = 8
    """Rows per step."""
    unroll: int = 3
    """Draft positions that are trained (Medusa: its number of heads)."""
    vocabulary: int = 8192
    """Most frequent ids of the training rows: what the head can draft, or what its loss always sees (MTP)."""
    sample: int = 1024
    """Rarer ids drawn for each step (MTP only: it scores the whole vocabulary in use)."""
    lr: float = 2e-3
    head_lr: float = 1e-3
    warmup: int = 50
    decay: float = 0.6
    position_weight: float = 0.8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Material:
    """What a training reads: rows, the target (frozen, bf16) and its states."""

    rows: Rows
    target: Any
    features: FeatureCache

    def states(self, chosen: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(tokens int64 [B, L], states [B, L, n, H] in the target's dtype) on the target's device."""
        device, dtype = self.target.device, self.target.dtype
        tokens = torch.from_numpy(self.rows.tokens[chosen]).long().to(device)
        return tokens, self.features.get(self.rows, chosen, self.target).to(device, dtype)


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over positions of the cross-entropy of softmax(logits) to p.

    Goes through the positions in parts that fit a processor's cache and makes the gradient on the way: logits of a
    whole batch in float32 would be most of the memory traffic of a step.
    """

    PART = 64

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor) -> Tensor:
        """logits and p [N, C], p summing to 1 in each row -> scalar in nats."""
        gradient = torch.empty_like(logits)
        loss = torch.zeros((), device=logits.device)
        for begin in range(0, len(logits), SoftCrossEntropy.PART):
            part = slice(begin, begin + SoftCrossEntropy.PART)
            x, wanted = logits[part].float(), p[part].float()
            total = x.logsumexp(-1, keepdim=True)
            loss += total.sum() - (wanted * x).sum()
            gradient[part] = x.sub_(total).exp_().sub_(wanted)
        ctx.save_for_backward(gradient)
        return loss / len(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grad / len(gradient)), None


def draft_vocabulary(rows: Rows, vocab_size: int, size: int) -> Tensor:
    """The ``size`` most frequent ids of the training rows, ascending: int64 [size]."""
    counts = rows.counts(vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def save_vocabulary(out: Path, vocabulary: Tensor) -> None:
    """Keep what a run's output rows stand for: who starts from its weights may draft other ids."""
    np.save(out / "vocabulary.npy", vocabulary.numpy())


def saved_vocabulary(run: Path) -> Tensor:
    """What ``save_vocabulary`` wrote. Raises OSError and ValueError."""
    return torch.from_numpy(np.load(run / "vocabulary.npy", allow_pickle=False))


def shared_rows(mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Where the ids stand that both vocabularies have, in the one and in the other."""
    at, there = (mine[:, None] == theirs).nonzero(as_tuple=True)
    return at, there


def start_from(head: HeadModel, run: Path, vocabulary: Tensor, heads: int) -> int:
    """Give ``head`` the best weights of another ``run``; output rows go by their ids, and those of ids that it did not
    draft stay as they are. Gives how many it drafted of ``vocabulary``. Raises ModelError where it does not fit."""
    try:
        tensors = load_file(run / "best.safetensors")
        theirs = saved_vocabulary(run)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{run} is not the folder of a trained head: {error}") from None
    mine, there = shared_rows(vocabulary, theirs)
    scoring = {id(head.scoring(i)) for i in range(heads)}
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            found = tensors.get(name)
            rows = id(parameter) in scoring
            wanted = (len(theirs), *parameter.shape[1:]) if rows else tuple(parameter.shape)
            if found is None or tuple(found.shape) != wanted:
                raise ModelError(f"the head in {run} is of another kind or size: {name}")
            if rows:
                parameter[mine] = found[there].to(parameter)
            else:
                parameter.copy_(found)
    return len(mine)


def make_optimizers(head: HeadModel, plan: HeadPlan) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices, AdamW for output matrices, norms and biases; ``base_lr`` is kept in each group."""
    scoring = {id(w) for w in (head.scoring(i) for i in range(plan.unroll)) if w is not None}
    inner = [p for p in head.parameters() if p.ndim == 2 and id(p) not in scoring]
    outer = [p for p in head.parameters() if id(p) in scoring]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    groups = [{"params": vectors, "lr": plan.head_lr}] + ([{"params": outer, "lr": plan.head_lr}] if outer else [])
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=plan.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def inputs(head: HeadModel, states: Tensor) -> Tensor:
    """The states that a head reads, of [B, L, n, H]: all but the last, or the last."""
    return states[:, :, :-1] if head.reads == "aux" else states[:, :, -1:]


def train_step(head: HeadModel, material: Material, plan: HeadPlan, vocabulary: Tensor, step: int, train: Any) -> float:
    """Forward and backward; leaves gradients in the head. Mean loss per position and draft position, in nats."""
    rows = material.rows
    tokens, states = material.states(batch_rows(plan, step, train))
    target = material.target
    ids = vocabulary
    if not head.own_head:
        rare = torch.ones(target.get_output_embeddings().weight.shape[0], dtype=torch.bool)
        rare[vocabulary] = False
        pool = rare.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(int(np.random.default_rng((plan.seed, 3, step)).integers(1 << 62)))
        ids = torch.cat([vocabulary, pool[torch.randperm(len(pool), generator=generator)[: plan.sample]]])
    with torch.no_grad():
        table = target.get_output_embeddings().weight[ids]
        p = (states[:, :, -1] @ table.T).softmax(-1)  # [B, L, C]
        embedded = target.get_input_embeddings()(tokens)
    weight_sum = sum(plan.position_weight**j for j in range(plan.unroll))
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        scored = head.unroll(embedded.float(), inputs(head, states).float(), plan.unroll)
        losses = []
        for j, out in enumerate(scored):
            # Index t drafts token t + 2 + j, which the target foretells at t + 1 + j; the prefix foretells nothing.
            begin, end = max(rows.prefix - 2 - j, 0), rows.length - 1 - j
            matrix = head.scoring(j)
            logits = out[:, begin:end].flatten(0, 1) @ (table if matrix is None else matrix).T
            wanted = p[:, begin + 1 + j : end + 1 + j].flatten(0, 1)
            loss = SoftCrossEntropy.apply(logits, wanted)
            losses.append(loss * (plan.position_weight**j / weight_sum))
    whole = torch.stack(losses).sum()
    whole.backward()
    return float(whole.detach())


@torch.no_grad()
def evaluate_head(
    head: HeadModel,
    material: Material,
    vocabulary: Tensor,
    chosen: npt.NDArray[np.int64],
    *,
    k: int = 4,
    batch: int = 8,
) -> Acceptance:
    """Greedy acceptance on the rows ``chosen``, walking along stretches where a row is the target's own argmax.

    There a draft counts only if all before it were right, so the teacher-forced unrolling is what drafting would give.
    """
    rows, target = material.rows, material.target
    full = target.get_output_embeddings().weight
    if not len(chosen):
        raise ModelError("no rows are held out for this: write more rows (2 % are for validation, 2 % for the test)")
    agreed, overlap, walks = [], [], []
    for start in range(0, len(chosen), batch):
        part = chosen[start : start + batch]
        tokens, states = material.states(part)
        best = torch.stack([(row @ full.T).argmax(-1) for row in states[:, :, -1]])  # [B, L]
        embedded = target.get_input_embeddings()(tokens)
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            scored = head.unroll(embedded.float(), inputs(head, states).float(), k)
            right = torch.zeros(len(part), k, rows.length, dtype=torch.bool)
            for j, out in enumerate(scored):
                matrix = head.scoring(j)
                for b in range(len(part)):
                    logits = out[b] @ (full if matrix is None else matrix).T
                    guess = logits.argmax(-1).cpu()
                    guess = guess if matrix is None else vocabulary[guess]
                    right[b, j, : rows.length - 1 - j] = guess[: rows.length - 1 - j] == best[b, 1 + j :].cpu()
                    if j == 0:
                        agreed.append(right[b, 0, rows.prefix - 2 : -1].numpy())
                        p = (states[b, :, -1] @ full.T).float().softmax(-1)[rows.prefix - 1 :]
                        q = logits.float().softmax(-1)[rows.prefix - 2 : -1]
                        p = p if matrix is None else p[:, vocabulary]
                        overlap.append(torch.minimum(p, q).sum(-1).mean().item())
        follows = (best[:, :-1] == tokens[:, 1:]).cpu().numpy()  # token t + 1 is the target's argmax at t
        for b in range(len(part)):
            for begin, end in greedy_stretches(follows[b, rows.prefix - 1 :], SHORTEST_STRETCH):
                walks.append(_walk(right[b].numpy(), begin + rows.prefix - 1, end + rows.prefix - 1, k))
    length, positions, steps = summarise(walks, k)
    every = np.concatenate(agreed)
    return Acceptance(float(every.mean()), float(np.mean(overlap)), k, length, positions, steps, len(every))


def _walk(right: npt.NDArray[np.bool_], begin: int, end: int, k: int) -> list[int]:
    """Accepted drafts of each step of ``k`` while positions [begin, end) follow the target's argmax."""
    accepted, at = [], begin
    while at + k < end:
        wrong = np.flatnonzero(~right[:, at])
        accepted.append(int(wrong[0]) if len(wrong) else k)
        at += accepted[-1] + 1
    return accepted


def train(
    head: HeadModel,
    material: Material,
    plan: HeadPlan,
    vocabulary: Tensor,
    out: Path,
    *,
    eval_every: int = 250,
    eval_rows: int = 64,
    stop_after: int | None = None,
    say: Callable[[str], None] = print,
) -> Acceptance | None:
    """Train ``head`` in place up to ``plan.steps``, going on from the checkpoint in ``out`` if there is one.

    Writes checkpoint/, best.safetensors (best mean acceptance length on ``eval_rows`` validation rows) and curve.jsonl.
    ``stop_after``: leave after this many steps of this call, as an interrupt would. Gives the last evaluation.
    """
    rows = material.rows
    train_rows, validation = rows.part("train"), rows.part("validation")[:eval_rows]
    measured: Acceptance | None = None

    def step(number: int) -> tuple[float, int]:
        loss = train_step(head, material, plan, vocabulary, number, train_rows)
        return loss, plan.batch * (rows.length - rows.prefix)

    def evaluate() -> tuple[dict[str, Any], float]:
        nonlocal measured
        measured = evaluate_head(head, material, vocabulary, validation)
        return measured.to_json(), measured.mean_acceptance_length

    run_steps(
        head, make_optimizers(head, plan), plan, out, step=step, evaluate=evaluate,
        clip=0.5, eval_every=eval_every, stop_after=stop_after, say=say,
    )  # fmt: skip
    return measured
