"""Rows of token ids that a target wrote itself, and which of them are for training, validation and test.

A row is one conversation of fixed length; its first ``prefix`` ids are the chat template up to the user turn and carry
no information. A row belongs to exactly one part, and rows with the same opening message belong to the same part, so
that a draft is never measured on a conversation that it has seen.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from decoder.errors import ModelError

TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
OPENING = 32
"""How many ids behind the prefix decide the part of a row when the file brings no split."""


@dataclass(frozen=True, slots=True)
class Rows:
    """``tokens``: int32 [R, L]; ``split``: uint8 [R] of TRAIN, VALIDATION or TEST; ``digest``: of tokens and split."""

    tokens: npt.NDArray[np.int32]
    split: npt.NDArray[np.uint8]
    prefix: int
    digest: str

    @property
    def length(self) -> int:
        """Ids per row."""
        return int(self.tokens.shape[1])

    def part(self, name: str) -> npt.NDArray[np.int64]:
        """Indices of the rows of part ``name`` (train, validation or test), ascending."""
        return np.flatnonzero(self.split == PARTS[name])

    def counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each id occurs behind the prefix of the training rows; int64 [vocab_size]."""
        return np.bincount(self.tokens[self.part("train"), self.prefix :].ravel(), minlength=vocab_size)


def load_rows(path: Path, prefix: int = 24) -> Rows:
    """Read an ``.npz`` with ``rows`` [R, L] and, optionally, ``split`` [R]. Raises ModelError when it is neither."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens = file["rows"].astype(np.int32)
            split = file["split"].astype(np.uint8) if "split" in file else None
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is not a file of training rows (.npz with an array 'rows'): {error}") from None
    if tokens.ndim != 2 or tokens.shape[1] <= prefix + 1:
        raise ModelError(f"{path}: 'rows' must be [rows, length > {prefix + 1}], not {list(tokens.shape)}")
    if split is None:
        split = split_by_opening(tokens, prefix)
    if split.shape != tokens.shape[:1] or split.max(initial=0) > TEST:
        raise ModelError(f"{path}: 'split' must hold 0, 1 or 2 for each of the {len(tokens)} rows")
    return Rows(tokens, split, prefix, hashlib.sha256(tokens.tobytes() + split.tobytes()).hexdigest()[:16])


def split_by_opening(tokens: npt.NDArray[np.int32], prefix: int) -> npt.NDArray[np.uint8]:
    """2 % validation, 2 % test, by a hash of each row's opening: stable when rows are appended or reordered."""
    split = np.zeros(len(tokens), np.uint8)
    for i, row in enumerate(tokens[:, prefix : prefix + OPENING]):
        bucket = int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:4], "big") % 50
        split[i] = {0: VALIDATION, 1: TEST}.get(bucket, TRAIN)
    return split


def save_split(rows: Rows, path: Path) -> None:
    """Which conversations were held out: indices of the validation and test rows, and the digest of the file."""
    held = {name: rows.part(name).tolist() for name in PARTS if name != "train"}
    path.write_text(json.dumps({"rows": rows.digest, "count": len(rows.tokens), **held}) + "\n")
