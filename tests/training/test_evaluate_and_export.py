from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decoder.draft_vocabulary import read
from decoder.training.curve import curve_svg, read_curve
from decoder.training.evaluate import evaluate, greedy_stretches, summarise, walk
from decoder.training.export import export_model, model_card
from decoder.training.labels import LabelCache
from decoder.training.rows import Rows, load_rows
from tests.training.conftest import PREFIX, VOCAB


def test_walk_counts_accepted_drafts_step_by_step() -> None:
    # k = 2: positions 0, 1 right (2 accepted, bonus at 2); 3 wrong (0 accepted); 4 right, 5 wrong (1 accepted).
    right = np.array([1, 1, 0, 0, 1, 0, 1, 1], bool)
    assert walk(right, 2) == [2, 0, 1]
    length, positions, steps = summarise([[2, 0, 1]], 2)
    assert (length, steps) == (2.0, 3)
    assert positions == pytest.approx((2 / 3, 1 / 3))


def test_short_greedy_stretches_are_left_out() -> None:
    greedy = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], bool)
    assert greedy_stretches(greedy, 3) == [(3, 7), (8, 11)]
    assert greedy_stretches(np.zeros(4, bool), 3) == []


def test_a_copy_of_the_target_is_always_accepted(rows: Rows, labels: LabelCache, target: Any) -> None:
    measured = evaluate(target, rows, labels, rows.part("test"), k=4)
    assert measured.steps > 0
    assert measured.mean_acceptance_length > 4.5  # bf16 against float32 may flip a near-tie
    assert measured.agreement > 0.95
    listed = np.exp(labels.logp[rows.part("test")].astype(np.float32)).sum(-1).mean()
    assert measured.overlap == pytest.approx(listed, abs=0.02)  # it counts the listed ids only


def test_nothing_labelled_is_no_division_by_zero(rows: Rows, labels: LabelCache, target: Any) -> None:
    labels.done[:] = 0
    measured = evaluate(target, rows, labels, rows.part("test"))
    assert (measured.steps, measured.mean_acceptance_length, measured.agreement) == (0, 1.0, 0.0)


def test_exported_folder_loads_alone_and_gives_the_same_logits(target: Any, tmp_path: Path) -> None:
    size = export_model(target, tmp_path / "none", tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    assert size == (tmp_path / "draft" / "model.safetensors").stat().st_size
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32).eval()
    assert type(loaded).__name__ == "LlamaForCausalLM"
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(loaded(ids).logits, target(ids).logits, atol=0.1, rtol=0.1)


def test_card_names_data_seed_steps_and_acceptance(rows: Rows, labels: LabelCache, target: Any) -> None:
    test = evaluate(target, rows, labels, rows.part("test"))
    plan = {"layers": 2, "hidden": 32, "embedding_kept": 0.5, "hard_weight": 0.3, "top": 16, "core": 48, "seed": 7}
    plan |= {"steps": 10, "batch": 4, "optimizer": "muon", "lr": 2e-3, "embedding_lr": 1e-3, "vocab_size": 96}
    card = model_card("toy", "Toy", plan, {"step": 10, "tokens": 2e6, "labelled_rows": 16}, rows, test, 1000, 2000)
    for part in (rows.digest, "seed\n  7", "10 of 10 steps", f"**{test.mean_acceptance_length:.2f}**", "apache-2.0"):
        assert part in card


def test_a_draft_is_trained_gone_on_from_and_exported_by_commands(target: Any, rows_file: Path, tmp_path: Path) -> None:
    """As a user types them; only held-out rows are labelled, and the draft is told what it scores."""
    from decoder.cli import main

    # A draft's heads are 64 wide, and it is no wider than its target.
    wide = LlamaConfig(**target.config.to_dict() | {"hidden_size": 64, "head_dim": 32})
    LlamaForCausalLM(wide).save_pretrained(tmp_path / "target")
    where = ["--rows", str(rows_file), "--target", str(tmp_path / "target"), "--prefix", str(PREFIX)]
    size = ["--hidden", "64", "--layers", "1", "--intermediate", "48", "--kv-heads", "1"]
    size += ["--core", "48", "--sample", "8", "--steps", "2", "--batch", "2", "--no-make-missing-labels"]

    def run(*arguments: str) -> None:
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments])
        assert not end.value.code

    first, second, draft = tmp_path / "first", tmp_path / "second", tmp_path / "draft"
    run("draft-model", *where, *size, "--out", str(first))
    done = np.load(first / "labels" / "done.npy")
    assert done[:8].all(), "validation and test rows"
    assert not done[8:].any()
    run("draft-model", *where, *size, "--out", str(second), "--start", str(first), "--lr", "0", "--embedding-lr", "0")
    old, new = (load_file(folder / "best.safetensors") for folder in (first, second))
    assert all(torch.allclose(old[name], new[name], atol=1e-4) for name in old)
    mean = tmp_path / "mean"
    run("average", "--first", str(first), "--second", str(second), "--share", "0.5", "--out", str(mean))
    mixed = load_file(mean / "best.safetensors")
    assert all(torch.allclose(mixed[name], (old[name] + new[name]) / 2, atol=1e-6) for name in old)
    labels = ["--labels", str(second / "labels")]
    run("export-draft-model", *where, *labels, "--run", str(mean), "--out", str(draft), "--frequent", str(rows_file),
        "--scores", "20")  # fmt: skip
    card = (draft / "README.md").read_text()
    assert "an earlier training on other rows" in card
    assert "it scores 20 frequent ids" in card
    assert "50% of this one's" in card
    counts = load_rows(rows_file, PREFIX).counts(VOCAB)
    kept = read(draft, VOCAB)
    assert kept is not None
    assert len(kept) == 20
    assert counts[kept].min() >= np.delete(counts, kept).max()


def test_curve_keeps_the_later_of_two_points_and_draws(tmp_path: Path) -> None:
    points = [
        {"step": 5, "tokens": 5e6, "x": 1.0},
        {"step": 9, "tokens": 9e6, "x": 1.4},
        {"step": 5, "tokens": 5e6, "x": 1.2},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(point) for point in points))
    read = read_curve(tmp_path / "c.jsonl")
    assert [point["x"] for point in read] == [1.2, 1.4]
    svg = curve_svg(read, "x", "acceptance")
    assert svg.startswith("<svg")
    assert svg.count("<polyline") == 1
    assert "9.0 M" in svg
