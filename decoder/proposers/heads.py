"""Drafting with heads that read the target's states: EAGLE-1/2, EAGLE-3, MTP (token by token), Medusa (at once)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.heads.models import MedusaHeads
from decoder.heads.runner import HeadRunner
from decoder.proposers.base import Context, Proposal, Proposer
from decoder.proposers.chain import draft_chain
from decoder.proposers.tree import draft_tree
from decoder.sampling import spread
from decoder.transfer import upload


class States:
    """The target's states of each row that no head has read yet, in order."""

    def __init__(self, context: Context) -> None:
        captured = context.target.captured
        assert captured is not None
        # Copies: what a pass captures may be overwritten by the next one.
        self.parts = [[captured[b, : row.prompt_length].clone()] for b, row in enumerate(context.rows)]
        self.known = [row.prompt_length for row in context.rows]
        """Positions of each row whose state was captured: all but the newest token's."""

    def add(self, context: Context, paths: Sequence[Sequence[int]]) -> None:
        """Take what the verifying pass captured on the way that was kept: position 0 is the token before the drafts."""
        captured = context.target.captured
        assert captured is not None
        for b, (row, path) in enumerate(zip(context.rows, paths, strict=True)):
            new = len(row.tokens) - 1 - self.known[b]
            if new <= 0:
                continue
            at = [0, *(node + 1 for node in path)][:new]
            if at == list(range(new)):
                self.parts[b].append(captured[b, :new].clone())
            else:
                self.parts[b].append(captured[b, upload(at, captured.device)])
            self.known[b] += len(at)

    def take(self, row: int) -> Tensor | None:
        """The unread states [T, n * H] of a row, which count as read then."""
        parts, self.parts[row] = self.parts[row], []
        return (parts[0] if len(parts) == 1 else torch.cat(parts)) if parts else None

    def forget(self, row: int) -> None:
        """Nobody will read this row's states any more."""
        self.parts[row] = []

    def select(self, rows: Sequence[int]) -> None:
        """Only ``rows`` go on."""
        self.parts = [self.parts[row] for row in rows]
        self.known = [self.known[row] for row in rows]


def wants_tree(context: Context) -> bool:
    """Trees are verified one row at a time: in a batch, and for the row that is left at its end, chains are drafted."""
    return len(context.rows) == 1 and context.rows[0].request.tree != "chain"


class HeadProposer(Proposer):
    """A recurrent head. Its first pass of a round takes in what was committed, with the target's own states, and
    scores the first draft; each further draft, or level of a tree, is one pass on the head's own output."""

    def __init__(self, name: str, runner: HeadRunner) -> None:
        self.name = name
        self.runner = runner
        self.capture = runner.head.capture
        self._sound: Tensor | None = None

    def begin(self, context: Context) -> None:
        self._context = context
        self._states = States(context)
        self._tree = wants_tree(context)
        if self._sound is not None and not bool(self._sound):
            self.runner.cache.clear()  # what is not a number must not stay in buffers that the next rows use
        self._sound = None
        self.runner.reset(len(context.rows))

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        rows, context = self._context.rows, self.runner.context
        full = [len(row.tokens) >= context for row in rows]
        ks = [max(0, min(k, context - len(row.tokens))) for k, row in zip(ks, rows, strict=True)]
        for b in [b for b, is_full in enumerate(full) if is_full]:
            self._states.forget(b)
        if max(ks) < 1:
            proposal = Proposal.of_lists([[] for _ in rows], self._context.device, [None] * len(rows))
        else:
            logits = self._catch_up(full)
            if self._tree:
                branches = _Grown(logits[0, 0], self.runner)
                proposal = draft_tree(branches, rows[0], ks[0])
            else:
                proposal = draft_chain(logits, self.runner.step, rows, ks, u, self._context.vocab_size)
            if proposal.sound is not None:
                whole = proposal.sound.all()
                self._sound = whole if self._sound is None else self._sound & whole
        reason = f"the text is longer than the head's context of {context:,} tokens"
        proposal.reasons = [reason if f else r for f, r in zip(full, proposal.reasons, strict=True)]
        return proposal

    def _catch_up(self, full: Sequence[bool]) -> Tensor:
        """Take in every committed token whose state is known: entry p reads the token at p + 1 and the state at p."""
        rows, runner = self._context.rows, self.runner
        pending: list[list[int]] = []
        states: list[Tensor | None] = []
        for b, row in enumerate(rows):
            # A text that has outgrown the head is not taken in any more.
            pending.append([] if full[b] else row.tokens[runner.lengths[b] + 1 :])
            states.append(None if full[b] else self._states.take(b))
        longest = max(len(p) for p in pending)
        ids = upload([p + [0] * (longest - len(p)) for p in pending], runner.device)
        if len(rows) == 1 and states[0] is not None:
            return runner.take_in(ids, states[0][None], [longest])
        some = next(s for s in states if s is not None)
        padded = some.new_zeros(len(rows), longest, some.shape[-1])
        for b, part in enumerate(states):
            if part is not None:
                padded[b, : len(part)] = part
        return runner.take_in(ids, padded, [len(p) for p in pending])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._states.add(self._context, paths)

    def select(self, rows: Sequence[int]) -> None:
        self._states.select(rows)
        self.runner.select(rows)

    def path(self) -> str:
        return self.runner.path


class _Grown:
    """The branches of a recurrent head: its entries attend along their own path."""

    def __init__(self, first: Tensor, runner: HeadRunner) -> None:
        self._first, self._runner = first, runner

    def root(self) -> Tensor:
        return self._first

    def grow(self, ids: Sequence[int], parents: Sequence[int | None]) -> Tensor:
        return self._runner.branch(ids, parents)


class _Ranks:
    """The branches of Medusa heads: what follows a node hangs on its depth alone. ``logits`` [heads, V]."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._depths: list[int] = []

    def root(self) -> Tensor:
        return self._logits[0]

    def grow(self, ids: Sequence[int], parents: Sequence[int | None]) -> Tensor:
        depths = [1 if parent is None else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        return self._logits[upload(depths, self._logits.device)]


class MedusaProposer(Proposer):
    """Medusa heads: head i scores the (i + 1)-th draft, whatever the drafts before it are."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads, *, device: str, logits_device: str | None = None) -> None:
        self.heads = heads
        self.capture = heads.capture
        self.device = device
        self.logits_device = logits_device or device

    def begin(self, context: Context) -> None:
        self._context = context
        captured = context.target.captured
        assert captured is not None
        self._tree = wants_tree(context)
        self._states = torch.stack([captured[b, row.prompt_length - 1] for b, row in enumerate(context.rows)])

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        ks = [min(k, self.heads.count) for k in ks]
        logits = self._logits(max(ks))
        if self._tree:
            return draft_tree(_Ranks(logits[0]), self._context.rows[0], ks[0])
        following = iter(range(1, max(ks)))

        def step(ids: Tensor) -> Tensor:
            return logits[:, next(following)][:, None]

        return draft_chain(logits[:, :1], step, self._context.rows, ks, u, self._context.vocab_size)

    def _logits(self, heads: int) -> Tensor:
        """[B, heads, V]."""
        logits = spread(self.heads.score(self._states, heads), self.heads.ids, self._context.vocab_size)
        return logits if self.logits_device == self.device else logits.to(self.logits_device)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        captured = self._context.target.captured
        assert captured is not None
        at = [path[-1] + 1 if path else 0 for path in paths]
        self._states = captured[torch.arange(len(at), device=captured.device), upload(at, captured.device)]

    def select(self, rows: Sequence[int]) -> None:
        self._states = self._states[upload(list(rows), self._states.device)]

    def path(self) -> str:
        return "eager, fused"
