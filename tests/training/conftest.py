"""A toy target of 96 tokens and rows that it wrote greedily: small enough that training takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.training.labels import LabelCache, make_labels
from decoder.training.rows import Rows, load_rows

VOCAB, LENGTH, PREFIX = 96, 64, 4


@pytest.fixture(scope="session")
def target() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def rows_file(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (24, PREFIX + 8), generator=generator)
    tokens[:, :PREFIX] = torch.arange(3, 3 + PREFIX)
    with torch.inference_mode():
        while tokens.shape[1] < LENGTH:
            tokens = torch.cat([tokens, target(tokens).logits[:, -1:].argmax(-1)], 1)
    split = np.zeros(24, np.uint8)
    split[:4], split[4:8] = 1, 2
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    np.savez(path, rows=tokens.numpy().astype(np.uint16), split=split)
    return path


@pytest.fixture
def rows(rows_file: Path) -> Rows:
    return load_rows(rows_file, PREFIX)


@pytest.fixture
def labels(rows: Rows, target: Any, tmp_path: Path) -> LabelCache:
    cache = LabelCache.open(tmp_path / "labels", rows, target="toy", vocab_size=VOCAB, k=16)
    make_labels(rows, range(len(rows.tokens)), target, cache)
    return cache
