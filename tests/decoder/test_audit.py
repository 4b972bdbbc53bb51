"""The audit finds nothing where nothing is lost, and finds a planted fault."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import decoder.judge as judge
from decoder import loading
from decoder.audit import AuditPlan, chi_square_tail, compare_samples, homogeneity, resolution, run_audit
from decoder.verify import verify_greedy
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("draft"), seed=7)


def plan(folder: Path, draft: Path, **changes: object) -> AuditPlan:
    return AuditPlan(target=str(folder), draft=str(draft), proposers=("draft-model",), tokens=30, prompts=2, **changes)  # type: ignore[arg-type]


def test_a_lossless_decoder_passes(folder: Path, draft: Path) -> None:
    result = run_audit(plan(folder, draft, samples=300))
    assert result.passed
    assert [g.verdict for g in result.greedy] == ["equal", "equal"]
    assert result.sampled[0].verdict == "same"
    assert result.sampled[0].drafted > 0


def test_a_lossy_sampled_verification_fails(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: every draft is accepted."""
    right = judge.verify_sampled

    def lossy(drafts, counts, p, q, u_accept, u_token):
        return right(drafts, counts, p, q, torch.zeros_like(u_accept) - 1, u_token)

    monkeypatch.setattr(judge, "verify_sampled", lossy)
    result = run_audit(plan(folder, draft, samples=300))
    assert not result.passed
    assert result.sampled[0].verdict == "different"
    assert result.sampled[0].total_variation > result.sampled[0].expected_variation


def test_a_lossy_greedy_verification_fails(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the first draft is accepted unseen."""

    def lossy(drafts, best):
        return min(len(drafts), max(1, verify_greedy(drafts, best)))

    monkeypatch.setattr(judge, "verify_greedy", lossy)
    result = run_audit(plan(folder, draft, samples=0))
    assert not result.passed
    assert result.greedy[0].divergence is not None


def test_the_chi_square_tail_is_scipys() -> None:
    from scipy.stats import chi2

    for value, freedom in ((0.5, 1), (3.84, 1), (20.0, 7), (100.0, 40)):
        assert chi_square_tail(value, freedom) == pytest.approx(float(chi2.sf(value, freedom)), rel=1e-9)


def test_homogeneity_is_uniform_under_the_null_and_small_otherwise() -> None:
    rng = random.Random(0)
    same = [
        homogeneity(rng.choices("abcd", (4, 3, 2, 1), k=300), rng.choices("abcd", (4, 3, 2, 1), k=300))
        for _ in range(200)
    ]
    assert sum(p < 0.05 for p in same) <= 22
    assert homogeneity(rng.choices("ab", (5, 5), k=300), rng.choices("ab", (8, 2), k=300)) < 1e-6
    assert homogeneity(["a"] * 50, ["a"] * 50) == 1.0


def test_comparing_needs_drafts_to_be_a_verdict() -> None:
    rows = [(1, 2, 3)] * 100
    assert compare_samples("ngram", rows, rows, drafted=0).verdict == "not speculating"


def test_resolution_of_low_precision() -> None:
    assert resolution(20.0, "bfloat16") == 0.125
    assert resolution(1.5, "float32") == 2.0**-23
    assert loading.pick_dtype("float32", "cpu") == "float32"
