from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder.errors import ModelError
from decoder.training.labels import LabelCache, make_labels
from decoder.training.rows import Rows, load_rows, split_by_opening
from tests.training.conftest import PREFIX, VOCAB


def test_parts_are_disjoint_and_complete(rows: Rows) -> None:
    parts = [set(rows.part(name).tolist()) for name in ("train", "validation", "test")]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(rows.tokens)
    assert rows.counts(VOCAB).sum() == len(parts[0]) * (rows.length - PREFIX)


def test_same_opening_same_part_and_order_does_not_matter() -> None:
    tokens = np.random.default_rng(0).integers(0, 9, (2000, 64), dtype=np.int32)
    tokens[1000:, :48] = tokens[:1000, :48]  # the same openings with other ends
    split = split_by_opening(tokens, 4)
    assert (split[:1000] == split[1000:]).all()
    assert (split_by_opening(tokens[::-1], 4)[::-1] == split).all()
    assert 10 < (split[:1000] == 1).sum() < 35
    assert 10 < (split[:1000] == 2).sum() < 35


@pytest.mark.parametrize("content", [None, {"other": np.zeros(3)}, {"rows": np.zeros((2, 3))}])
def test_a_file_that_is_no_rows_is_refused(tmp_path: Path, content: dict[str, Any] | None) -> None:
    path = tmp_path / "rows.npz"
    if content is None:
        path.write_text("no zip")
    else:
        np.savez(path, **content)
    with pytest.raises(ModelError, match=r"rows\.npz"):
        load_rows(path, 4)


def test_labels_are_the_targets_distribution(rows: Rows, labels: LabelCache, target: Any) -> None:
    with torch.inference_mode():
        logp = target(torch.from_numpy(rows.tokens[5:6]).long()).logits[0, PREFIX - 1 :].log_softmax(-1)
    values, ids = logp.topk(16, -1)
    assert (labels.ids[5, :, 0] == ids[:, 0].numpy()).all()
    np.testing.assert_allclose(labels.logp[5], values.numpy(), atol=2e-2)


def test_labelling_goes_on_where_it_stopped(rows: Rows, target: Any, tmp_path: Path) -> None:
    cache = LabelCache.open(tmp_path / "l", rows, target="toy", vocab_size=VOCAB, k=16)
    make_labels(rows, [3, 1], target, cache)
    again = LabelCache.open(tmp_path / "l", rows, target="toy", vocab_size=VOCAB, k=16)
    assert again.missing(range(5)) == [0, 2, 4]
    seen: list[tuple[int, int]] = []
    make_labels(rows, range(5), target, again, batch=2, progress=lambda done, of, _: seen.append((done, of)))
    assert seen == [(2, 3), (3, 3)]
    assert again.missing(range(5)) == []


def test_labels_of_other_rows_are_refused(rows: Rows, tmp_path: Path) -> None:
    LabelCache.open(tmp_path / "l", rows, target="toy", vocab_size=VOCAB, k=16)
    with pytest.raises(ModelError, match="k 16 instead of 8"):
        LabelCache.open(tmp_path / "l", rows, target="toy", vocab_size=VOCAB, k=8)
