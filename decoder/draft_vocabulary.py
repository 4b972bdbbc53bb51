"""Which tokens a draft scores, where its folder says so: the frequent ones.

Most of what a small model or a head of one layer reads is its output matrix, of which a token that is hardly ever
written needs no row (the idea is FR-Spec's, arXiv 2502.14856). What it does not score it never drafts, and drafting
stays lossless: its distribution is over the others, and that is the one that drafts are drawn from and verified
against. The file lies beside the draft's; other engines do not look at it and score everything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from decoder.errors import ModelError

FILE = "draft_vocabulary.json"


def read(folder: Path | None, vocab_size: int) -> Tensor | None:
    """Ascending ids, int64 [D], of what the draft in ``folder`` scores; None: all ``vocab_size`` tokens.

    Raises ModelError where the file is there and is not such a list.
    """
    path = None if folder is None else folder / FILE
    if path is None or not path.is_file():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["ids"]
        numbers = all(type(i) is int for i in ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {type(error).__name__}") from None
    ascending = numbers and all(a < b for a, b in pairwise(ids))
    if not ids or not ascending or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ModelError(f"{path} is not an ascending list of token ids below {vocab_size:,}")
    return torch.tensor(ids, dtype=torch.long)


def words(scored: int, of: int) -> str:
    """For the record of a run."""
    return f"{scored:,} of {of:,} tokens"


def write(folder: Path, ids: Sequence[int]) -> None:
    """Let the draft in ``folder`` score only ``ids``."""
    (folder / FILE).write_text(json.dumps({"ids": sorted(map(int, ids))}, separators=(",", ":")) + "\n")
