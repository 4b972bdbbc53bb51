"""The check for a bare machine with a GPU, rehearsed on the CPU: every part is there. Nothing here asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoder.bench import run
from decoder.bench import synthetic as module
from decoder.bench.bed import Bed
from decoder.bench.exactness import Exact, compare
from decoder.bench.plan import BenchPlan
from decoder.bench.random_models import HEADS, SHAPES, IdTokenizer, build, truncated
from decoder.bench.result import BenchResult
from decoder.bench.round_times import Round, medians, rounds_between, rounds_of
from decoder.bench.synthetic import Synthetic, SyntheticPlan, run_synthetic
from decoder.bench.tables import sheets
from decoder.request import GenerationRequest
from tests.tiny import tiny_decoder

ROOT = Path(__file__).resolve().parents[2]


def tiny_plan(**changes: object) -> SyntheticPlan:
    values = {
        "shapes": ("tiny",), "device": "cpu", "dtype": "float32", "k": 3, "tokens": 20, "prompt_tokens": 16,
        "rounds": 9, "repeats": 1, "errors": (0.0, 1.0), "exact_tokens": 24, "exact_shape": "tiny", "long_context": 40,
        "buffer_bytes": 1 << 20, **changes,
    }  # fmt: skip
    return SyntheticPlan(**values)  # type: ignore[arg-type]


def tiny_bed(tokens: int = 12) -> Bed:
    return Bed(SHAPES["tiny"], device="cpu", dtype="float32", k=3, prompt_tokens=16, tokens=tokens)


def test_every_part_on_a_tiny_shape_with_recorded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_GRAPHS", "rehearse")
    measured, exact = run_synthetic(tiny_plan())
    assert measured.errors == {}
    assert measured.path == "CUDA graph, rehearsed"
    by_variant = {s.variant: s for s in measured.samples}
    right, wrong = by_variant["redline/replay, 0% wrong/3"], by_variant["redline/replay, 100% wrong/3"]
    assert (right.accepted, wrong.accepted) == (right.drafted, 0)
    rounds = {r.variant: r for r in measured.rounds}
    assert set(rounds) == set(by_variant)
    assert {"redline/none, eager path", "redline/draft-model/3", "transformers/generate"} <= set(rounds)
    assert all(r.rounds >= 9 for r in rounds.values())
    assert rounds["redline/replay, 0% wrong/3"].tokens > 3
    assert rounds["redline/none"].tokens == rounds["transformers/generate"].tokens == 1
    assert (rounds["redline/none"].draft_ms, rounds["transformers/generate"].draft_ms) == (0, None)
    assert [w.width for w in measured.widths] == [w.width for w in measured.long_widths] == [1, 2, 3, 5, 9]
    assert measured.long_context == 40
    differing = {name: e.words() for name, e in exact.exact.items() if not e.equal}
    assert differing == {}
    assert {"none", "draft-model", "early-exit", "ngram", "suffix", "prediction", *HEADS} <= set(exact.exact)
    assert {"eagle3, dynamic tree", "three rows together", "eager path", "transformers"} <= set(exact.exact)
    for found in (measured, exact):
        assert Synthetic.from_json(json.loads(json.dumps(found.to_json()))) == found
    result = BenchResult(BenchPlan(synthetic=True), "now", {}, synthetic=(measured, exact))
    assert [len(sheet.rows) for sheet in sheets(result)] == [len(rounds), len(rounds), 5, 5, len(exact.exact)]


@pytest.mark.parametrize(
    ("shapes", "measured", "exact"),
    [((), ("tiny",), "tiny"), (("8b", "1b"), ("8b", "1b"), "1b"), (("8b",), ("8b",), "8b")],
)
def test_the_command_chooses_shapes_by_device_or_as_told(
    shapes: tuple[str, ...], measured: tuple[str, ...], exact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SyntheticPlan] = []
    monkeypatch.setattr(run, "run_synthetic", lambda plan, report: asked.append(plan) or [])
    run.run_bench(BenchPlan(synthetic=True, device="cpu", dtype="float32", shapes=shapes))
    assert (asked[0].shapes, asked[0].exact_shape) == (measured, exact)
    assert asked[0].rounds >= 20


def test_a_shape_that_does_not_fit_is_a_sentence_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    beds = iter((torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB."), None))

    class Small(Bed):
        def __init__(self, *args: object, **options: object) -> None:
            error = next(beds)
            if error is not None:
                raise error
            super().__init__(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "Bed", Small)
    plan = tiny_plan(shapes=("tiny", "tiny"), exact_shape="", transformers=False, errors=(), rounds=1)
    failed, measured = run_synthetic(plan)
    assert "out of memory" in failed.errors["tiny"].lower()
    assert measured.rounds
    assert sheets(BenchResult(BenchPlan(synthetic=True), "now", {}, synthetic=(failed,)))[0].rows[0][0] == "tiny"


def test_a_difference_says_where_and_whether_it_was_a_near_tie() -> None:
    bed = tiny_bed()
    assert compare(bed, bed.continuation) == Exact(True)
    other = list(bed.continuation)
    other[5] = (other[5] + 1) % 128
    found = compare(bed, other)
    assert (found.equal, found.at) == (False, 5)
    text = torch.tensor([[*bed.ids, *bed.continuation[:5]]])
    with torch.inference_mode():
        logits = bed.model(input_ids=text).logits[0, -1]
    assert int(logits.argmax()) == bed.continuation[5]
    best = logits.topk(2).values
    assert found.gap == pytest.approx(float(best[0] - best[1]))
    assert "token 5" in found.words()
    assert compare(bed, bed.continuation[:4]).at == 4


def test_rounds_of_a_run_leave_its_prefill_out() -> None:
    run = tiny_decoder().run(GenerationRequest("The", chat=False, max_new_tokens=5, ignore_eos=True))
    found = rounds_of(run.steps)
    assert [r.tokens for r in found] == [1] * 4
    assert found[0].ms == pytest.approx(run.steps[1].draft_ms + run.steps[1].verify_ms + run.steps[1].overhead_ms)


def test_medians_are_those_of_rounds_that_emitted_something() -> None:
    rounds = [
        Round(1, 10.0, 2.0, 7.0, 1.0),
        Round(3, 30.0, 4.0, 25.0, 1.0),
        Round(5, 20.0, 9.0, 10.0, 1.0),
        Round(0, 99.0),
    ]
    found = medians("x", rounds)
    assert found is not None
    assert (found.rounds, found.tokens, found.ms.median) == (3, 3, 20)
    assert (found.draft_ms, found.verify_ms, found.overhead_ms) == (4, 10, 1)
    assert found.ms_per_token == pytest.approx(20 / 3)
    assert medians("x", [Round(0, 1.0)]) is None


def test_rounds_of_another_engine_lie_between_its_emissions() -> None:
    found = rounds_between([(1.0, 1), (1.5, 2), (1.75, 4)])
    assert [(r.tokens, r.ms, r.draft_ms) for r in found] == [(2, 500.0, None), (4, 250.0, None)]


def test_a_truncated_copy_has_the_targets_first_layers() -> None:
    shape = SHAPES["tiny"]
    model = build(shape, "cpu", "float32")
    short = truncated(model, shape, "cpu", "float32")
    assert len(short.model.layers) == 1
    assert torch.equal(short.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(short.lm_head.weight, model.lm_head.weight)


def test_numbers_are_a_language() -> None:
    tokenizer = IdTokenizer(20)
    assert tokenizer("3 17")["input_ids"] == [3, 17]
    assert tokenizer.decode([3, 17]) == " 3 17"


def test_the_check_needs_torch_and_transformers_and_what_they_bring() -> None:
    """A bare GPU machine has neither the page's nor the database's libraries, nor psutil, httpx or platformdirs."""
    missing = ("gradio", "sqlalchemy", "alembic", "plotly", "platformdirs", "psutil", "httpx", "pandas", "gguf")
    code = (
        f"import sys\nfor name in {missing!r}: sys.modules[name] = None\n"
        "import decoder.cli, decoder.bench.command, decoder.bench.run, decoder.bench.tables, decoder.bench.synthetic\n"
    )
    code += "from decoder.loading import cache_dir\nassert cache_dir().name == 'redline'\n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=without_cache_setting(), check=True, timeout=300)


def without_cache_setting() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "REDLINE_CACHE"}
