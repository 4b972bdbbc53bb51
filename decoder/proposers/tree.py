"""Drafting a tree: of a fixed shape (static), or grown where the draft is sure (dynamic, as in EAGLE-2).

A static tree's children are the likeliest tokens when greedy, and drawn without replacement when sampling; then each
child carries the distribution that it was drawn from, earlier siblings taken out. A dynamic tree keeps the nodes whose
product of probabilities is largest: it looks at the distributions only, never at a draw, so its tokens count as chosen
without chance. Both are lossless (see ``verify.verify_tree_sampled``). One row only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from decoder.proposers.base import Proposal, Row
from decoder.sampling import draw
from decoder.threads import alone
from decoder.transfer import upload

_FIRST, _NEXT = 0.6, 0.3
"""A static shape assumes that the likeliest token is right six times in ten, each further one 0.3 times as often."""


class Branches(Protocol):
    """Scores what follows a text and the nodes of a tree behind it."""

    def root(self) -> Tensor:
        """Logits [V] behind the text."""

    def grow(self, ids: Sequence[int], parents: Sequence[int | None]) -> Tensor:
        """Logits [n, V] behind n new nodes; ``parents`` index the nodes that were grown before (None: the text)."""


@dataclass
class _Tree:
    """Nodes in the order in which they were found; parents come before their children."""

    ids: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """Logarithm of the product of probabilities from the root."""
    grown: dict[int, int] = field(default_factory=dict)
    """Node -> its index among those that ``Branches`` knows."""
    sound: bool = True
    """Everything that was scored was a number."""

    def add(self, token: int, parent: int | None, q: Tensor, score: float = 0.0) -> int:
        self.ids.append(token)
        self.parents.append(parent)
        self.q.append(q)
        self.scores.append(score)
        return len(self.ids) - 1

    def path(self, node: int | None) -> list[int]:
        """Tokens from the root to ``node``."""
        found: list[int] = []
        while node is not None:
            found.insert(0, self.ids[node])
            node = self.parents[node]
        return found


def static_shape(depth: int, nodes: int, width: int) -> list[int | None]:
    """Parents of the ``nodes`` most promising nodes, level by level; ``depth`` levels, ``width`` children at most."""
    # (minus value, depth, parent in ``found``, rank): the next node to take is the smallest.
    queue: list[tuple[float, int, int, int]] = [(-_FIRST, 1, -1, 0)]
    found: list[tuple[int, int]] = []
    while queue and len(found) < nodes:
        value, level, parent, rank = heapq.heappop(queue)
        found.append((level, parent))
        if rank + 1 < width:
            heapq.heappush(queue, (value * _NEXT, level, parent, rank + 1))
        if level < depth:
            heapq.heappush(queue, (value * _FIRST, level + 1, len(found) - 1, 0))
    order = sorted(range(len(found)), key=lambda i: (found[i][0], i))
    place = {old: new for new, old in enumerate(order)}
    return [None if found[i][1] < 0 else place[found[i][1]] for i in order]


def draft_tree(branches: Branches, row: Row, depth: int) -> Proposal:
    """The tree that ``row.request`` asks for, at most ``depth`` deep."""
    request = row.request
    greedy = request.sampling.greedy
    if request.tree == "dynamic":
        tree = _dynamic(branches, row, depth, request.tree_nodes, request.tree_width)
    else:
        tree = _static(branches, row, static_shape(depth, request.tree_nodes, request.tree_width))
    device = branches.root().device
    if not tree.ids:
        proposal = Proposal.of_lists([[]], str(device), [None if tree.sound else "the draft's logits are not numbers"])
    else:
        chosen = request.tree == "dynamic" and not greedy
        proposal = Proposal(
            upload([tree.ids], device),
            upload([len(tree.ids)], device),
            None if chosen else torch.stack(tree.q)[None],
            parents=list(tree.parents),
            reasons=[None],
        )
    proposal.sound = upload([tree.sound], device, torch.bool)
    return proposal


def _static(branches: Branches, row: Row, shape: Sequence[int | None]) -> _Tree:
    """Fill ``shape``, level by level; a node for which there is no token is left out with what is below it."""
    children: dict[int | None, list[int]] = {}
    for child, above in enumerate(shape):
        children.setdefault(above, []).append(child)
    draws = row.draws.take(len(shape)).tolist() if not row.request.sampling.greedy else [0.0] * len(shape)
    tree, place = _Tree(), dict[int, int]()
    level: list[int | None] = [None]
    while level:
        scores = _score(branches, tree, row, [None if node is None else place[node] for node in level])
        following: list[int | None] = []
        for node, logits in zip(level, scores, strict=True):
            parent = None if node is None else place[node]
            q = _distribution(tree, row, logits)
            with alone(logits.numel()):
                picked = [] if q is None else _pick(logits, q, row, [draws[child] for child in children[node]])
            for child, (token, q) in zip(children[node], picked, strict=False):
                place[child] = tree.add(token, parent, q)
                if child in children:
                    following.append(child)
        level = following
    return tree


def _distribution(tree: _Tree, row: Row, logits: Tensor) -> Tensor | None:
    """What children are taken from [V]; None where the processed ``logits`` are not numbers."""
    with alone(logits.numel()):
        if bool(logits.amax().isfinite()):
            return row.sampler.probs(logits[None])[0]
    tree.sound = False
    return None


def _pick(logits: Tensor, q: Tensor, row: Row, draws: Sequence[float]) -> list[tuple[int, Tensor]]:
    """One token per draw (fewer where no more can be), each with its distribution [V]. ``logits`` [V] are processed."""
    if row.request.sampling.greedy:
        best = logits.topk(min(len(draws), logits.shape[0]))
        return [(int(i), q) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True) if v > -math.inf]
    found = []
    for u in draws:
        total = q.sum()
        if not float(total) > 0:
            break
        q = q / total
        token = int(draw(q, torch.tensor(u, dtype=torch.float64, device=q.device)))
        found.append((token, q))
        q = q.index_fill(0, torch.tensor(token, device=q.device), 0.0)
    return found


def _dynamic(branches: Branches, row: Row, depth: int, nodes: int, width: int) -> _Tree:
    """Expand the ``width`` best nodes of a level, then keep the ``nodes`` best of all (EAGLE-2, arXiv 2406.16858)."""
    tree = _Tree()
    beam: list[int | None] = [None]
    for _ in range(depth):
        first = len(tree.ids)
        for parent, logits in zip(beam, _score(branches, tree, row, beam), strict=True):
            q = _distribution(tree, row, logits)
            if q is None:
                continue
            best = q.topk(min(width, q.shape[0]))
            above = 0.0 if parent is None else tree.scores[parent]
            for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if p > 0:
                    tree.add(token, parent, q, above + math.log(p))
        new = range(first, len(tree.ids))
        beam = list(sorted(new, key=lambda node: -tree.scores[node])[:width])
        if not beam:
            break
    # Sorting keeps the order of equals, so a parent is never left out for its child.
    kept = sorted(sorted(range(len(tree.ids)), key=lambda node: -tree.scores[node])[:nodes])
    result, place = _Tree(sound=tree.sound), dict[int, int]()
    for node in kept:
        above_it = tree.parents[node]
        place[node] = result.add(tree.ids[node], None if above_it is None else place[above_it], tree.q[node])
    return result


def _score(branches: Branches, tree: _Tree, row: Row, nodes: Sequence[int | None]) -> list[Tensor]:
    """Processed logits [V] behind each of ``nodes``; None, alone, is the text."""
    if list(nodes) == [None]:
        raw, paths = branches.root()[None], [list[int]()]
    else:
        inner = [node for node in nodes if node is not None]
        above = [tree.parents[node] for node in inner]
        raw = branches.grow([tree.ids[node] for node in inner], [None if p is None else tree.grown[p] for p in above])
        for node in inner:
            tree.grown[node] = len(tree.grown)
        paths = [tree.path(node) for node in inner]
    if row.sampler.plain:
        return list(row.sampler.logits(raw))
    rows = []
    for logits, path in zip(raw, paths, strict=True):
        ahead = torch.tensor(path, dtype=torch.long, device=raw.device)
        rows.append(row.sampler.logits(logits[None], ahead, skip=len(path))[0])
    return rows
