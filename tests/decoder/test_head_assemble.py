"""From a request to a run with a head: found, loaded or refused, and what the catalog and compat say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoder import assemble_heads, catalog, compat, draft_vocabulary
from decoder.engine import SpeculativeDecoder
from decoder.errors import IncompatibleError, ModelError
from decoder.request import GenerationRequest, SamplingParams
from tests import heads
from tests.heads import predictable
from tests.tiny import tiny_tokenizer

BUILD = {"eagle": heads.eagle, "eagle3": heads.eagle3, "medusa": heads.medusa_vllm, "mtp": heads.mtp}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    predictable().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def shelf(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A drafts folder with one head of each kind, made for the target."""
    for name, build in BUILD.items():
        heads.save(tmp_path / f"tiny-{name}", build(predictable()))
    monkeypatch.setattr(catalog, "DRAFTS_DIR", tmp_path)
    shipped = catalog._shipped_drafts
    monkeypatch.setattr(catalog, "_shipped_drafts", lambda: [replace(entry, fits=target) for entry in shipped()])
    compat._pair.cache_clear()
    assemble_heads._kept.clear()  # whoever ran before
    yield tmp_path
    assemble_heads._kept.clear()


def ask(target: str, proposer: str, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        "the quick brown fox",
        chat=False,
        target=target,
        proposer=proposer,
        max_new_tokens=16,
        ignore_eos=True,
        dtype="float32",
        device="cpu",
    ).replace(**changes)


@pytest.mark.parametrize("proposer", BUILD)
def test_a_head_by_folder_drafts(proposer: str, target: str, shelf: Path) -> None:
    folder = str(shelf / f"tiny-{proposer}")
    request = ask(target, proposer, draft=folder)
    decoder = SpeculativeDecoder.load(request)
    run = decoder.run(request)
    assert run.draft == folder
    assert run.metrics["num_draft_tokens"] > 0
    assert run.versions["draft_family"] == proposer
    assert len(run.versions["draft_fingerprint"]) == 16
    assert run.output_ids == SpeculativeDecoder.load(request.baseline()).run(request.baseline()).output_ids
    head: Any = assemble_heads._kept[(folder, proposer, next(iter(assemble_heads._kept))[2])][1]
    again: Any = SpeculativeDecoder.load(request).proposer
    assert head in (getattr(again, "heads", None), getattr(getattr(again, "runner", None), "head", None))


@pytest.mark.parametrize("proposer", ["eagle", "mtp"])
def test_a_head_with_the_targets_matrix_may_score_a_part_of_it(proposer: str, target: str, shelf: Path) -> None:
    name, kept = f"tiny-{proposer}", list(range(0, heads.V, 2))
    draft_vocabulary.write(shelf / name, kept)
    for temperature in (0.0, 1.0):
        request = ask(target, proposer, draft=name, sampling=SamplingParams(temperature=temperature))
        run = SpeculativeDecoder.load(request).run(request)
        assert run.versions["draft_scores"] == f"{len(kept)} of {heads.V} tokens"
        drafts = [draft for step in run.steps for draft in step.drafts]
        assert drafts
        assert {draft.id for draft in drafts} <= set(kept)
        if not temperature:
            assert run.output_ids == SpeculativeDecoder.load(request.baseline()).run(request.baseline()).output_ids
    (shelf / name / draft_vocabulary.FILE).write_text("[]")
    assemble_heads._kept.clear()
    with pytest.raises(ModelError, match=draft_vocabulary.FILE):
        SpeculativeDecoder.load(request)


@pytest.mark.parametrize("proposer", BUILD)
def test_a_head_that_is_here_is_found_without_a_name(proposer: str, target: str, shelf: Path) -> None:
    assert catalog.default_draft(target, proposer) == f"tiny-{proposer}"
    assert [entry.name for entry in catalog.drafts_for(proposer) if entry.present] == [f"tiny-{proposer}"]
    assert SpeculativeDecoder.load(ask(target, proposer)).draft == f"tiny-{proposer}"


def test_heads_are_no_draft_models(target: str, shelf: Path) -> None:
    assert catalog.default_draft(target) is None
    decoder = SpeculativeDecoder.load(ask(target, "draft-model"))
    assert decoder.not_speculating == f"no draft that is here was made for {target}"
    with pytest.raises(IncompatibleError, match="is an EAGLE-3 head, no model of its own: choose the proposer eagle3"):
        SpeculativeDecoder.load(ask(target, "draft-model", draft="tiny-eagle3"))


@pytest.mark.parametrize("proposer", BUILD)
def test_without_a_head_the_run_decodes_plainly_and_says_why(
    proposer: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "DRAFTS_DIR", tmp_path)
    request = ask(target, proposer)
    run = SpeculativeDecoder.load(request).run(request)
    assert f"no {proposer} head that is here was made for {target}" in run.metrics["not_speculating"]
    assert run.metrics["num_draft_tokens"] == 0


def test_a_model_without_mtp_says_so(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "DRAFTS_DIR", tmp_path)
    decoder = SpeculativeDecoder.load(ask(target, "mtp"))
    assert decoder.not_speculating is not None
    assert f"{target} has no MTP layer of its own: its checkpoint holds no mtp.*" in decoder.not_speculating
    with pytest.raises(ModelError, match="has no MTP layer of its own"):
        SpeculativeDecoder.load(ask(target, "mtp", draft=target))


def test_a_head_that_does_not_fit_is_refused_by_name_and_passed_over_otherwise(target: str, shelf: Path) -> None:
    config, tensors = heads.eagle3(predictable())
    config["vocab_size"] = 400
    heads.save(shelf / "tiny-eagle3", (config, tensors))
    with pytest.raises(IncompatibleError, match=r"tiny-eagle3 does not fit .*: its vocabulary has 400 entries"):
        SpeculativeDecoder.load(ask(target, "eagle3", draft="tiny-eagle3"))
    decoder = SpeculativeDecoder.load(ask(target, "eagle3"))
    assert decoder.proposer is None
    assert "its vocabulary has 400 entries" in str(decoder.not_speculating)


def test_compat_says_for_each_head_whether_it_fits(target: str, shelf: Path) -> None:
    for name in BUILD:
        assert compat.check_pair(target, f"tiny-{name}") == []
        assert compat.check_pair(target, str(shelf / f"tiny-{name}")) == []
    config = json.loads((shelf / "tiny-mtp" / "config.json").read_text())
    (shelf / "tiny-mtp" / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    assert compat.check_pair(target, "tiny-mtp") == [f"its hidden size is 96, and the hidden size of {target} is 64"]


def test_every_head_in_the_catalog_has_a_proposer_that_runs() -> None:
    names = {entry.name for entry in catalog.proposers()}
    assert {entry.proposer for entry in catalog.drafts()} <= names
    assert {"eagle", "eagle3", "medusa", "mtp"} <= names


def test_few_heads_stay_in_memory(target: str, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble_heads, "KEPT", 2)
    for name in ("eagle3", "medusa", "mtp"):
        SpeculativeDecoder.load(ask(target, name))
    assert [key[1] for key in assemble_heads._kept] == ["medusa", "mtp"]
