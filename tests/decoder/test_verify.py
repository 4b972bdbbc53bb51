"""Verification by hand-worked numbers: p is the target, q the draft."""

from __future__ import annotations

import pytest
import torch

from decoder.verify import (
    residual,
    verify_greedy,
    verify_sampled,
    verify_tree_greedy,
    verify_tree_sampled,
)
from tests.statistics import LIMIT, fits


def run_chain(
    p: list[list[float]], q: list[list[float]] | None, drafts: list[int], u: list[float], u_token: float = 0.0
):
    rows = torch.tensor([p], dtype=torch.float32)
    return verify_sampled(
        torch.tensor([drafts]),
        torch.tensor([len(drafts)]),
        rows,
        None if q is None else torch.tensor([q], dtype=torch.float32),
        torch.tensor([u], dtype=torch.float64),
        torch.tensor([u_token], dtype=torch.float64),
    )


def test_residual_is_the_normalised_positive_part():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    assert residual(p, q).tolist() == [1.0, 0.0, 0.0]
    p, q = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.2, 0.2, 0.6])
    assert residual(p, q).tolist() == pytest.approx([0.6, 0.4, 0.0])


def test_residual_of_equal_rows_is_p_and_never_nan():
    p = torch.tensor([0.25, 0.75])
    assert residual(p, p.clone()).tolist() == p.tolist()


def test_a_certain_draft_is_kept_half_the_time_and_a_rejection_always_gives_the_other_token():
    p, q = [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]
    kept = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(4000):
        u, v = torch.rand(2, generator=generator).tolist()
        verdict = run_chain(p, q, [0], [u], v)
        if int(verdict.accepted[0]):
            kept += 1
        else:
            assert int(verdict.token[0]) == 1
    assert 0.47 < kept / 4000 < 0.53


@pytest.mark.parametrize("accepts", [0, 1, 2, 3])
def test_the_own_token_comes_from_the_row_behind_the_last_kept_draft(accepts: int):
    """Rejection must not be applied one row late: each row has a token of its own."""
    p = [[0.0] * 8 for _ in range(4)]
    for row in range(4):
        p[row][row] = 0.5  # the draft of this row
        p[row][4 + row] = 0.5  # what is left over
    u = [0.0] * accepts + [0.9] * (3 - accepts)
    verdict = run_chain(p, None, [0, 1, 2], u, 0.99)
    assert int(verdict.accepted[0]) == accepts
    assert int(verdict.token[0]) == 4 + accepts


def test_the_draw_decides_and_not_a_constant():
    """p/q = 0.1: accepted in a tenth of the cases."""
    p, q = [[0.1, 0.9], [0.5, 0.5]], [[1.0, 0.0]]
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(3)).tolist()
    kept = sum(int(run_chain(p, q, [0], [x]).accepted[0]) for x in u[:4000])
    assert abs(kept / 4000 - 0.1) < 0.02
    assert float(run_chain(p, q, [0], [0.5]).accept_prob[0, 0]) == pytest.approx(0.1)


def test_rows_of_a_batch_do_not_see_each_other():
    p = torch.tensor([[[0.9, 0.1], [0.0, 1.0]], [[0.1, 0.9], [1.0, 0.0]]])
    both = verify_sampled(
        torch.tensor([[0], [0]]),
        torch.tensor([1, 1]),
        p,
        None,
        torch.tensor([[0.5], [0.5]], dtype=torch.float64),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
    )
    assert both.accepted.tolist() == [1, 0]
    assert both.token.tolist() == [1, 1]


def test_a_row_with_fewer_drafts_ignores_its_padding():
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
    verdict = verify_sampled(
        torch.tensor([[1, 0]]),
        torch.tensor([1]),
        p,
        None,
        torch.zeros(1, 2, dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )
    assert verdict.accepted.tolist() == [1]


def test_greedy_keeps_the_prefix_that_equals_the_argmax():
    best = [3, 4, 5, 6]
    assert verify_greedy([3, 9, 5], best) == 1
    assert verify_greedy([9, 4, 5], best) == 0
    assert verify_greedy([3, 4, 5], best) == 3
    assert verify_greedy([3], best) == 1  # shorter than its neighbours in a batch
    assert verify_greedy([], best) == 0


# --- chains: 30,000 runs at once --------------------------------------------------------------------------------------

RUNS = 30_000
CHAIN_P = torch.tensor([0.05, 0.30, 0.10, 0.25, 0.20, 0.10])
CHAIN_Q = torch.tensor([0.30, 0.05, 0.25, 0.10, 0.10, 0.20])


def _behind(row: torch.Tensor, last: torch.Tensor, times: int) -> torch.Tensor:
    """Rows [B, V] behind the tokens ``last`` [B]: another rotation for each."""
    return torch.stack([row.roll(-times * i) for i in range(6)])[last]


def _first_two_tokens(k: int, *, argmax_draft: bool = False) -> list[tuple[int, int]]:
    """Draft k tokens for RUNS rows, verify, and take the first two tokens of the output (step 2 drafts k again)."""
    generator = torch.Generator().manual_seed(17)
    last = torch.zeros(RUNS, dtype=torch.long)
    outputs = [[] for _ in range(RUNS)]
    for _ in range(2):
        drafts, q_rows, p_rows = [], [], [_behind(CHAIN_P, last, 1)]
        token = last
        for _ in range(k):
            q = _behind(CHAIN_Q, token, 2)
            token = q.argmax(-1) if argmax_draft else torch.multinomial(q, 1, generator=generator).squeeze(1)
            drafts.append(token)
            q_rows.append(q)
            p_rows.append(_behind(CHAIN_P, token, 1))
        ids = torch.stack(drafts, 1)
        u = torch.rand(RUNS, k + 1, generator=generator, dtype=torch.float64)
        verdict = verify_sampled(
            ids, torch.full((RUNS,), k), torch.stack(p_rows, 1), torch.stack(q_rows, 1), u[:, :k], u[:, k]
        )
        for row, (n, own) in enumerate(zip(verdict.accepted.tolist(), verdict.token.tolist(), strict=True)):
            outputs[row] += [*ids[row, :n].tolist(), own]
        last = verdict.token
    return [(o[0], o[1]) for o in outputs]


def _chain_pairs() -> dict[tuple[int, int], float]:
    return {(a, b): float(CHAIN_P[a] * CHAIN_P.roll(-a)[b]) for a in range(6) for b in range(6)}


@pytest.mark.parametrize("k", [1, 4])
def test_first_tokens_and_pairs_follow_p_over_30000_runs(k: int):
    pairs = _first_two_tokens(k)
    assert fits([a for a, _ in pairs], {i: float(CHAIN_P[i]) for i in range(6)}) > LIMIT
    assert fits(pairs, _chain_pairs()) > LIMIT


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_drafts_judged_by_softmax_q_fail_the_same_test(k: int):
    pairs = _first_two_tokens(k, argmax_draft=True)
    assert fits([a for a, _ in pairs], {i: float(CHAIN_P[i]) for i in range(6)}) < 1e-6


# --- trees: 3 siblings at each of two depths -----------------------------------------------------------------------

V = 5
PARENTS: list[int | None] = [None, None, None, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def _rows(seed: int) -> torch.Tensor:
    """A target row for the root and for each first token: the row behind a node depends on its token only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(V + 1, V, generator=generator).pow(2).clamp_min(0.01)


ROOT_AND_BEHIND = _rows(5)
TARGET = ROOT_AND_BEHIND / ROOT_AND_BEHIND.sum(1, keepdim=True)
DRAFT = _rows(11)[:, :V] / _rows(11)[:, :V].sum(1, keepdim=True)


def _expected_pairs() -> dict[tuple[int, int], float]:
    return {(a, b): float(TARGET[0, a] * TARGET[a + 1, b]) for a in range(V) for b in range(V)}


def _target_rows(drafts: list[int]) -> torch.Tensor:
    """Rows behind root and each node; behind depth-2 nodes any row will do, the pair is complete by then."""
    return torch.stack([TARGET[0], *(TARGET[d + 1] for d in drafts)])


def _sample_pair(deterministic: bool, generator: torch.Generator) -> tuple[int, int]:
    drafts: list[int] = []
    q_rows: list[torch.Tensor] = []
    for parent in PARENTS:
        row = DRAFT[0] if parent is None else DRAFT[drafts[parent] + 1]
        siblings = [d for d, p in zip(drafts, PARENTS, strict=False) if p == parent]
        if deterministic:
            drafts.append([int(i) for i in row.argsort(descending=True)][len(siblings)])
        else:
            drafts.append(int(torch.multinomial(row, 1, generator=generator)))
        q_rows.append(row)
    p = _target_rows(drafts)
    u = torch.rand(len(drafts) + 1, generator=generator).tolist()
    verdict = verify_tree_sampled(drafts, PARENTS, p, None if deterministic else torch.stack(q_rows), u[:-1], u[-1])
    output = [drafts[n] for n in verdict.path] + [verdict.token]
    if len(output) < 2:  # the second token is then the target's own in the next step
        output.append(int(torch.multinomial(TARGET[output[0] + 1], 1, generator=generator)))
    return output[0], output[1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_trees_keep_the_targets_distribution(deterministic: bool):
    generator = torch.Generator().manual_seed(7)
    pairs = [_sample_pair(deterministic, generator) for _ in range(6000)]
    assert fits(pairs, _expected_pairs()) > LIMIT


def test_sampled_verification_of_deterministic_children_is_wrong_and_is_seen():
    """Negative control: top-k children judged by their softmax q, as a public implementation did."""
    generator = torch.Generator().manual_seed(7)
    firsts = []
    order = [int(i) for i in DRAFT[0].argsort(descending=True)][:3]
    for _ in range(6000):
        u = torch.rand(4, generator=generator).tolist()
        verdict = verify_tree_sampled(
            order, [None, None, None], _target_rows(order), torch.stack([DRAFT[0]] * 3), u[:3], u[3]
        )
        firsts.append(order[verdict.path[0]] if verdict.path else verdict.token)
    assert fits(firsts, {i: float(TARGET[0, i]) for i in range(V)}) < 1e-6


def test_greedy_tree_follows_the_argmax_through_siblings():
    # root -> 7, 8; 8 -> 3, 4; the target wants 8, then 4, then 1
    verdict = verify_tree_greedy([7, 8, 3, 4], [None, None, 1, 1], [8, 0, 4, 0, 1])
    assert verdict.path == (1, 3)
    assert verdict.token == 1
    assert set(verdict.tested) == {0, 1, 2, 3}
