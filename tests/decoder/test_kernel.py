"""The kernel: it computes what transformers computes, a token's logits do not depend on its neighbours, on no bit, and
where it cannot be had everything goes on without it. The runner's own tests run on it too (``tests/tiny.PATHS``)."""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder import assemble, kernel, loading
from decoder.engine import SpeculativeDecoder
from decoder.fused import FusedRunner, Weights
from decoder.heads.layer import HeadLayer, Output
from decoder.kernel import WIDEST, Kernel, Library
from decoder.kernel_runner import KernelRunner, KernelSet, PartSet, give_layers
from decoder.request import GenerationRequest, SamplingParams
from tests.compiled_steps import CACHE, built_kernel, compiling, tiny_folder
from tests.decoder.test_families import FAMILIES, build, ids
from tests.tiny import runner

pytestmark = pytest.mark.skipif(kernel.compiler() is None, reason="there is no GNU C++ compiler here")

CONTEXT = 512
DTYPES = (torch.float32, torch.bfloat16)
ODD = {"hidden_size": 44, "intermediate_size": 83, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22}
"""Sizes that are no multiple of any register."""


@lru_cache
def weights_of(name: str, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(build(name, dtype))


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    config, model, changes = FAMILIES["qwen2"]
    FAMILIES["odd"] = (config, model, {**changes, **ODD})
    yield "odd"
    del FAMILIES["odd"]


def on_kernel(weights: Weights) -> KernelRunner:
    held = built_kernel(weights)
    return KernelRunner(weights, held, lambda layers: held, context=CONTEXT, device="cpu")


def passes(model: FusedRunner, text: torch.Tensor, cuts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and captured states of ``text`` [1, T], fed in parts that end at ``cuts``."""
    model.reset(1)
    logits, states = [], []
    for start, end in zip((0, *cuts), cuts, strict=False):
        logits.append(model.forward(text[:, start:end]))
        assert model.captured is not None
        states.append(model.captured)
    return torch.cat(logits, 1), torch.cat(states, 1)


@pytest.mark.parametrize("name", [*FAMILIES, "odd"])
def test_the_kernel_is_transformers(name: str, odd: str) -> None:
    text = ids(90)
    with torch.inference_mode():
        output = build(name)(input_ids=text, output_hidden_states=True)
    model = on_kernel(weights_of(name))
    model.capture = (0, 2, 3)
    logits, states = passes(model, text, (40, 41, 46, 90))
    assert torch.allclose(logits, output.logits, atol=3e-4, rtol=1e-4)
    expected = torch.cat([output.hidden_states[i] for i in (0, 2, 3)], -1)
    assert torch.allclose(states, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, "odd"])
def test_in_bfloat16_it_is_as_close_to_the_truth_as_the_eager_pass(name: str, odd: str) -> None:
    text = ids(60)
    with torch.inference_mode():
        truth = build(name, torch.bfloat16).float()(input_ids=text).logits
    weights = weights_of(name, torch.bfloat16)
    fast, slow = on_kernel(weights), FusedRunner(weights, context=CONTEXT, device="cpu")
    errors = []
    for model in (fast, slow):
        model.capture = (3,)
        logits, _ = passes(model, text, (20, 21, 60))
        errors.append((logits.float() - truth).pow(2).mean().sqrt().item())
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "odd"])
def test_a_tokens_logits_are_the_same_bits_in_any_pass(name: str, dtype: torch.dtype, odd: str) -> None:
    """One by one, by any number, by more than share a register, and by other numbers of threads."""
    text, model = ids(200), on_kernel(weights_of(name, dtype))
    model.capture = (1, 3)
    alone = passes(model, text, tuple(range(1, 201)))
    threads = torch.get_num_threads()
    try:
        for number, size in [
            *((1, size) for size in (2, 3, 4, 5, 6, 7, 9, 17, WIDEST)),
            (2, 1),
            (2, 5),
            (3, 4),
            (5, 66),
        ]:
            torch.set_num_threads(number)
            cuts = (*range(size, 200, size), 200)
            for one, other in zip(alone, passes(model, text, cuts), strict=True):
                assert torch.equal(one, other), (number, size)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_logits_are_the_same_bits_beside_others(dtype: torch.dtype) -> None:
    """Rows of different lengths, each with its own cache; one of them sees nothing of what is in the others'."""
    model = on_kernel(weights_of("llama", dtype))
    model.capture = (1, 3)
    texts = [ids(90, seed)[0] for seed in range(4)]
    lengths = (1, 64, 17, 40)
    expected = [passes(model, text[None], (length, length + 15)) for text, length in zip(texts, lengths, strict=True)]
    model.reset(4)
    rows = torch.zeros(4, 64, dtype=torch.long)
    for b, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        rows[b, :length] = text[:length]
    model.forward(rows[:, :16], [min(n, 16) for n in lengths])
    for start in range(16, 64, 16):
        model.forward(rows[:, start : start + 16], [max(0, min(n - start, 16)) for n in lengths])
    assert model.lengths == list(lengths)
    logits = model.forward(torch.stack([text[n : n + 15] for text, n in zip(texts, lengths, strict=True)]))
    for b, length in enumerate(lengths):
        assert torch.equal(logits[b], expected[b][0][0, length : length + 15]), b
        assert model.captured is not None
        assert torch.equal(model.captured[b], expected[b][1][0, length : length + 15]), b


def test_more_rows_than_fit_into_a_pass_go_in_parts() -> None:
    model = on_kernel(weights_of("qwen3", torch.bfloat16))
    model.capture = (1, 3)
    texts = torch.cat([ids(25, seed) for seed in range(30)])
    expected = [passes(model, text[None], (20, 25)) for text in texts]
    model.reset(30)
    model.forward(texts[:, :2])
    for start in range(2, 20, 2):
        model.forward(texts[:, start : start + 2])
    logits = model.forward(texts[:, 20:])
    assert model.captured is not None
    for b, (alone, states) in enumerate(expected):
        assert torch.equal(logits[b], alone[0, 20:]), b
        assert torch.equal(model.captured[b], states[0, 20:]), b
    model.rollback([20] * 30)
    last = model.forward(texts[:, 20:], [5, 3] * 15, last=True)
    assert torch.equal(last[7, 0], expected[7][0][0, 22])


def test_a_tree_is_what_its_paths_are() -> None:
    model, text = on_kernel(weights_of("qwen2")), ids(40)
    model.reset(1)
    model.forward(text[:, :30])
    nodes = [7, 9, 11, 13]
    logits = model.forward(torch.tensor([[5, *nodes]]), parents=[None, 0, None, 2])
    for path in ((5, 7, 9), (5, 11, 13)):
        model.rollback([30])
        alone = model.forward(torch.tensor([path]))
        places = [0, *(1 + nodes.index(token) for token in path[1:])]
        assert torch.allclose(logits[0, places], alone[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("flags", ["-march=x86-64", "-march=x86-64-v3", "-march=x86-64-v4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_processors_that_can_do_less(dtype: torch.dtype, flags: str, tmp_path: Path) -> None:
    """The same source without the instructions of the processor at hand."""
    level = {"-march=x86-64-v3": "avx2", "-march=x86-64-v4": "avx512bw"}.get(flags, "")
    if os.uname().machine != "x86_64" or level not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"{flags} is for another processor")
    library = tmp_path / "kernel.so"
    common = [flag for flag in kernel._FLAGS if not flag.startswith("-march")]
    defined = f"-DWEIGHT_BF16={int(dtype == torch.bfloat16)}"
    program = kernel.compiler()
    assert program
    subprocess.run([program, *common, flags, defined, str(kernel.SOURCE), "-o", str(library)], check=True)
    weights = weights_of("qwen3", dtype)
    held = KernelSet.__new__(KernelSet)
    held.steps, held.reach = {WIDEST: Kernel(library, weights, CONTEXT)}, CONTEXT
    other = KernelRunner(weights, held, lambda layers: held, context=CONTEXT, device="cpu")
    model = on_kernel(weights)
    for one in (other, model):
        one.capture = (3,)
    text = ids(90)
    alone, _ = passes(other, text, tuple(range(1, 91)))
    assert torch.equal(alone, passes(other, text, (5, 37, 90))[0])
    expected, _ = passes(model, text, (90 - WIDEST, 90))
    assert torch.allclose(
        alone, expected, **({"atol": 3e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.4})
    )


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel_on(monkeypatch: pytest.MonkeyPatch) -> str:
    """Whoever loads the tiny model by name finds the session's library."""
    for name in ("float32", "bfloat16"):
        built_kernel(weights_of("llama", getattr(torch, name)))
    monkeypatch.setattr(assemble, "_runners", {})
    monkeypatch.setenv("REDLINE_CACHE", str(CACHE))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.delenv("REDLINE_KERNEL", raising=False)
    return str(tiny_folder())


def request(target: str, proposer: str, **changes: Any) -> GenerationRequest:
    common: dict[str, Any] = {"chat": False, "max_new_tokens": 60, "ignore_eos": True, "device": "cpu", "exit_layer": 2}
    draft = target if proposer == "draft-model" else None
    return GenerationRequest(
        "The quick brown fox " * 3, target=target, proposer=proposer, draft=draft, **(common | changes)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("proposer", ["ngram", "early-exit", "draft-model", "suffix"])
def test_greedy_text_is_that_of_plain_decoding_in_any_dtype(kernel_on: str, proposer: str, dtype: str) -> None:
    plain = request(kernel_on, "none", dtype=dtype)
    expected = SpeculativeDecoder.load(plain).run(plain)
    assert expected.versions["target_path"] == "compiled kernel"
    assert expected.versions["target_compiled_width"] == str(WIDEST)
    for k in (1, 4, 8, 32):
        wanted = request(kernel_on, proposer, dtype=dtype, k=k)
        run = SpeculativeDecoder.load(wanted).run(wanted)
        assert run.output_ids == expected.output_ids, k
        assert run.versions["target_path"] == "compiled kernel"
        if proposer in ("early-exit", "draft-model"):
            assert run.versions["draft_path"] == "compiled kernel"


def test_results_do_not_depend_on_the_path(kernel_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[Any] = []
    for on in ("1", "0"):
        monkeypatch.setenv("REDLINE_COMPILE", on)
        monkeypatch.setattr(assemble, "_runners", {})
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature, seed=5)
            wanted = request(kernel_on, "draft-model", dtype="float32", k=4, sampling=sampling)
            outputs.append(SpeculativeDecoder.load(wanted).run(wanted).output_ids)
    assert outputs[:2] == outputs[2:]


@pytest.mark.real_model
def test_smollm2_in_bfloat16_writes_the_same_whoever_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.delenv("REDLINE_KERNEL", raising=False)
    monkeypatch.setattr(assemble, "_runners", {})
    for role in ("target", "draft"):
        assemble.runner_of(loading.load("smollm2-135m", "bfloat16", "cpu"), role).settle()  # type: ignore[attr-defined]
    outputs = {}
    for proposer in ("none", "draft-model", "ngram", "suffix", "early-exit", "eagle3", "mtp"):
        for k in (4,) if proposer == "none" else (3, 8):
            wanted = GenerationRequest(
                "Write a Python function that merges two sorted lists, with a docstring and an example.",
                proposer=proposer, k=k, max_new_tokens=100, ignore_eos=True, exit_layer=8,
            )  # fmt: skip
            run = SpeculativeDecoder.load(wanted).run(wanted)
            assert run.versions["target_path"] == "compiled kernel"
            outputs[proposer, k] = run.output_ids
    assert [key for key, ids_ in outputs.items() if ids_ != outputs["none", 4]] == []


# --- having it --------------------------------------------------------------------------------------------------------


def test_the_first_run_is_eager_and_the_next_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    held = KernelSet(weights_of("llama"), "float32", CONTEXT, "tiny")
    model = KernelRunner(weights_of("llama"), held, lambda layers: held, context=CONTEXT, device="cpu")
    assert (model.path, [job.name for job in held.missing()]) == ("eager, fused", ["the kernel"])
    assert model.path_note().startswith("its steps are not compiled: python -m decoder models --compile tiny")
    model.reset(1)
    before = model.forward(ids(20))
    model.settle()
    assert (model.path, model.path_note(), held.missing()) == ("compiled kernel", "", [])
    assert model.short(2).path == "compiled kernel"
    model.reset(1)
    assert torch.allclose(model.forward(ids(20)), before, atol=2e-4, rtol=1e-4)
    assert Library("float32").path != Library("bfloat16").path
    monkeypatch.setattr(kernel, "_FLAGS", ("-O1", *kernel._FLAGS))
    assert not Library("float32").built


def test_a_source_that_does_not_compile_says_so_and_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "g++"
    script.write_text('#!/bin/sh\necho "kernel.cpp:1:1: error: no such luck" >&2; exit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    held = KernelSet(weights_of("llama"), "float32", CONTEXT)
    held.settle()
    assert "no such luck" in held.note()
    assert held.missing() == []
    assert not any(tmp_path.rglob("*.work"))


def test_a_broken_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    path = Library("float32").path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    held = KernelSet(weights_of("llama"), "float32", CONTEXT)
    assert not held.steps
    assert len(held.missing()) == 1
    held.settle()
    assert held.steps


def test_a_library_that_cannot_be_loaded_is_not_built_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk whose files must not be executed."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setattr(kernel.ctypes, "CDLL", lambda path: (_ for _ in ()).throw(OSError("operation not permitted")))
    held = KernelSet(weights_of("llama"), "float32", CONTEXT)
    for _ in range(3):
        held.settle()
    assert held.missing() == []
    assert "operation not permitted" in held.note()


def test_a_library_in_use_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both dtypes share a folder: using or building one keeps the other."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    KernelSet(weights_of("llama"), "float32", CONTEXT).settle()
    folder = Library("float32").path.parent
    os.utime(folder, (1, 1))
    KernelSet(weights_of("llama", torch.bfloat16), "bfloat16", CONTEXT).settle()
    assert Library("float32").built
    assert Library("bfloat16").built
    os.utime(folder, (1, 1))
    assert KernelSet(weights_of("llama"), "float32", CONTEXT).steps
    assert folder.stat().st_mtime > 1


def test_an_id_that_the_model_does_not_have_is_an_error_as_elsewhere() -> None:
    model = on_kernel(weights_of("llama"))
    for wrong in (160, -1, 2**40):
        model.reset(1)
        with pytest.raises(IndexError):
            model.forward(torch.tensor([[5, wrong, 7]]))
    model.reset(1)
    assert torch.isfinite(model.forward(torch.tensor([[5, 6, 7]]))).all()


@pytest.mark.parametrize(("named", "taken"), [("clang++", False), ("g++-12", True), ("x86_64-linux-gnu-g++", True)])
def test_only_the_gnu_compiler_is_taken(
    named: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / named
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert (kernel.compiler() == str(program)) is taken


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "biased"), [(160, 64, False), (147, 83, True), (5, 33, True)])
def test_a_matrix_alone(dtype: torch.dtype, rows: int, size: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, size, generator=generator).to(dtype)
    output = Output(weight, torch.randn(rows, generator=generator).to(dtype) if biased else None)
    x = torch.randn(3, 22, size, generator=generator).to(dtype)
    expected = output(x)
    with compiling(kernel=True):
        give_layers(torch.nn.ModuleList([output]), str(dtype).removeprefix("torch."))
        assert isinstance(output.held, PartSet)
        output.held.settle()
    calls: list[int] = []
    fast = output.held.steps[WIDEST]
    output.held.steps[WIDEST] = lambda x: calls.append(x.numel() // size) or fast(x)
    made = output(x)
    assert made.dtype == torch.float32
    assert torch.allclose(made, expected.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    for count in (1, 2, 3, 5, 6, 7, 13):
        assert torch.equal(output(x[1, :count]), made[1, :count]), "a token's scores depend on its neighbours"
    assert output(torch.cat([x, x])).dtype == dtype, "more tokens than the kernel takes"
    assert max(calls) == WIDEST


def test_a_head_that_is_let_go_frees_its_layers() -> None:
    layer = HeadLayer.__new__(HeadLayer)
    torch.nn.Module.__init__(layer)
    layer.down = torch.nn.Linear(4, 4)
    give_layers(layer, "float32")
    assert layer.held is not None
    gone = weakref.ref(layer)
    del layer
    assert gone() is None


def test_where_there_can_be_none_compiled_steps_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of("llama")
    assert kernel.why_not(weights) is None
    monkeypatch.setenv("REDLINE_KERNEL", "0")
    assert "REDLINE_KERNEL=0" in (kernel.why_not(weights) or "")
    loaded = loading.load(str(tiny_folder()), "float32", "cpu")
    assert not isinstance(assemble.new_runner(loaded), KernelRunner)
    monkeypatch.delenv("REDLINE_KERNEL")
    assert isinstance(assemble.new_runner(loaded), KernelRunner)
    assert "bfloat16 and float32 only" in (kernel.why_not(weights_of("llama", torch.float16)) or "")
    monkeypatch.setattr(kernel, "compiler", lambda: None)
    kernel._no_library.cache_clear()
    assert "no GNU C++ compiler" in (kernel.why_not(weights) or "")
    kernel._no_library.cache_clear()


def test_beyond_its_width_and_its_reach_passes_are_eager() -> None:
    model = runner(path="kernel")
    calls: list[int] = []
    whole = model.steps.steps[WIDEST]  # type: ignore[attr-defined]
    held = KernelSet.__new__(KernelSet)
    held.steps, held.reach = {WIDEST: lambda *a, **k: calls.append(a[0].shape[1]) or whole(*a, **k)}, 100
    model = KernelRunner(whole.weights, held, lambda layers: held, context=CONTEXT, device="cpu")
    model.reset(1)
    text = torch.randint(1, 160, (1, 120), generator=torch.Generator().manual_seed(1))
    for start, end in ((0, 70), (70, 95), (95, 99), (99, 103), (103, 104)):
        model.forward(text[:, start:end])
    assert calls == [25, 4]
