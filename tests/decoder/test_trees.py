"""Trees that are drafted: their shape, which nodes are kept, each node's distribution, and that they are lossless."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoder.errors import RequestError
from decoder.proposers.base import Context, Proposal, Proposer
from decoder.proposers.tree import draft_tree, static_shape
from decoder.request import GenerationRequest
from decoder.trace import Step, violations
from tests import head_forward, heads
from tests.decoder.every_proposer import every_decoder, request_for
from tests.decoder.test_head_forward import decode
from tests.heads import predictable
from tests.statistics import LIMIT, fits
from tests.toys import ask, log, toy_decoder

V = 6
P = [0.05, 0.30, 0.10, 0.25, 0.20, 0.10]
Q = [0.30, 0.05, 0.25, 0.10, 0.10, 0.20]


def row_of(row: Sequence[float], prefix: Sequence[int]) -> list[float]:
    """Another row for every text, so that a wrong path shows."""
    by = sum((i + 1) * t for i, t in enumerate(prefix)) % V
    return [*row[by:], *row[:by]]


class TableTree(Proposer):
    """Drafts trees from a table: what follows a node is a function of the text and the path to it."""

    name = "eagle"

    def __init__(self, rows: Callable[[Sequence[int]], Sequence[float]]) -> None:
        self.rows = rows
        self.proposals: list[Proposal] = []

    def begin(self, context: Context) -> None:
        self._context = context

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        row = self._context.rows[0]
        proposal = draft_tree(_Table(self.rows, row.tokens), row, ks[0])
        self.proposals.append(proposal)
        return proposal


class _Table:
    def __init__(self, rows: Callable[[Sequence[int]], Sequence[float]], text: list[int]) -> None:
        self._rows, self._text, self._paths = rows, list(text), list[list[int]]()

    def root(self) -> Tensor:
        return torch.tensor(log(self._rows(self._text)))

    def grow(self, ids: Sequence[int], parents: Sequence[int | None]) -> Tensor:
        new = [[*([] if p is None else self._paths[p]), i] for i, p in zip(ids, parents, strict=True)]
        self._paths += new
        return torch.tensor([log(self._rows([*self._text, *path])) for path in new])


def path_to(step: Step, node: int | None) -> list[int]:
    found: list[int] = []
    while node is not None:
        found.insert(0, step.drafts[node].id)
        node = step.drafts[node].parent
    return found


# --- shape ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.integers(1, 80), st.integers(1, 8))
def test_a_static_shape_keeps_to_its_limits(depth: int, nodes: int, width: int) -> None:
    shape = static_shape(depth, nodes, width)
    most = sum(width**level for level in range(1, depth + 1))
    assert len(shape) == min(nodes, most)
    depths: list[int] = []
    for node, parent in enumerate(shape):
        assert parent is None or parent < node
        depths.append(1 if parent is None else depths[parent] + 1)
    assert max(depths) <= depth
    assert depths == sorted(depths), "level by level"
    assert max(shape.count(parent) for parent in set(shape)) <= width


def test_a_static_shape_by_hand() -> None:
    """Values 0.6 for the likeliest child, 0.3 times that for each next: .6; .36; .216; .18; .13; .108 twice."""
    assert static_shape(4, 4, 4) == [None, None, 0, 2]
    assert static_shape(4, 5, 4) == [None, None, 0, 2, 3]
    assert static_shape(3, 3, 1) == [None, 0, 1]
    assert static_shape(1, 3, 5) == [None, None, None]


# --- which nodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 7, 20])
def test_a_dynamic_tree_holds_the_likeliest_nodes_of_all(nodes: int) -> None:
    """As wide as the vocabulary nothing is passed over: the nodes are those with the largest products of all."""
    proposer = TableTree(lambda prefix: row_of(Q, prefix))
    decoder = toy_decoder(lambda prefix: log(row_of(P, prefix)), V, proposer)
    run = decoder.run(
        ask("abc", proposer="eagle", k=3, max_new_tokens=5, tree="dynamic", tree_nodes=nodes, tree_width=32)
    )
    step = run.steps[1]
    text = [*run.prompt_ids, run.output_ids[0]]
    every: dict[tuple[int, ...], float] = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(V), repeat=length):
            every[path] = math.prod(row_of(Q, [*text, *path[:i]])[path[i]] for i in range(length))
    ours = sorted((every[tuple(path_to(step, i))] for i in range(len(step.drafts))), reverse=True)
    assert ours == pytest.approx(sorted(every.values(), reverse=True)[:nodes])
    assert len({tuple(path_to(step, i)) for i in range(len(step.drafts))}) == nodes


def test_a_dynamic_tree_goes_deep_where_the_draft_is_sure_and_wide_where_it_is_not() -> None:
    sure = toy_decoder(lambda p: log(P), V, TableTree(lambda prefix: [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]))
    unsure = toy_decoder(lambda p: log(P), V, TableTree(lambda prefix: [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]))
    request = ask("a", proposer="eagle", k=4, max_new_tokens=8, tree="dynamic", tree_nodes=4, tree_width=4)
    assert [d.parent for d in sure.run(request).steps[1].drafts] == [None, 0, 1, 2]
    assert [d.parent for d in unsure.run(request).steps[1].drafts] == [None, None, None, None]


def test_a_probability_of_one_never_loses_its_parent() -> None:
    """Products that are equal: the parent comes first."""
    certain = TableTree(lambda prefix: [float(i == (prefix[-1] + 1) % V) for i in range(V)])
    decoder = toy_decoder(lambda prefix: log(row_of(P, prefix)), V, certain)
    run = decoder.run(ask("a", proposer="eagle", k=4, max_new_tokens=20, tree="dynamic", tree_nodes=3))
    assert violations(run) == []
    assert [d.parent for d in run.steps[1].drafts] == [None, 0, 1]


# --- lossless -------------------------------------------------------------------------------------------------------


def outputs(request: dict[str, Any], n: int = 2000, proposer: Proposer | None = None) -> list[tuple[int, ...]]:
    decoder = toy_decoder(
        lambda prefix: log(row_of(P, prefix)), V, proposer or TableTree(lambda prefix: row_of(Q, prefix))
    )
    common: dict[str, Any] = {"proposer": "eagle", "k": 3, "max_new_tokens": 4, "temperature": 1.0}
    return [decoder.run(ask("a", **common, **request, seed=seed)).output_ids[1:3] for seed in range(n)]


def expected() -> dict[tuple[int, ...], float]:
    """Tokens 2 and 3 behind the prompt token 0, whatever the first was."""
    found: dict[tuple[int, ...], float] = {}
    for ids in itertools.product(range(V), repeat=3):
        probability, text = 1.0, [0]
        for token in ids:
            probability *= row_of(P, text)[token]
            text.append(token)
        found[ids[1:]] = found.get(ids[1:], 0.0) + probability
    return found


@pytest.mark.parametrize(
    "request_",
    [
        {"tree": "static", "tree_nodes": 9, "tree_width": 3},
        {"tree": "static", "tree_nodes": 40, "tree_width": 6},
        {"tree": "dynamic", "tree_nodes": 8, "tree_width": 3},
    ],
    ids=["drawn without replacement", "until nothing is left to draw", "chosen without chance"],
)
def test_sampled_trees_keep_the_distribution(request_: dict[str, Any]) -> None:
    assert fits(outputs(request_), expected()) > LIMIT


class Mistaken(TableTree):
    """The classical fault: children chosen without chance are verified as if they were drawn from the softmax."""

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        proposal, text = super().propose(ks, u), self._context.rows[0].tokens
        ids, parents, paths, rows = proposal.ids[0].tolist(), list(proposal.parents or ()), list[list[int]](), []
        for token, parent in zip(ids, parents, strict=True):
            above = [] if parent is None else paths[parent]
            rows.append(torch.tensor(self.rows([*text, *above])))
            paths.append([*above, token])
        proposal.q = torch.stack(rows)[None]
        return proposal


def test_chosen_children_with_a_distribution_are_caught() -> None:
    """Negative control of the test above. (The other way round only costs acceptance: whatever the drafts are, each of
    them is tested against what is left of the target's distribution.)"""
    wrong = Mistaken(lambda prefix: row_of(Q, prefix))
    assert fits(outputs({"tree": "dynamic", "tree_nodes": 8, "tree_width": 3}, 1000, wrong), expected()) < 1e-6


def test_the_distributions_of_siblings_leave_out_the_earlier_ones() -> None:
    proposer = TableTree(lambda prefix: row_of(Q, prefix))
    decoder = toy_decoder(lambda prefix: log(row_of(P, prefix)), V, proposer)
    decoder.run(ask("a", proposer="eagle", k=2, max_new_tokens=9, temperature=1.0, tree="static", tree_width=3))
    for proposal in proposer.proposals:
        assert proposal.q is not None
        earlier: dict[int | None, list[int]] = {}
        for node, (token, parent) in enumerate(zip(proposal.ids[0].tolist(), proposal.parents or (), strict=True)):
            row = proposal.q[0, node]
            assert float(row.sum()) == pytest.approx(1.0, abs=1e-5)
            assert float(row[token]) > 0
            assert all(float(row[t]) == 0 for t in earlier.get(parent, []))
            earlier.setdefault(parent, []).append(token)


def test_where_the_filters_leave_two_tokens_a_node_has_two_children() -> None:
    proposer = TableTree(lambda prefix: row_of(Q, prefix))
    decoder = toy_decoder(lambda prefix: log(row_of(P, prefix)), V, proposer)
    for tree in ("static", "dynamic"):
        request = ask("a", proposer="eagle", k=3, max_new_tokens=12, temperature=1.0, top_k=2, tree=tree, tree_width=5)
        assert violations(decoder.run(request)) == []
    for proposal in proposer.proposals:
        parents = list(proposal.parents or ())
        assert max(parents.count(parent) for parent in parents) <= 2


def test_a_draft_that_breaks_down_only_costs_time() -> None:
    def broken(prefix: Sequence[int]) -> list[float]:
        return [float("nan")] * V if len(prefix) % 5 == 0 else row_of(Q, prefix)

    for tree, temperature in itertools.product(("static", "dynamic"), (0.0, 1.0)):
        decoder = toy_decoder(lambda prefix: log(row_of(P, prefix)), V, TableTree(broken))
        run = decoder.run(ask("a", proposer="eagle", k=4, max_new_tokens=30, temperature=temperature, tree=tree))
        assert violations(run) == []
        assert len(run.output_ids) == 30
        assert run.metrics["num_draft_tokens"] > 0


# --- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "medusa"])
def test_every_node_has_what_an_independent_forward_gives_its_path(name: str, tree: str, tmp_path: Path) -> None:
    """Positions, ancestors and states along every path of every tree of a run, also behind accepted branches."""
    model = predictable()
    config, tensors = {"eagle": heads.eagle, "eagle3": heads.eagle3, "mtp": heads.mtp, "medusa": heads.medusa}[name](
        model
    )
    run = decode(
        heads.save(tmp_path, (config, tensors)),
        name,
        model,
        temperature=0.0,
        tree=tree,
        tree_nodes=9,
        max_new_tokens=18,
    )
    assert violations(run) == []
    text, branches = list(run.prompt_ids), set()
    for step in run.steps:
        for draft in step.drafts:
            path = path_to(step, draft.parent)
            logits = (
                head_forward.medusa_logits(tensors, model, text, len(path))
                if name == "medusa"
                else head_forward.forward(name, config, tensors, model, text, path)[1]
            )
            assert draft.q == pytest.approx(float(logits.softmax(-1)[draft.id]), abs=2e-4)
            assert draft.top_q[0].id == int(logits.argmax())
        accepted = [i for i, draft in enumerate(step.drafts) if draft.verdict == "accepted"]
        branches.add(accepted == list(range(len(accepted))))
        text += [token.id for token in step.emitted]
    assert branches == {True, False}, "no branch beside the first one was ever taken"


def test_in_a_batch_chains_are_drafted_and_the_output_stays() -> None:
    decoder = every_decoder("eagle", "fused")
    requests = [
        request_for("eagle", prompt, tree="dynamic", k=4, max_new_tokens=n, ignore_eos=True)
        for prompt, n in (("The quick", 10), ("brown fox", 40))
    ]
    alone = [decoder.run(request) for request in requests]
    assert any(d.parent != (i - 1 if i else None) for s in alone[1].steps for i, d in enumerate(s.drafts))
    for run, expected_run in zip(decoder.generate(requests), alone, strict=True):
        assert run.output_ids == expected_run.output_ids
        assert all(d.parent == (i - 1 if i else None) for s in run.steps for i, d in enumerate(s.drafts))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tree": "oak"}, "unknown tree 'oak': choose one of chain, static, dynamic"),
        ({"tree_nodes": 1}, "tree nodes must be between 2 and 256, not 1"),
        ({"tree_width": 0}, "tree width must be between 1 and 32, not 0"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        GenerationRequest("x").replace(**changes).validate()
