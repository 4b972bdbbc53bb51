"""A tiny draft with a vocabulary of its own: its tokenizer, its batches, resuming, and the folder it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from decoder.errors import ModelError
from decoder.training.rows import Rows, load_rows
from decoder.training.small_vocabulary import (
    PLAN,
    Batches,
    encode,
    epoch_blocks,
    evaluate,
    new_model,
    save_tokenizer,
    texts_of,
    train,
    train_tokenizer,
)
from decoder.training.small_vocabulary_export import main as export
from tests.spellings import STORY, shared
from tests.tiny import tiny_tokenizer

LENGTH, PREFIX, BLOCK = 48, 4, 16
SMALL = replace(PLAN, hidden=32, layers=1, intermediate=48, steps=9, batch=4, warmup=2, packs=(1, 2), lr=5e-3)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = tiny_tokenizer()(STORY * 40)["input_ids"]
    tokens = np.array(ids[: LENGTH * (len(ids) // LENGTH)], np.uint16).reshape(-1, LENGTH)
    split = np.zeros(len(tokens), np.uint8)
    split[:4], split[4:8] = 1, 2
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    np.savez(path, rows=tokens, split=split)
    return path


@pytest.fixture
def rows(rows_file: Path) -> Rows:
    return load_rows(rows_file, PREFIX)


@pytest.fixture
def raw(rows: Rows) -> Tokenizer:
    return train_tokenizer(texts_of(rows, "train", tiny_tokenizer()), 300, tiny_tokenizer().all_special_tokens)


def model_of(raw: Tokenizer) -> Any:
    return new_model(SMALL, raw, tiny_tokenizer(), head_dim=16)


def test_the_vocabulary_has_all_bytes_the_targets_control_tokens_and_single_digits(raw: Tokenizer) -> None:
    assert raw.get_vocab_size() == 300
    assert raw.token_to_id("<|end|>") == 0
    assert raw.decode(raw.encode("🦊 Ω 2024\x00").ids) == "🦊 Ω 2024\x00"
    assert [raw.id_to_token(i) for i in raw.encode("2024").ids] == ["2", "0", "2", "4"]


def test_rows_become_text_without_half_a_character(rows: Rows) -> None:
    texts = texts_of(rows, "train", tiny_tokenizer())
    assert len(texts) == len(rows.part("train"))
    assert not any(text.endswith("\ufffd") for text in texts)
    cut = Rows(rows.tokens.copy(), rows.split, rows.prefix, "x")
    fox = tiny_tokenizer()("🐼")["input_ids"]
    cut.tokens[:, -1] = fox[0]
    assert not texts_of(cut, "test", tiny_tokenizer())[0].endswith("\ufffd")


def test_every_id_of_an_epoch_is_foretold_once_in_an_order_of_its_own() -> None:
    sequences = [np.arange(start, start + 13) for start in range(0, 800, 100)]
    blocks = epoch_blocks(sequences, 0, 0, BLOCK)
    joined = np.concatenate([blocks[0, :1], *(block[1:] for block in blocks)])
    assert (blocks[1:, 0] == blocks[:-1, -1]).all()
    assert len(set(joined.tolist())) == len(joined) == 6 * BLOCK + 1
    assert epoch_blocks(sequences, 0, 0, BLOCK).tolist() == blocks.tolist()
    assert epoch_blocks(sequences, 0, 1, BLOCK).tolist() != blocks.tolist()
    with pytest.raises(ModelError, match="more rows are needed"):
        epoch_blocks([np.arange(5)], 0, 0, BLOCK)


def test_joined_blocks_are_one_text() -> None:
    sequences = [np.arange(1000)]
    plan = replace(SMALL, packs=(4,))
    block = Batches(sequences, plan, BLOCK).of(0)
    assert block.shape == (1, 4 * BLOCK + 1)
    assert (np.diff(block[0]) == 1).all()


def test_bits_per_byte_do_not_depend_on_the_vocabulary(raw: Tokenizer, rows: Rows) -> None:
    """A model that knows nothing: log2(vocabulary) bits for each token but the first."""
    model = model_of(raw).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    texts = texts_of(rows, "validation", tiny_tokenizer())
    ids = encode(raw, texts)
    found = evaluate(model, ids, texts)
    tokens, size = sum(len(i) - 1 for i in ids), sum(len(t.encode()) for t in texts)
    assert found["bits_per_byte"] == pytest.approx(tokens * np.log2(300) / size, abs=1e-3)


def test_interrupted_training_ends_where_uninterrupted_does(raw: Tokenizer, rows: Rows, tmp_path: Path) -> None:
    unseen = texts_of(rows, "validation", tiny_tokenizer())
    validation = encode(raw, unseen), unseen
    batches = lambda: Batches(encode(raw, texts_of(rows, "train", tiny_tokenizer())), SMALL, BLOCK)  # noqa: E731
    whole, parts = model_of(raw), [model_of(raw), model_of(raw)]
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    options: dict[str, Any] = {"eval_every": 3, "say": lambda _: None}
    train(whole, batches(), validation, SMALL, tmp_path / "whole", **options)
    train(parts[0], batches(), validation, SMALL, tmp_path / "parts", stop_after=5, **options)
    train(parts[1], batches(), validation, SMALL, tmp_path / "parts", **options)
    for a, b in zip(whole.parameters(), parts[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    points = [json.loads(line) for line in (tmp_path / "whole" / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [3, 6, 9]
    assert points[-1]["bits_per_byte"] < points[0]["bits_per_byte"]


def test_the_exported_folder_is_a_draft_with_its_own_vocabulary(
    raw: Tokenizer, rows: Rows, rows_file: Path, tmp_path: Path
) -> None:
    run, target, out = tmp_path / "run", tmp_path / "target", tmp_path / "tiny-bpe"
    run.mkdir()
    tiny_tokenizer().save_pretrained(target)
    save_tokenizer(raw, tiny_tokenizer(), run)
    unseen = texts_of(rows, "validation", tiny_tokenizer())
    batches = Batches(encode(raw, texts_of(rows, "train", tiny_tokenizer())), SMALL, BLOCK)
    model = model_of(raw)
    model.config.save_pretrained(run)
    plan = {"steps": 9, "batch": 4, "layers": 1, "hidden": 32, "optimizer": "muon", "lr": 5e-3, "seed": 0}
    (run / "plan.json").write_text(json.dumps(plan | {"entries": 300, "steps_per_epoch": batches.per_epoch}))
    train(model, batches, (encode(raw, unseen), unseen), SMALL, run, eval_every=9, say=lambda _: None)
    export(run, rows_file, target, out, target_name="Tiny", prefix=PREFIX, note="never used")
    loaded = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert loaded.get_input_embeddings().weight.shape == (300, 32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    card = (out / "README.md").read_text()
    assert f"{len(shared(tiny_tokenizer(), tokenizer).target_ids):,} of its tokens" in card
    assert "never used" in card
    assert json.loads((out / "split.json").read_text())["validation"] == [0, 1, 2, 3]
    assert not list(out.glob("*.bin"))
