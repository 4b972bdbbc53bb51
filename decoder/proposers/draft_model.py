"""Drafting with a model of its own: an independent draft model, or the target's own first layers (early exit)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoder.errors import RequestError
from decoder.proposers.base import Context, Proposal, Proposer, Row
from decoder.proposers.chain import draft_chain
from decoder.target import RowRunner, Runner
from decoder.transfer import upload


def autoregress(runner: Runner, rows: Sequence[Row], ks: Sequence[int], u: Tensor, vocab_size: int) -> Proposal:
    """Draft max(ks) tokens one after the other; ``runner`` first takes every committed token it has not seen.

    The first pass takes one token after a rejection and two after a full accept, so catching up costs no pass of its
    own.
    """
    # A text that has outgrown the runner is not taken in any more.
    pending = [
        row.tokens[length:] if len(row.tokens) < runner.context else []
        for row, length in zip(rows, runner.lengths, strict=True)
    ]
    longest = max(len(p) for p in pending)
    first = upload([p + [0] * (longest - len(p)) for p in pending], runner.logits_device)
    # A target with a padded head may emit an id that the draft's embedding does not have.
    first = first.clamp_max(runner.vocab_size - 1)
    logits = runner.forward(first, [len(p) for p in pending], last=True)
    return draft_chain(logits, runner.forward, rows, ks, u, vocab_size)


class DraftModelProposer(Proposer):
    """An independent smaller model with the target's vocabulary. Keeps a KV cache of its own."""

    name = "draft-model"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._sound: Tensor | None = None

    def begin(self, context: Context) -> None:
        self._context = context
        if self._sound is not None and not bool(self._sound):
            # What is not a number must not stay in buffers that the next rows use.
            for row in range(len(self.runner.lengths)):
                self.runner.wipe(row)
        self._sound = None
        self.runner.reset(len(context.rows))
        self._base: list[int] | None = None

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        rows = self._context.rows
        full = [len(row.tokens) >= self.runner.context for row in rows]
        ks = [max(0, min(k, self.runner.context - len(row.tokens))) for k, row in zip(ks, rows, strict=True)]
        reason = f"the text is longer than the draft's context of {self.runner.context:,} tokens"
        if max(ks) < 1:
            proposal = Proposal.of_lists([[] for _ in rows], self._context.device, [None] * len(rows))
        else:
            self._base = [len(row.tokens) for row in rows]
            proposal = autoregress(self.runner, rows, ks, u, self._context.vocab_size)
            if proposal.sound is not None:
                whole = proposal.sound.all()
                self._sound = whole if self._sound is None else self._sound & whole
        proposal.reasons = [reason if f else r for f, r in zip(full, proposal.reasons, strict=True)]
        return proposal

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        if self._base is None:
            return
        # The last draft was never fed back, so even after a full accept the cache ends before it.
        self.runner.rollback(
            [
                min(base + len(path), length, self.runner.context)
                for base, path, length in zip(self._base, paths, self.runner.lengths, strict=True)
            ]
        )
        self._base = None

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)

    def path(self) -> str:
        return str(getattr(self.runner, "path", ""))


class EarlyExitProposer(Proposer):
    """The target's first layers plus its norm and head. Shares weights and KV cache with the target.

    What the short model writes into the cache lies behind the committed text and is overwritten by the verification.
    """

    name = "early-exit"

    def __init__(self, target: RowRunner, total: int, layers: int = 0) -> None:
        self.layers = layers or max(1, round(total / 4))
        try:
            self.runner = target.short(self.layers)
        except ValueError as error:
            raise RequestError(f"early exit does not work with this target: {error}") from None
        self._target = target

    def begin(self, context: Context) -> None:
        self._context = context

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        self.runner.lengths = list(self._target.lengths)
        return autoregress(self.runner, self._context.rows, ks, u, self._context.vocab_size)

    def path(self) -> str:
        return str(getattr(self.runner, "path", ""))
