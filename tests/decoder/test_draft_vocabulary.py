"""A draft that scores the frequent tokens only: it drafts no other, and the text is the target's all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoder import assemble, kernel, loading
from decoder.draft_vocabulary import FILE, read, write
from decoder.engine import SpeculativeDecoder
from decoder.errors import ModelError
from decoder.kernel_runner import KernelRunner
from decoder.request import GenerationRequest, SamplingParams
from tests.compiled_steps import compiling
from tests.tiny import save_tiny

KEPT = [*range(0, 384, 3), 380, 382]


@pytest.fixture(params=["eager", "kernel"] if kernel.compiler() else ["eager"])
def on_both_paths(request: pytest.FixtureRequest) -> Iterator[bool]:
    """True where the kernel computes."""
    if request.param == "eager":
        yield False
        return
    with compiling(kernel=True):
        yield True


def draft_in(folder: Path) -> Path:
    """A draft like the target (its drafts are accepted now and then), which scores ``KEPT``."""
    made = save_tiny(folder)
    write(made, KEPT[::-1])
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_scored_is_drafted(tmp_path: Path, on_both_paths: bool, temperature: float) -> None:
    target, draft = save_tiny(tmp_path / "target"), draft_in(tmp_path / "draft")
    request = GenerationRequest(
        "the cat sat on the mat", target=str(target), draft=str(draft), proposer="draft-model", k=3, chat=False,
        dtype="float32", device="cpu", max_new_tokens=40, sampling=SamplingParams(temperature=temperature, seed=3),
        ignore_eos=True,
    )  # fmt: skip
    decoder = SpeculativeDecoder.load(request)
    if on_both_paths:
        for runner in (decoder.target.runner, decoder.proposer.runner):  # type: ignore[union-attr]
            assert isinstance(runner, KernelRunner)
            runner.steps.settle()
    run = decoder.run(request)
    assert run.versions["draft_scores"] == "130 of 384 tokens"
    drafts = [draft for step in run.steps for draft in step.drafts]
    assert drafts
    assert {draft.id for draft in drafts} <= set(KEPT)
    assert {top.id for draft in drafts for top in draft.top_q} <= set(KEPT)
    assert run.metrics["draft_acceptance_rate"] > 0
    assert not {token.id for step in run.steps for token in step.emitted} <= set(KEPT), "the target writes all tokens"
    if not temperature:
        plain = replace(request, proposer="none", draft=None)
        assert SpeculativeDecoder.load(plain).run(plain).output_ids == run.output_ids


def test_the_same_folder_as_a_target_scores_everything(tmp_path: Path, on_both_paths: bool) -> None:
    loaded = loading.load(str(draft_in(tmp_path / "both")), "float32", "cpu")
    ids = torch.tensor([[5, 9, 12, 30]])
    short, whole = assemble.new_runner(loaded, role="draft"), assemble.new_runner(loaded)
    for runner in (short, whole):
        if on_both_paths:
            runner.steps.settle()  # type: ignore[attr-defined]
        runner.reset(1)
    some, every = short.forward(ids), whole.forward(ids)
    assert some.shape == every.shape == (1, 4, 384)
    kept = torch.zeros(384, dtype=torch.bool)
    kept[KEPT] = True
    assert torch.allclose(some[..., kept], every[..., kept], atol=1e-5)
    assert (some[..., ~kept] == -torch.inf).all()
    assert every.isfinite().all()


@pytest.mark.parametrize(
    "content",
    [
        *("", "[1, 2]", "{}", '{"ids": "12"}', '{"ids": 7}', '{"ids": []}', '{"ids": [3, 2]}', '{"ids": [1, 1]}'),
        *('{"ids": [1, 384]}', '{"ids": [-1, 4]}', '{"ids": [1.5]}', '{"ids": [true, 2]}'),
    ],
)
def test_a_file_that_is_no_such_list_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ModelError, match=FILE):
        read(tmp_path, 384)


def test_without_the_file_everything_is_scored(tmp_path: Path) -> None:
    assert read(tmp_path, 384) is None
    assert read(None, 384) is None
    write(tmp_path, [7, 3])
    assert json.loads((tmp_path / FILE).read_text()) == {"ids": [3, 7]}
    assert read(tmp_path, 8).tolist() == [3, 7]  # type: ignore[union-attr]
