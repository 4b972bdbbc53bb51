"""Acceptance beside a real engine's: counted per drafting step, compared position by position, with an interval."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoder.bench.acceptance import (
    Counted,
    compare,
    compare_acceptance,
    count_ours,
    count_theirs,
    markdown,
    speculative_config,
)
from decoder.bench.peers import PeerError, VllmVariant
from decoder.bench.plan import BenchPlan
from decoder.proposers.ngram import NgramProposer
from tests.decoder.test_bench_peers import case, program
from tests.tiny import save_tiny, tiny_decoder


def counted(seed: int, prompts: int, steps: int, rate: float, k: int = 4) -> list[Counted]:
    """Prompts whose drafts are accepted with ``rate`` each, until the first that is not."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(prompts):
        hits = rng.random((steps, k)) < rate
        accepted = tuple(int(np.cumprod(row).sum()) for row in hits)
        found.append(Counted(str(i), accepted, (k,) * steps, (i,)))
    return found


def test_equal_rates_agree_and_others_do_not() -> None:
    ours = counted(0, 30, 60, 0.5)
    same, other = (
        compare("eagle3", 4, ours, counted(1, 30, 60, 0.5)),
        compare("eagle3", 4, ours, counted(2, 30, 60, 0.4)),
    )
    assert same.positions[0].agrees
    assert abs(same.our_length - 1.94) < 0.1
    assert not other.positions[0].agrees
    assert other.positions[0].high < 0
    assert same.same_text == 30
    assert compare("eagle3", 4, ours, ours).same_steps == 30
    assert "| yes |" in markdown([compare("eagle3", 4, ours, ours)])
    assert "| no |" in markdown([other])


def test_prompts_without_a_draft_count_nothing() -> None:
    nothing = Counted("a", (), (), (1,))
    found = compare("ngram", 2, [nothing, Counted("b", (2, 0), (2, 2), (1,))], [nothing, nothing])
    assert [p.ours for p in found.positions] == [0.5, 0.5]
    assert found.their_length == 1.0


def test_what_the_server_is_told() -> None:
    assert speculative_config("eagle3", 4, "/heads/x") == {
        "method": "eagle3", "num_speculative_tokens": 4, "model": "/heads/x",
    }  # fmt: skip
    ngram = speculative_config("ngram", 3, None)
    assert (ngram["method"], ngram["prompt_lookup_min"], ngram["prompt_lookup_max"]) == ("ngram", 1, 4)


def test_what_the_server_counted_is_read(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    plan = BenchPlan(target=str(folder), dtype="float32", device="cpu")
    variant = VllmVariant(program(tmp_path), plan, ("--speculative-config", json.dumps({"method": "ngram"})))
    try:
        variant.start(lambda *_: None)
        assert count_theirs(variant, case()) == Counted("a", (2, 0, 1), (2, 2, 2), (5, 6, 7))
        assert count_theirs(variant, case(1)).accepted == ()
        with pytest.raises(PeerError, match="no detailed metrics"):
            count_theirs(variant, case(2))
    finally:
        variant.stop()


def test_our_own_count_is_per_drafting_step() -> None:
    decoder = tiny_decoder(NgramProposer())
    found = count_ours(
        decoder, replace(case(), request=case().request.replace(prompt="ab ab ab ab", chat=False)), "ngram", 4
    )
    assert len(found.accepted) == len(found.drafted)
    assert all(0 <= a <= d <= 4 for a, d in zip(found.accepted, found.drafted, strict=True))
    assert all(found.drafted)


def test_a_peer_that_cannot_do_a_method_is_quoted(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    plan = BenchPlan(
        target=str(folder), dtype="float32", device="cpu", proposers=("none", "ngram"),
        peers=(("vllm", program(tmp_path, "--dead")),),
    )  # fmt: skip
    request = case().request.replace(target=str(folder), chat=False, dtype="float32", device="cpu", prompt="ab ab ab")
    (found,) = compare_acceptance(plan, [replace(case(), request=request)])
    assert "no such model" in found.error
    assert "no such model" in markdown([found])
    with pytest.raises(PeerError, match="vllm=PYTHON"):
        compare_acceptance(replace(plan, peers=()), [])
