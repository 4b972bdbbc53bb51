"""Training rows: a target's own conversations, written from nothing but its chat template.

Given the template up to the user turn, an instruct model writes a message, answers it and goes on; turns are closed and
opened with the template's own ids. All rows of a batch are equally long and decode together over one cache; user
turns are sampled at temperature 1, answers greedily or at the temperature of their row. Batches are kept as they are
made, so the work can stop and go on at any batch; a batch is a function of seed and number alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder.errors import ModelError
from decoder.target import RowRunner
from decoder.training.rows import split_by_opening

MIX = (0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 0.7, 1.0)
"""Temperature of the answers, by row modulo 8; 0 is greedy."""
TOP = 50
"""Answers are sampled among this many likeliest ids (user turns among all)."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The template's ids around the turns of a conversation."""

    prefix: tuple[int, ...]
    """Everything up to the first user message."""
    to_answer: tuple[int, ...]
    """From the end of a user message to the answer, the end token included."""
    to_user: tuple[int, ...]
    """From the end of an answer to the next user message, the end token included."""


def find_turns(tokenizer: Any) -> Turns:
    """Cut the chat template of ``tokenizer`` at marked messages. Raises ModelError where that cannot be done."""
    marks = ["AAAA", "BBBB", "CCCC"]
    roles = ["user", "assistant", "user"]
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("the target has no chat template: there is nothing to write conversations from")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise ModelError("the target's chat template changes messages: it cannot be cut between turns")
        parts.append(tuple(tokenizer.encode(before, add_special_tokens=False)))
    turns = Turns(*parts)
    if not turns.to_answer or not turns.to_user or not turns.prefix:
        raise ModelError("the target's chat template has nothing between its turns")
    return turns


def answers_of(rows: npt.NDArray[Any], turns: Turns) -> list[list[int]]:
    """The first whole answer of each of ``rows`` [R, L], where it has one."""
    found = []
    begin, end = list(turns.to_answer), turns.to_user[0]
    for row in rows.tolist():
        at = next((i for i in range(len(turns.prefix), len(row)) if row[i : i + len(begin)] == begin), None)
        if at is not None and end in row[at + len(begin) :]:
            start = at + len(begin)
            found.append(row[start : row.index(end, start)])
    return found


@dataclass(frozen=True, slots=True)
class DataPlan:
    """Everything that decides the rows, besides the target."""

    rows: int = 1024
    length: int = 384
    batch: int = 128
    seed: int = 0
    openings: tuple[str, ...] = ()
    """Beginnings of the first user message, drawn for each row; none: the model begins by itself."""
    prompts: tuple[str, ...] = ()
    """Whole first messages, one for each row, instead."""


class _Conversation:
    """Which turn a row is in, and ids that it must emit before it may choose again."""

    def __init__(self, turns: Turns, temperature: float, opening: Sequence[int], whole: bool) -> None:
        """``opening`` begins the first message, or is the ``whole`` of it."""
        self.turns, self.temperature = turns, temperature
        self.answering = whole
        self.forced = [*opening, *(turns.to_answer if whole else ())]

    def choose(self, drawn: int) -> int:
        """The next id, where the model drew ``drawn``: the template's own where it is closing a turn."""
        if self.forced:
            return self.forced.pop(0)
        around = self.turns.to_user if self.answering else self.turns.to_answer
        if drawn == around[0]:
            self.answering = not self.answering
            self.forced = list(around[1:])
        return drawn


@torch.inference_mode()
def write_batch(
    runner: RowRunner, turns: Turns, plan: DataPlan, number: int, first: Sequence[Sequence[int]] | Openings
) -> Any:
    """Rows of batch ``number``: uint16 or int32 [rows, length]. ``first``: ids of the plan's openings, or ``Openings``
    of whole messages, of which the batch takes its own."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + number)
    whole = isinstance(first, Openings)
    openings: Sequence[Sequence[int]]
    if isinstance(first, Openings):
        openings = first.batch(number, plan.batch)
    else:
        picks = torch.randint(max(len(first), 1), (plan.batch,), generator=generator).tolist()
        openings = [first[pick] if first else () for pick in picks]
    talks = [_Conversation(turns, MIX[row % len(MIX)], ids, whole) for row, ids in enumerate(openings)]
    # What every row is given anyway is read in one pass.
    given = min(len(talk.forced) for talk in talks)
    start = len(turns.prefix) + given
    rows = torch.empty(len(talks), plan.length, dtype=torch.long)
    rows[:, :start] = torch.tensor([[*turns.prefix, *talk.forced[:given]] for talk in talks])
    for talk in talks:
        del talk.forced[:given]
    runner.reset(len(talks))
    logits = runner.forward(rows[:, :start], last=True)
    for at in range(start, plan.length):
        drawn = _draw(logits[:, -1].float().cpu(), talks, generator)
        rows[:, at] = torch.tensor([talk.choose(d) for talk, d in zip(talks, drawn, strict=True)])
        if at + 1 < plan.length:
            logits = runner.forward(rows[:, at : at + 1])
    return rows.numpy().astype(np.uint16 if runner.vocab_size <= 1 << 16 else np.int32)


class Openings:
    """Whole first messages by their ids, ordered so that the rows of a batch have messages of like length."""

    def __init__(self, messages: Sequence[Sequence[int]], most: int) -> None:
        """Messages of more than ``most`` ids are left out. Raises ModelError where none is left."""
        self.messages = sorted((list(ids) for ids in messages if len(ids) <= most), key=len)
        if not self.messages:
            raise ModelError(f"no prompt is shorter than {most} tokens: choose longer rows")

    def batches(self, size: int) -> list[int]:
        """Numbers of the batches of ``size``, in an order that takes all lengths alike."""
        count = -(-len(self.messages) // size)
        return [number for part in range(4) for number in range(part, count, 4)]

    def batch(self, number: int, size: int) -> list[list[int]]:
        """The messages of batch ``number``, the last of which may be smaller."""
        return self.messages[number * size : (number + 1) * size]


def _draw(logits: Tensor, talks: Sequence[_Conversation], generator: torch.Generator) -> list[int]:
    """One id per row [B], by each row's own temperature and turn."""
    u = torch.rand(len(talks), generator=generator)
    temperature = torch.tensor([talk.temperature if talk.answering else 1.0 for talk in talks])
    answering = torch.tensor([talk.answering for talk in talks])
    result = logits.argmax(-1)
    # A user turn is drawn among 20 times as many ids: nearly all of the mass, without a sort of the vocabulary.
    for chosen, most in (((temperature > 0) & answering, TOP), (~answering, 20 * TOP)):
        if bool(chosen.any()):
            values, ids = logits[chosen].topk(min(most, logits.shape[1]), dim=-1)
            p = (values / temperature[chosen, None]).softmax(-1).cumsum(-1)
            place = torch.searchsorted(p, (u[chosen, None] * p[:, -1:]).contiguous()).clamp_max(p.shape[1] - 1)
            result[chosen] = ids.gather(1, place)[:, 0]
    picked: list[int] = result.tolist()
    return picked


def generate(
    runner: RowRunner,
    tokenizer: Any,
    plan: DataPlan,
    out: Path,
    *,
    target: str,
    stop_after: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> int:
    """Write ``plan.rows`` rows to ``out`` (.npz of ``rows`` and ``split``), batch by batch; gives the rows there are.

    ``progress(rows, wanted, tokens per second)``. ``stop_after`` leaves after so many batches of this call, as an
    interrupt would.
    """
    turns = find_turns(tokenizer)
    first: Sequence[Sequence[int]] | Openings
    first = [tokenizer.encode(text, add_special_tokens=False) for text in plan.openings or plan.prompts]
    numbers = list(range(-(-plan.rows // plan.batch)))
    if plan.prompts:
        # An answer needs room: what it is asked may fill two thirds of a row.
        room = plan.length - len(turns.prefix) - len(turns.to_answer)
        first = Openings(first[: plan.rows], 2 * room // 3)
        numbers = first.batches(plan.batch)
    parts = out.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    about = asdict(plan) | {"target": target, "prefix": len(turns.prefix), "openings": list(plan.openings)}
    del about["rows"], about["prompts"]
    if plan.prompts:
        about["prompts"] = hashlib.sha256(json.dumps(plan.prompts[: plan.rows]).encode()).hexdigest()[:16]
    meta = parts / "plan.json"
    if meta.is_file() and json.loads(meta.read_text()) != about:
        raise ModelError(f"{parts} holds rows of another plan: choose another --out, or the options it was begun with")
    meta.write_text(json.dumps(about))
    made = 0
    for at, number in enumerate(numbers):
        path = parts / f"{number:05}.npy"
        if path.is_file():
            continue
        if stop_after is not None and made >= stop_after:
            break
        began = time.monotonic()
        rows = write_batch(runner, turns, plan, number, first)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, rows)
        os.replace(partial, path)
        made += 1
        if progress:
            done = min((at + 1) * plan.batch, plan.rows)
            progress(done, plan.rows, len(rows) * (plan.length - len(turns.prefix)) / (time.monotonic() - began))
    return merge(out, [np.load(path) for path in sorted(parts.glob("*.npy"))], len(turns.prefix))


def merge(out: Path, parts: Sequence[npt.NDArray[Any]], prefix: int) -> int:
    """Write ``parts`` [*, L] as one file of rows with their split by conversation; gives the number of rows."""
    if not parts:
        return 0
    rows = np.concatenate(parts)
    # Twice the same conversation would be counted twice, and might be on both sides of a split made elsewhere.
    _, first = np.unique([hashlib.sha256(row.tobytes()).digest() for row in rows], return_index=True)
    rows = rows[np.sort(first)]
    partial = out.with_name(out.name + ".partial.npz")
    np.savez_compressed(partial, rows=rows, split=split_by_opening(rows.astype(np.int32), prefix))
    os.replace(partial, out)
    return len(rows)


def extend(out: Path, more: Sequence[Path], prefix: int) -> int:
    """Join files of rows of one length into ``out``; a row keeps the part that the first file with a split gave it."""
    parts, splits = [], []
    for path in more:
        with np.load(path, allow_pickle=False) as file:
            rows = file["rows"]
            parts.append(rows)
            splits.append(file["split"] if "split" in file else split_by_opening(rows.astype(np.int32), prefix))
    if len({part.shape[1] for part in parts}) != 1:
        raise ModelError(f"rows of different length cannot be joined: {[part.shape[1] for part in parts]}")
    np.savez_compressed(out, rows=np.concatenate(parts), split=np.concatenate(splits).astype(np.uint8))
    return int(sum(len(part) for part in parts))
