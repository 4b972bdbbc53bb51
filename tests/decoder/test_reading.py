"""The floor of a run: bytes that one token must read, and how fast this machine reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoder import reading
from decoder.engine import SpeculativeDecoder
from decoder.loading import load
from decoder.metrics import floor_ms
from decoder.request import GenerationRequest
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often the bandwidth was measured; it is 1 GB/s here."""
    asked: list[str] = []

    def measure(device: str, size: int, passes: int) -> tuple[float, str, int]:
        asked.append(device)
        return 1e9, "sum", size

    monkeypatch.setattr(reading, "read_bandwidth", measure)
    reading.bandwidth.cache_clear()
    monkeypatch.setattr(reading, "PASSES", 1)
    return asked


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    reading.bandwidth.cache_clear()


def test_every_run_records_it_and_it_is_measured_once(folder: Path, measured: list[str]) -> None:
    request = GenerationRequest("fox", chat=False, target=str(folder), max_new_tokens=3, dtype="float32", device="cpu")
    runs = [SpeculativeDecoder.load(request).run(request) for _ in range(2)]
    assert measured == ["cpu"]
    model = load(str(folder), "float32", "cpu").model
    # Of the embeddings, which are not tied here, a token reads one row only.
    read = sum(p.numel() * 4 for name, p in model.named_parameters() if "embed_tokens" not in name)
    assert runs[0].versions["target_bytes_per_token"] == str(read)
    assert floor_ms(runs[1]) == pytest.approx(1000 * read / 1e9)


def test_a_machine_that_cannot_be_measured_leaves_it_out(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reading, "read_bandwidth", fail)
    assert reading.reading(load(str(folder), "float32", "cpu")) == {}


def test_of_experts_only_some_are_read(folder: Path, measured: list[str]) -> None:
    loaded = load(str(folder), "float32", "cpu")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_local_experts=8))
    assert reading.reading(replace(loaded, model=SimpleNamespace(config=config))) == {}
