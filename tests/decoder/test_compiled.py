"""Compiled steps: what they compute is what the eager path computes, and what cannot be compiled says why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from decoder import assemble, compiled, loading
from decoder.engine import SpeculativeDecoder
from decoder.request import GenerationRequest, SamplingParams
from tests.tiny import save_tiny

needs_compiler = pytest.mark.skipif(compiled.compiler() is None, reason="there is no C++ compiler here")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def packaged(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> loading.LoadedModel:
    """The tiny model with packages for widths 1 and 3 in a cache folder of its own."""
    monkeypatch.setenv("REDLINE_CACHE", str(cache))
    loaded = loading.load(str(folder), "float32", "cpu")
    for width in (1, 3):
        if not compiled.package_path(loaded, width).is_file():
            compiled.build_apart(loaded, width)
    return loaded


@needs_compiler
def test_compiled_steps_equal_the_eager_path(packaged: loading.LoadedModel) -> None:
    fast = assemble.new_runner(packaged)
    assert fast.path == "compiled"
    assert sorted(fast.steps) == [1, 3]
    slow = assemble.FusedRunner(fast.weights, context=packaged.context, device="cpu")
    text = torch.randint(1, 384, (1, 40), generator=torch.Generator().manual_seed(1))
    for runner in (fast, slow):
        runner.reset(1)
        runner.forward(text, last=True)
    generator = torch.Generator().manual_seed(2)
    for width in (1, 3, 2, 1, 4, 3):
        new = torch.randint(1, 384, (1, width), generator=generator)
        assert torch.allclose(fast.forward(new), slow.forward(new), atol=2e-4), width
        for runner in (fast, slow):
            runner.rollback([runner.lengths[0] - width // 2])
    assert torch.allclose(fast.forward(text[:, :2], last=True), slow.forward(text[:, :2], last=True), atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("proposer", ["none", "ngram", "early-exit"])
def test_results_do_not_depend_on_the_path(
    packaged: loading.LoadedModel, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with a text that outgrows the compiled capacity on the way."""
    prompt = "The quick brown fox " * 230
    outputs = []
    for compiling in ("1", "0"):
        monkeypatch.setenv("REDLINE_COMPILE", compiling)
        monkeypatch.setattr(assemble, "_runners", {})
        for temperature, text in ((0.0, prompt[:300]), (0.8, prompt[:300]), (0.0, prompt)):
            request = GenerationRequest(
                text, chat=False, target=packaged.name, proposer=proposer, k=2, max_new_tokens=60, ignore_eos=True,
                dtype="float32", device="cpu", sampling=SamplingParams(temperature=temperature, seed=5),
            )  # fmt: skip
            run = SpeculativeDecoder.load(request).run(request)
            assert run.versions["target_path"] == ("compiled" if compiling == "1" else "eager, fused")
            outputs.append(run.output_ids)
    assert outputs[:3] == outputs[3:]
    assert len(outputs[2]) == 60


@needs_compiler
def test_a_broken_package_is_thrown_away_and_decoding_is_eager(packaged: loading.LoadedModel) -> None:
    path = compiled.package_path(packaged, 7)
    path.write_bytes(b"nothing")
    assert compiled.load_step(path) is None
    assert not path.exists()


def test_what_cannot_be_compiled_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loading.load(str(folder), "float32", "cpu")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C++ compiler" in (compiled.why_not(loaded, (1,)) or "")
    monkeypatch.undo()
    monkeypatch.setattr(compiled.os, "sysconf", lambda name: 1000)
    assert "would take" in (compiled.why_not(loaded, (1, 5)) or "")


def test_the_cache_can_be_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    assert compiled.clear_cache() == 0
    package = tmp_path / "compiled" / "llama-x" / "w1.pt2"
    package.parent.mkdir(parents=True)
    package.write_bytes(b"12345")
    assert compiled.cache_size() == 5
    assert compiled.clear_cache() == 5
    assert not package.exists()
