"""A whole bench of tiny models: rows, JSON and tables are there. Nothing here asserts a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from decoder.bench import floor as floors
from decoder.bench import random_models
from decoder.bench.floor import bytes_per_token, measure_floor, read_bandwidth
from decoder.bench.hugging_face import ASSISTED, EXIT, LOOKUP, PLAIN, HuggingFaceVariant
from decoder.bench.measure import Case
from decoder.bench.plan import BenchPlan
from decoder.bench.result import BenchResult, read, save
from decoder.bench.run import cases_of, run_bench
from decoder.bench.tables import markdown, print_bench, sheets
from decoder.bench.widths import measure_widths
from decoder.errors import RequestError
from decoder.heads.layout import HEADS
from decoder.loading import load
from decoder.request import GenerationRequest
from tests.decoder.test_bench_summary import result
from tests.tiny import runner, save_tiny, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "CPU_BYTES", 1 << 20)


def plan(folder: Path, **changes: object) -> BenchPlan:
    values = {
        "target": str(folder), "draft": str(folder), "suites": ("chat", "edit"), "prompts": 1, "tokens": 8,
        "repeats": 2, "ks": (2,), "batch": (1, 3), "memory": 6, "width_rounds": 2, "dtype": "float32", "device": "cpu",
        **changes,
    }  # fmt: skip
    return BenchPlan(**values)  # type: ignore[arg-type]


def test_a_whole_bench(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages: list[str] = []
    found = run_bench(plan(folder), lambda fraction, message: messages.append(message))
    heads = [f"redline/{p}/2" for p in HEADS]
    ours = [f"redline/{p}/2" for p in ("draft-model", "ngram", "suffix", "prediction", "early-exit")]
    theirs = ["transformers/generate", *(f"transformers/{kind}/2" for kind in (ASSISTED, LOOKUP, EXIT))]
    assert set(found.variants) == {*theirs, "redline/none", *ours, *heads}
    # No head here was made for this target, and the rows say so.
    assert set(found.errors) == set(heads)
    assert all("head" in text or "MTP" in text for text in found.errors.values())
    rows = {(row.suite, row.variant): row for row in found.rows()}
    # A prediction is measured where there is one.
    assert set(rows) == {
        (suite, variant)
        for suite in ("chat", "edit", "all")
        for variant in (*theirs, "redline/none", *ours)
        if (suite, variant) != ("chat", "redline/prediction/2")
    } | {("all", head) for head in heads}
    row = rows["all", "redline/draft-model/2"]
    assert row.draft_acceptance_rate == 1.0
    assert row.vs_plain is not None
    assert row.vs_transformers is not None
    assert row.draft_ms is not None
    assert row.path
    # Both write the same number of tokens: 8 each, of which the prefill gives the first.
    assert rows["chat", "redline/none"].tokens == rows["chat", "transformers/generate"].tokens == 2 * 7
    assert [w.width for w in found.widths] == [1, 2, 3, 5, 9]
    assert {(r.batch, r.variant) for r in found.batch_rows()} == {
        (b, v) for b in (1, 3) for v in ("redline/none", "redline/draft-model/2", "redline/ngram/2")
    }
    assert all(r.error is None for r in found.batch_rows())
    assert found.memory is not None
    assert found.floor is not None
    assert messages
    path = save(found, tmp_path / "sub" / "bench.json")
    again = read(path)
    assert again == found
    assert again.to_json() == found.to_json()
    print_bench(found)
    text = capsys.readouterr().out
    assert "redline/early-exit/2" in text
    assert "\x1b" not in text


def test_the_kept_form_goes_around(tmp_path: Path) -> None:
    found = result()
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert BenchResult.from_json(data) == found
    assert {row["variant"] for row in data["rows"]} == set(found.variants)
    for spoilt in ({}, {"schema": 1}, {**data, "samples": [{"x": 1}]}, {**data, "schema": 7}):
        with pytest.raises(RequestError):
            BenchResult.from_json(spoilt)
    with pytest.raises(RequestError, match="cannot read"):
        read(tmp_path / "absent.json")
    with pytest.raises(RequestError, match="cannot write"):
        save(found, Path("/proc/nowhere/x.json"))


def test_tables_of_every_part() -> None:
    found = result()
    assert [sheet.title for sheet in sheets(found)] == [
        "chat, 1 prompts x 2",
        "edit, 1 prompts x 2",
        "every suite, 2 prompts x 2",
        "one pass of several tokens, behind 256",
        "many requests at once",
        "resident memory",
        "goals",
    ]
    text = markdown(found)
    assert "| vllm/plain | it is not here |" in text
    assert "no \\| pipe" in text
    lines = [line for line in text.splitlines() if line.startswith("| redline/ngram/4 |")]
    assert len(lines) == 3


def test_prompts_of_several_suites_take_turns(folder: Path) -> None:
    loaded = load(str(folder), "float32", "cpu")
    found = cases_of(plan(folder, prompts=2), loaded)
    assert [case.suite for case in found] == ["chat", "edit", "chat", "edit"]
    assert all(case.ids for case in found)
    assert found[0].request.prediction is None
    assert found[1].request.prediction


def test_a_draft_that_is_missing_is_a_sentence_in_its_rows(folder: Path) -> None:
    found = run_bench(plan(folder, draft=None, proposers=("none", "draft-model"), suites=("chat",), batch=(), memory=0))
    assert "no draft that is here was made for" in found.errors["redline/draft-model/2"]
    assert "no draft that is here was made for" in found.errors[f"transformers/{ASSISTED}/2"]
    assert "redline/none" not in found.errors


@pytest.mark.parametrize("kind", [PLAIN, ASSISTED, LOOKUP, EXIT])
def test_transformers_writes_what_its_own_generate_writes(kind: str) -> None:
    model, ids = tiny_llama(), (5, 6, 7, 5, 6)
    model.generation_config.temperature = 0.7
    before = model.generation_config.to_dict()
    variant = HuggingFaceVariant(kind, 0 if kind == PLAIN else 3, model=model, assistant=model, exit_layer=1)
    case = Case("chat", "a", GenerationRequest("x", max_new_tokens=12, ignore_eos=True), ids)
    sample = variant.measure(case, 0)
    assert sample.rounds is not None
    if kind == ASSISTED:
        # A model that drafts for itself keeps every token: rounds of four, the first of which the clock leaves out.
        assert (sample.tokens, sample.rounds) == (8, 2)
    if kind == PLAIN:
        assert (sample.tokens, sample.rounds) == (11, 11)
    assert model.generation_config.to_dict() == before


def test_bytes_per_token_count_a_tied_table_once_and_an_embedding_not_at_all() -> None:
    model = tiny_llama()
    table = 384 * 64 * 4
    every = sum(p.numel() * 4 for p in model.parameters())
    assert bytes_per_token(model) == every - table
    shape = dataclasses.replace(random_models.SHAPES["tiny"], tied=True)
    tied = random_models.build(shape, "cpu", "float32")
    assert bytes_per_token(tied) == sum(p.numel() * 4 for p in tied.parameters())


def test_bandwidth_is_a_positive_number() -> None:
    speed, method, size = read_bandwidth("cpu", 1 << 20, passes=2)
    assert speed > 0
    assert method
    assert size == 1 << 20
    assert measure_floor(tiny_llama(), "cpu", buffer_bytes=1 << 20, passes=1).ms > 0


@pytest.mark.parametrize("path", ["generic", "fused"])
def test_widths_leave_the_runner_as_they_found_it(path: str) -> None:
    model = runner(path=path)
    found = measure_widths(model, context=40, rounds=2, widths=(1, 4))
    assert [w.width for w in found] == [1, 4]
    assert found[0].ratio == 1.0
    assert found[0].device_ms is None
    assert model.lengths == [0]
