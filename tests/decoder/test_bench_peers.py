"""Peers are started, asked, counted and stopped; whatever is wrong with them is a sentence."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from decoder.bench.measure import Case, interleave
from decoder.bench.peers import LlamaCppVariant, PeerError, PeerVariant, VllmVariant, events, gguf_of
from decoder.bench.plan import BenchPlan
from decoder.errors import ModelError
from decoder.request import GenerationRequest
from tests.tiny import save_tiny

FAKE = Path(__file__).resolve().parents[1] / "fake_peer.py"


def program(folder: Path, *extra: str) -> str:
    script = folder / "server"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" {" ".join(extra)} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "Model.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    return path


def case(*ids: int) -> Case:
    return Case("chat", "a", GenerationRequest("x", max_new_tokens=8), ids or (5, 6))


def peer(kind: str, folder: Path, gguf: Path, tmp_path: Path, *extra: str) -> PeerVariant:
    if kind == "vllm":
        return VllmVariant(program(tmp_path, *extra), BenchPlan(target=str(folder), dtype="float32", device="cpu"))
    return LlamaCppVariant(program(tmp_path, *extra), BenchPlan(target=str(gguf)))


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_a_peer_is_timed_from_its_first_token_to_its_last(kind: str, folder: Path, gguf: Path, tmp_path: Path) -> None:
    variant = peer(kind, folder, gguf, tmp_path)
    samples, errors = interleave([variant], [case()], 2)
    assert errors == {}
    # Of six tokens the first event brought one.
    assert [s.tokens for s in samples] == [5, 5]
    assert all(s.decode_ms >= 0 and s.draft_ms is None for s in samples)
    assert samples[0].variant == f"{kind}/plain"
    if kind == "llamacpp":
        assert samples[0].path.startswith("Q4_1 weights")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", variant.server.port)) != 0


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_a_peer_that_dies_leaves_its_last_words(kind: str, folder: Path, gguf: Path, tmp_path: Path) -> None:
    _, errors = interleave([peer(kind, folder, gguf, tmp_path, "--dead")], [case()], 1)
    assert "ended while it started: ValueError: no such model" in errors[f"{kind}/plain"]


def test_a_peer_that_refuses_is_quoted(folder: Path, gguf: Path, tmp_path: Path) -> None:
    _, errors = interleave([peer("vllm", folder, gguf, tmp_path)], [case(0)], 1)
    assert errors["vllm/plain"] == "vLLM answered 400: no such prompt"


def test_a_program_that_cannot_run(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "not-executable"
    path.write_text("x")
    variant = VllmVariant(str(path), BenchPlan(target=str(folder), dtype="float32", device="cpu"))
    _, errors = interleave([variant], [case()], 1)
    assert "cannot be started" in errors["vllm/plain"]


def test_streams() -> None:
    assert list(events(iter(["", ": note", 'data: {"a": 1}', "data: [DONE]", 'data: {"b": 1}']))) == [{"a": 1}]
    with pytest.raises(PeerError, match="not JSON"):
        list(events(iter(["data: {"])))


def test_llama_cpp_needs_a_gguf(folder: Path, gguf: Path) -> None:
    assert gguf_of(str(gguf)) == gguf
    with pytest.raises(ModelError, match="is none"):
        gguf_of(str(folder))
