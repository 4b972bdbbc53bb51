"""Compiled steps: what they compute is what the eager path computes, all of them or none are used, and what cannot be
compiled says why. The runner's own tests run on this path too (``tests/tiny.PATHS``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder import assemble, builder, cache, compiled, loading, packages
from decoder.compiled import CompiledRunner, StepSet, model_steps
from decoder.engine import SpeculativeDecoder
from decoder.errors import ModelError
from decoder.request import GenerationRequest, SamplingParams
from decoder.steps import tapped
from tests.compiled_steps import (
    CACHE,
    CONTEXT,
    SHORT_LAYERS,
    WIDTHS,
    compiling,
    needs_compiler,
    tiny_folder,
    tiny_steps,
)
from tests.tiny import runner

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 384, (1, count), generator=torch.Generator().manual_seed(seed))


def both() -> tuple[CompiledRunner, Any]:
    fast = runner(path="compiled")
    assert isinstance(fast, CompiledRunner)
    return fast, runner(path="fused")


def count_steps(fast: CompiledRunner) -> list[int]:
    """The widths of the compiled passes from now on."""
    found: list[int] = []

    def watched(width: int, step: Any) -> Any:
        def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            found.append(width)
            return step(inputs)  # type: ignore[no-any-return]

        return call

    held = StepSet([], None)
    held.recipes = fast.steps.recipes
    held.steps = {width: watched(width, step) for width, step in fast.steps.steps.items()}
    fast.steps = held
    return found


@needs_compiler
def test_every_width_is_that_of_the_eager_path_and_runs_compiled() -> None:
    fast, slow = both()
    passes = count_steps(fast)
    for model in (fast, slow):
        model.reset(1)
        model.forward(ids(40, 1), last=True)
    for turn, width in enumerate((1, 5, 2, 1, 4, 3, 6)):
        new = ids(width, 10 + turn)
        assert torch.allclose(fast.forward(new), slow.forward(new), **CLOSE), width
        for model in (fast, slow):
            model.rollback([model.lengths[0] - width // 2])
    assert passes == [1, 5, 5, 1, 5, 5]  # six tokens are more than the widest step takes
    assert torch.allclose(fast.forward(ids(2, 3), last=True), slow.forward(ids(2, 3), last=True), **CLOSE)


@needs_compiler
def test_hidden_states_come_with_a_compiled_pass_where_it_returns_them() -> None:
    fast, slow = both()
    passes = count_steps(fast)
    assert tapped(3) == (0, 1, 2, 3)
    assert tapped(30) == (2, 15, 27, 30)
    for wanted in ((1, 3), (2, 0, 3), (3,), (2,)):
        for model in (fast, slow):
            model.capture = wanted
            model.reset(1)
            model.forward(ids(20, 1), last=True)
            model.forward(ids(3, 2))
        assert fast.captured is not None
        assert fast.captured.shape == (1, 3, 64 * len(wanted))
        assert torch.allclose(fast.captured, slow.captured, **CLOSE)
    fast.taps = (3,)  # a state that the steps do not return: the pass is eager, and delivers it
    fast.forward(ids(1, 4))
    slow.forward(ids(1, 4))
    assert torch.allclose(fast.captured, slow.captured, **CLOSE)
    assert passes == [5] * 4


@needs_compiler
def test_a_tree_runs_compiled() -> None:
    fast, slow = both()
    passes = count_steps(fast)
    for model in (fast, slow):
        model.reset(1)
        model.forward(ids(9, 1))
    fast_tree, slow_tree = (model.forward(ids(5, 2), parents=[None, None, 0, 1]) for model in (fast, slow))
    assert torch.allclose(fast_tree, slow_tree, **CLOSE)
    for model in (fast, slow):
        model.keep_path(0, 10, [1, 3])
        assert model.lengths == [12]
    # What a narrower tree leaves behind it in the cache must not reach the next pass.
    fast.forward(ids(3, 3), parents=[None, None])
    slow.forward(ids(3, 3), parents=[None, None])
    for model in (fast, slow):
        model.keep_path(0, 13, [])
    assert torch.allclose(fast.forward(ids(1, 4)), slow.forward(ids(1, 4)), **CLOSE)
    assert passes == [5, 5, 1]


@needs_compiler
def test_texts_that_outgrow_a_step_go_on_eagerly() -> None:
    longer = runner(path="compiled", context=2 * CONTEXT)
    assert isinstance(longer, CompiledRunner)
    assert longer.reach == CONTEXT  # what its steps know, however long the text may be
    fast, slow = both()
    fast.reach = 1024
    passes = count_steps(fast)
    for model in (fast, slow):
        model.reset(1)
        model.forward(ids(1021, 1), last=True)
    for turn in range(8):
        assert torch.allclose(fast.forward(ids(1, turn)), slow.forward(ids(1, turn)), **CLOSE)
    assert passes == [1, 1, 1]
    fast.reset(2)  # several rows: eager as well, also when one of them is left
    fast.forward(torch.cat([ids(3, 1), ids(3, 2)]))
    fast.select([1])
    fast.forward(ids(1, 1))
    assert passes == [1, 1, 1]
    fast.reset(1)
    fast.forward(ids(3, 1))
    passes.pop()
    fast.forward(ids(1, 1))
    assert passes == [1, 1, 1, 1]


@needs_compiler
def test_a_cache_that_grows_stays_compiled() -> None:
    fast, slow = both()
    passes, sizes = count_steps(fast), set()
    for model in (fast, slow):
        model.reset(1)
        model.forward(ids(250, 1), last=True)
    for turn in range(60):
        wide = ids(5, turn)
        assert torch.allclose(fast.forward(wide), slow.forward(wide), **CLOSE), turn
        assert fast.buffers.keys is not None
        sizes.add(fast.buffers.keys.shape[3])
    assert passes == [5] * 60
    assert len(sizes) > 1


@pytest.fixture
def steps_on(monkeypatch: pytest.MonkeyPatch) -> str:
    """The session's steps are found by whoever loads the tiny model by name."""
    tiny_steps()
    tiny_steps(SHORT_LAYERS)
    monkeypatch.setattr(assemble, "TARGET_WIDTHS", WIDTHS)
    monkeypatch.setattr(assemble, "DRAFT_WIDTHS", WIDTHS)
    monkeypatch.setattr(assemble, "_runners", {})
    monkeypatch.setenv("REDLINE_CACHE", str(CACHE))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setenv("REDLINE_KERNEL", "0")
    return str(tiny_folder())


def request(target: str, proposer: str = "none", **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        "The quick brown fox " * 3, chat=False, target=target, proposer=proposer, k=4, max_new_tokens=40,
        ignore_eos=True, dtype="float32", device="cpu", exit_layer=SHORT_LAYERS, **changes,
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("proposer", ["none", "ngram", "early-exit", "draft-model"])
def test_results_do_not_depend_on_the_path(steps_on: str, proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled, and a long text."""
    outputs: list[Any] = []
    draft = steps_on if proposer == "draft-model" else None
    for on in ("1", "0"):
        monkeypatch.setenv("REDLINE_COMPILE", on)
        monkeypatch.setattr(assemble, "_runners", {})
        for temperature, times in ((0.0, 3), (0.8, 3), (0.0, 245)):
            wanted = request(steps_on, proposer, draft=draft, sampling=SamplingParams(temperature=temperature, seed=5))
            run = SpeculativeDecoder.load(wanted).run(wanted.replace(prompt="The quick brown fox " * times))
            assert run.versions["target_path"] == ("compiled" if on == "1" else "eager, fused")
            if draft or proposer == "early-exit":
                assert run.versions["draft_path"] == run.versions["target_path"]
            outputs.append(run.output_ids)
    assert outputs[:3] == outputs[3:]
    assert [len(output) for output in outputs[:3]] == [40] * 3


@needs_compiler
def test_a_run_records_its_path_and_how_far_it_reaches(steps_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = SpeculativeDecoder.load(request(steps_on)).run(request(steps_on)).versions
    assert versions["target_path"] == "compiled"
    assert (versions["target_compiled_width"], versions["target_compiled_context"]) == ("5", str(CONTEXT))
    assert "target_path_note" not in versions
    monkeypatch.setenv("REDLINE_COMPILE", "0")
    monkeypatch.setattr(assemble, "_runners", {})
    versions = SpeculativeDecoder.load(request(steps_on)).run(request(steps_on)).versions
    assert versions["target_path_note"] == "compiling is switched off (REDLINE_COMPILE=0)"


@needs_compiler
def test_all_steps_are_used_or_none_and_only_from_the_next_run_on(
    steps_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that mixed compiled and eager widths would favour the baseline."""
    built = tiny_steps()
    monkeypatch.setattr(compiled, "_sets", weakref.WeakSet())
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    held = model_steps(loading.load(steps_on, "float32", "cpu"), WIDTHS)
    assert held.blocked is None
    narrow, wide = held.missing()
    typed = f"python -m decoder models --compile {steps_on}"
    assert held.note().startswith(f"its steps are not compiled: {typed}")
    assert f"{typed} --layers 2" in model_steps(loading.load(steps_on, "float32", "cpu"), (1, 2), 2).note()
    assert f"{typed} --role draft" in model_steps(loading.load(steps_on, "float32", "cpu"), (2, 1)).note()
    monkeypatch.setattr(compiled, "_sets", weakref.WeakSet([held]))
    with compiling():
        sources = {width: recipe.path for width, recipe in built.recipes.items()}
    narrow.path.parent.mkdir(parents=True)
    shutil.copy(sources[1], narrow.path)
    assert not compiled.take_up() or not held.steps
    assert held.missing() == [wide]
    monkeypatch.setattr(builder, "active", lambda: True)
    assert "1 of 2 steps ready" in held.note()
    shutil.copy(sources[5], wide.path)
    assert not held.steps
    assert held.take_up()
    assert (held.note(), held.missing()) == ("", [])


@needs_compiler
def test_a_broken_library_is_thrown_away_and_decoding_is_eager(
    steps_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    loaded = loading.load(steps_on, "float32", "cpu")
    path = model_steps(loaded, (1,)).recipes[1].path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing")
    held = model_steps(loaded, (1,))
    assert held.steps == {}
    assert not path.exists()
    assert [recipe.width for recipe in held.missing()] == [1]


@needs_compiler
def test_a_step_is_another_one_for_other_weights_options_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loading.load(str(tiny_folder()), "float32", "cpu")
    recipe = model_steps(loaded, (1,)).recipes[1]
    changed = [{"fingerprint": "x"}, {"dtype": "bfloat16"}, {"options": {"layers": 1}}, {"width": 2}, {"threads": 7}]
    paths = {recipe.path, *(packages.Recipe(**{**recipe.__dict__, **one}).path for one in changed)}
    monkeypatch.setattr(torch, "__version__", "9.9")
    packages._surroundings.cache_clear()
    paths.add(recipe.path)
    monkeypatch.undo()
    packages._surroundings.cache_clear()
    assert len(paths) == 7


def test_what_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loading.load(str(tiny_folder()), "float32", "cpu")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    assert model_steps(loaded, (1,)).note() == "compiling is switched off (REDLINE_COMPILE=0)"
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setattr(packages, "compiler", lambda: None)
    held = model_steps(loaded, (1,))
    assert "C++ compiler" in held.note()
    assert held.missing() == []
    monkeypatch.setattr(packages, "compiler", lambda: "g++")
    monkeypatch.setattr(packages.os, "sysconf", lambda name: 1000)
    assert "for each of 2 widths would take" in model_steps(loaded, (1, 5)).note()
    assert "beside 5.0 GB" in (packages.why_no_build(10**9, 1, loaded=5 * 10**9) or "")
    monkeypatch.undo()
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(packages, "compiler", lambda: "g++")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    assert "of disk" in model_steps(loaded, (1,)).note()


def test_a_failed_build_is_told_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(packages, "compiler", lambda: "g++")
    loaded = loading.load(str(tiny_folder()), "float32", "cpu")
    held = model_steps(loaded, (1, 5))
    compiled.failed(held.missing()[0], -9, "")
    assert held.missing() == []
    assert held.note() == "compiling failed: the compiler was stopped (signal 9)"
    assert packages.failure(1, "OSError: [Errno 28] No space left on device\nmore") == "the disk is full"
    assert packages.failure(1, "chatter\nRuntimeError: no") == "RuntimeError: no"


def test_a_builder_of_another_version_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was changed while it ran must not put new code under the old one's name."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    loaded = loading.load(str(tiny_folder()), "float32", "cpu")
    recipe = model_steps(loaded, (1,)).recipes[1]
    command = recipe.command()
    command[-1] += ".other"
    done = subprocess.run(command, cwd=packages.HOME, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "changed" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []


def test_a_build_that_fails_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    recipe = packages.Recipe("decoder.steps:target_step", str(tmp_path / "gone"), "float32", 1, "none", name="gone")
    with pytest.raises(ModelError, match="gone could not be compiled for 1 tokens per pass"):
        packages.build_apart(recipe)
    assert not list(tmp_path.rglob("*.work"))


def test_the_second_builder_of_a_step_waits_and_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    recipe = packages.Recipe("decoder.steps:target_step", "nowhere", "float32", 1, "none", name="twice")
    recipe.path.parent.mkdir(parents=True)
    with recipe.path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(recipe.command(), cwd=packages.HOME, stderr=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=6)
        recipe.path.write_bytes(b"built by the first")
    assert second.wait(timeout=60) == 0
    assert recipe.path.read_bytes() == b"built by the first"


def test_the_cache_can_be_measured_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    assert cache.clear_compiled() == 0
    library = tmp_path / "compiled" / "llama-x" / "w1.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"12345")
    (tmp_path / "models").mkdir()
    assert cache.compiled_size() == 5
    assert cache.clear_compiled() == 5
    assert not library.exists()
    assert (tmp_path / "models").is_dir()


def test_libraries_that_nobody_uses_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    for name, age in (("old", 100), ("new", 1)):
        folder = tmp_path / "compiled" / name
        folder.mkdir(parents=True)
        stamp = folder.stat().st_mtime - age * 24 * 3600
        os.utime(folder, (stamp, stamp))
    # A builder that is at work keeps its files; what one that was killed left goes.
    for name in ("w1", "w5"):
        (tmp_path / "compiled" / "new" / f"{name}.work").mkdir()
    os.utime(tmp_path / "compiled" / "new")
    with packages._locked(tmp_path / "compiled" / "new" / "w5.lock"):
        packages._forget_old()
    assert [path.name for path in (tmp_path / "compiled").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.rglob("*.work")] == ["w5.work"]


def test_a_recipe_survives_the_way_to_its_builder() -> None:
    recipe = packages.Recipe("a:b", "/x", "float32", 3, "f", name="owner/name", size=5, options={"layers": 2})
    again = packages.Recipe(**json.loads(recipe.command()[3]))
    assert again == recipe
    assert "/" not in str(recipe.path.relative_to(cache.compiled_dir())).split("/w3.so")[0]
