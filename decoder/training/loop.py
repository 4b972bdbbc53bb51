"""The loop that every training here runs: learning rate, steps, evaluations, the best weights, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoder.training.checkpoint import load_checkpoint, save_checkpoint, save_weights
from decoder.training.schedule import Schedule, learning_rate


def run_steps(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Schedule,
    out: Path,
    *,
    step: Callable[[int], tuple[float, int]],
    evaluate: Callable[[], tuple[dict[str, Any], float]],
    larger: bool = True,
    clip: float = 1.0,
    eval_every: int = 250,
    stop_after: int | None = None,
    say: Callable[[str], Any] = print,
) -> None:
    """Train ``model`` in place up to ``plan.steps``, going on from the checkpoint in ``out`` if there is one.

    ``step(number)`` leaves gradients and gives its loss and the tokens it trained on; ``evaluate()`` gives a point for
    the learning curve, and the number (the larger or the smaller the better) that chooses the weights that are kept.
    Writes checkpoint/, best.safetensors and curve.jsonl. ``stop_after``: leave after so many steps, as an interrupt
    would.
    """
    out.mkdir(parents=True, exist_ok=True)
    state = load_checkpoint(out / "checkpoint", model, list(optimizers)) or {"step": 0, "best": None, "seconds": 0.0}
    losses: list[float] = []
    first, began = state["step"], time.monotonic() - state["seconds"]
    last = plan.steps if stop_after is None else min(plan.steps, first + stop_after)
    for number in range(first, last):
        factor = learning_rate(plan, number)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["base_lr"] * factor
        loss, tokens = step(number)
        losses.append(loss)
        # Older checkpoints do not count tokens; their steps were all of one size.
        state["tokens"] = state.get("tokens", number * tokens) + tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = number + 1
        if done % 20 == 0:
            say(f"step {done}/{plan.steps}  loss {np.mean(losses[-20:]):.3f}  {time.monotonic() - began:.0f} s")
        if done % eval_every == 0 or done == last:
            model.eval()
            measured, value = evaluate()
            model.train()
            seconds = time.monotonic() - began
            point = {"step": done, "tokens": state["tokens"], "seconds": round(seconds)}
            point |= {"loss": round(float(np.mean(losses)), 4)} | measured
            with (out / "curve.jsonl").open("a") as file:
                file.write(json.dumps(point) + "\n")
            say(json.dumps(point))
            losses.clear()
            if state["best"] is None or (value > state["best"] if larger else value < state["best"]):
                state["best"] = value
                save_weights(out / "best.safetensors", model)
            save_checkpoint(out / "checkpoint", model, list(optimizers), state | {"step": done, "seconds": seconds})
