"""How well a draft foretells a target on conversations that neither training nor model selection has seen.

Greedy acceptance needs no drafting loop here: where a row follows the target's own argmax, a draft token counts only if
all before it were right, so the draft's context is always the row itself, and one teacher-forced pass tells everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoder.training.labels import LabelCache
from decoder.training.rows import Rows

SHORTEST_STRETCH = 32
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``agreement``: share of positions whose argmax is the target's; ``overlap``: mean of sum min(p, q), the
    acceptance rate of sampled decoding at temperature 1, over the target's listed ids (a lower bound).

    ``mean_acceptance_length`` and ``acceptance_per_position`` (entry i: share of steps whose draft i was accepted)
    come from walking along greedy stretches in steps of ``k`` drafts; ``steps`` counts them.
    """

    agreement: float
    overlap: float
    k: int
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    steps: int
    positions: int

    def to_json(self) -> dict[str, Any]:
        """Plain dict, rounded for reading."""
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return rounded | {"acceptance_per_position": [round(rate, 4) for rate in self.acceptance_per_position]}


def greedy_stretches(greedy: BoolArray, shortest: int) -> list[tuple[int, int]]:
    """[begin, end) of each run of at least ``shortest`` positions at which the row goes on with the target's argmax.
    Shorter runs are chance hits in sampled text, and easier than what greedy decoding writes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], greedy.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= shortest]


def walk(right: BoolArray, k: int) -> list[int]:
    """Accepted drafts of each step of ``k`` along a greedy stretch. ``right[i]``: draft and target agree at i."""
    accepted: list[int] = []
    at = 0
    while at + k < len(right):
        wrong = np.flatnonzero(~right[at : at + k])
        accepted.append(int(wrong[0]) if len(wrong) else k)
        at += accepted[-1] + 1
    return accepted


def summarise(per_row: Sequence[Sequence[int]], k: int) -> tuple[float, tuple[float, ...], int]:
    """Mean acceptance length, acceptance per position and number of steps, pooled over rows."""
    counts = np.array([n for row in per_row for n in row], dtype=np.int64)
    if not len(counts):
        return 1.0, (0.0,) * k, 0
    return 1 + float(counts.mean()), tuple(float((counts > i).mean()) for i in range(k)), len(counts)


@torch.inference_mode()
def evaluate(
    model: Any,
    rows: Rows,
    labels: LabelCache,
    chosen: Sequence[int] | npt.NDArray[np.int64],
    *,
    k: int = 4,
    batch: int = 8,
) -> Acceptance:
    """Measure ``model`` on the rows ``chosen`` (indices), of which the labelled ones count."""
    rows_done = [int(row) for row in chosen if labels.done[row]]
    device, head = model.device, model.get_output_embeddings()
    agreed: list[BoolArray] = []
    overlap: list[float] = []
    walks: list[list[int]] = []
    for start in range(0, len(rows_done), batch):
        part = rows_done[start : start + batch]
        tokens = torch.from_numpy(rows.tokens[part]).long().to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            states = model.base_model(tokens, use_cache=False).last_hidden_state[:, rows.prefix - 1 :]
            for row, hidden in zip(part, states, strict=True):
                logits = head(hidden).float()
                ids = torch.from_numpy(labels.ids[row].astype(np.int64)).to(device)
                p = torch.from_numpy(labels.logp[row].astype(np.float32)).exp().to(device)
                q = (logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)).exp()
                right = (logits.argmax(-1) == ids[:, 0]).cpu().numpy()
                greedy = labels.ids[row, :-1, 0] == rows.tokens[row, rows.prefix :]
                agreed.append(right)
                overlap.append(torch.minimum(p, q).sum(-1).mean().item())
                walks.extend(walk(right[a:b], k) for a, b in greedy_stretches(greedy, SHORTEST_STRETCH))
    length, positions, steps = summarise(walks, k)
    every = np.concatenate(agreed) if agreed else np.zeros(0, bool)
    return Acceptance(
        agreement=float(every.mean()) if len(every) else 0.0,
        overlap=float(np.mean(overlap)) if overlap else 0.0,
        k=k,
        mean_acceptance_length=length,
        acceptance_per_position=positions,
        steps=steps,
        positions=len(every),
    )
