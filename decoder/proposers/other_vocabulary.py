"""Drafting with a model that has another vocabulary than the target.

Sampled rows use token-level intersection (TLI; Timor et al., arXiv 2502.05202): the draft's distribution is restricted
to the tokens that both have, renormalised and written with the target's ids. That is the q that was drawn from, so
rejection sampling stays exact. Greedy rows use re-encoding with look-behind: the draft writes on in its own tokens, and
its text is split as the target would have split it; those tokens are one-hot, and any tokens would be exact.

Either way the draft reads what was committed as text in its own tokens. Where that differs from what it has written,
its cache is rolled back to where they part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.proposers.base import Context, Proposal, Proposer
from decoder.proposers.chain import draft_chain
from decoder.proposers.confidence import NEVER
from decoder.proposers.draft_text import DraftText, look_behind, re_encode
from decoder.request import GenerationRequest
from decoder.sampling import likeliest
from decoder.target import Runner
from decoder.threads import alone
from decoder.transfer import upload
from decoder.vocabulary import SharedVocabulary

PER_TOKEN = 4
"""Draft tokens written for a target token, at most, on average over a draft."""


def way(request: GenerationRequest) -> str:
    """How a draft with another vocabulary drafts this request, in words."""
    return "re-encoding with look-behind" if request.sampling.greedy else "token-level intersection"


class OtherVocabularyProposer(Proposer):
    """A draft model whose tokens are not the target's. Keeps a KV cache of its own, over its own tokens."""

    name = "draft-model"

    def __init__(self, runner: Runner, shared: SharedVocabulary) -> None:
        self.runner = runner
        self.shared = shared
        self._to_target = {theirs: ours for ours, theirs in shared.control.items()}
        self._sound: Tensor | bool = True
        """Whether all of the draft's scores were numbers."""

    def begin(self, context: Context) -> None:
        self._context = context
        if not bool(self._sound):
            # What is not a number must not stay in buffers that the next rows use.
            for row in range(len(self.runner.lengths)):
                self.runner.wipe(row)
        self._sound = True
        self.runner.reset(len(context.rows))
        self._texts = [DraftText(self.shared) for _ in context.rows]
        self._fed: list[list[int]] = [[] for _ in context.rows]
        """What the draft's cache holds."""
        self._equal = [0] * len(context.rows)
        """Leading tokens of it that are known to be the text's, for good."""
        self._chained = [0] * len(context.rows)
        """Drafts of a chain that were fed in this round: the host does not know them before the verdict."""
        self._pairs = {
            ours: theirs
            for ours, theirs in zip(self.shared.target_ids, self.shared.draft_ids, strict=True)
            if ours < context.vocab_size and theirs < self.runner.vocab_size
        }
        device = self.runner.logits_device
        self._ours = upload(list(self._pairs), device)
        self._theirs = upload(list(self._pairs.values()), device)
        self._table = upload([self._pairs.get(token, 0) for token in range(context.vocab_size)], device)

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        rows = self._context.rows
        room, reasons = self._read_text()
        ks = [max(0, min(k, space)) for k, space in zip(ks, room, strict=True)]
        if max(ks) < 1:
            return Proposal.of_lists([[] for _ in rows], self._context.device, reasons)
        logits = self._catch_up(ks)
        greedy = [row.request.sampling.greedy for row in rows]
        of_chain = [0 if g else k for g, k in zip(greedy, ks, strict=True)]
        of_text = [k if g else 0 for g, k in zip(greedy, ks, strict=True)]
        if max(of_text) < 1:
            return self._draft_chain(logits, of_chain, u, reasons)
        if max(of_chain) < 1:
            return self._draft_text(logits, of_text, room, reasons)
        logits = logits.clone()  # a pass may write where the one before has
        return _join(self._draft_chain(logits, of_chain, u, reasons), self._draft_text(logits, of_text, room, reasons))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        if not any(self._chained):
            return
        for b, (row, path) in enumerate(zip(self._context.rows, paths, strict=True)):
            kept = row.tokens[self._base[b] :][: min(len(path), self._chained[b])]
            self._fed[b].extend(self._pairs[token] for token in kept)
        self.runner.rollback([len(fed) for fed in self._fed])
        self._chained = [0] * len(self._chained)

    def select(self, rows: Sequence[int]) -> None:
        self.runner.select(rows)
        self._texts = [self._texts[row] for row in rows]
        self._fed = [self._fed[row] for row in rows]
        self._equal = [self._equal[row] for row in rows]
        self._chained = [0] * len(rows)

    def path(self) -> str:
        return str(getattr(self.runner, "path", ""))

    # --- the text so far --------------------------------------------------------------------------------------------

    def _read_text(self) -> tuple[list[int], list[str | None]]:
        """Take in what was committed. How many tokens each row's draft may still write, and why it may write none."""
        room: list[int] = []
        reasons: list[str | None] = []
        for row, text in zip(self._context.rows, self._texts, strict=True):
            text.extend(row.tokens)
            space = self.runner.context - len(text.ids)
            reason = "the draft's logits are not numbers, or what it wrote ends at once"
            if space < 1:
                reason = f"the text is longer than the draft's context of {self.runner.context:,} tokens"
            elif not text.whole or not text.ids:
                reason = "the text ends inside a character that the draft cannot spell"
                space = 0
            room.append(space)
            reasons.append(reason)
        return room, reasons

    def _catch_up(self, ks: Sequence[int]) -> Tensor:
        """Roll the draft back to where its cache and the text part, and feed the rest; rows of k 0 stay as they are.

        Returns logits [B, 1, D] of what follows each row that drafts. At least the text's last token is fed again,
        since only a pass gives logits.
        """
        keep: list[int] = []
        pending: list[list[int]] = []
        for b, (text, fed) in enumerate(zip(self._texts, self._fed, strict=True)):
            if not ks[b]:
                keep.append(len(fed))
                pending.append([])
                continue
            at, end = self._equal[b], min(len(fed), len(text.ids))
            while at < end and fed[at] == text.ids[at]:
                at += 1
            self._equal[b] = min(at, text.settled)
            keep.append(min(at, len(text.ids) - 1))
            pending.append(text.ids[keep[b] :])
            fed[keep[b] :] = pending[b]
        self.runner.rollback(keep)
        longest = max(len(p) for p in pending)
        ids = upload([p + [0] * (longest - len(p)) for p in pending], self.runner.logits_device)
        return self.runner.forward(ids, [len(p) for p in pending], last=True)

    # --- sampled: token-level intersection --------------------------------------------------------------------------

    def _draft_chain(self, logits: Tensor, ks: Sequence[int], u: Tensor, reasons: list[str | None]) -> Proposal:
        self._base = [len(row.tokens) for row in self._context.rows]

        def step(ids: Tensor) -> Tensor:
            # The last draft of a row is never fed back.
            feeds = [int(fed + 1 < k) for fed, k in zip(self._chained, ks, strict=True)]
            self._chained = [fed + more for fed, more in zip(self._chained, feeds, strict=True)]
            return self._across(self.runner.forward(self._table[ids], feeds))

        proposal = draft_chain(self._across(logits), step, self._context.rows, ks, u, self._context.vocab_size)
        proposal.reasons = reasons
        if proposal.sound is not None:
            self._sound = proposal.sound.all() & self._sound
        return proposal

    def _across(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, 1, D] with the target's ids [B, 1, V]: what the target does not have is impossible."""
        shape = torch.Size((*logits.shape[:-1], self._context.vocab_size))
        with alone(shape.numel()):
            found = logits.new_full(shape, -torch.inf)
            found[..., self._ours] = logits[..., self._theirs]
            return found

    # --- greedy: re-encoding with look-behind -----------------------------------------------------------------------

    def _draft_text(
        self, logits: Tensor, ks: Sequence[int], room: Sequence[int], reasons: list[str | None]
    ) -> Proposal:
        """Let the draft write on until its text is ks[b] target tokens that will stay (those of the last word may still
        be split otherwise, depending on what comes next), it ends, it is not sure enough, or it has written enough."""
        target, draft = self.shared.target, self.shared.draft
        rows = self._context.rows
        behind = [look_behind(target, row.tokens) if k else b"" for row, k in zip(rows, ks, strict=True)]
        written = [b""] * len(ks)
        drafts: list[list[int]] = [[] for _ in ks]
        left = [min(space, PER_TOKEN * (k + 1)) if k else 0 for k, space in zip(ks, room, strict=True)]
        least = [row.request.confidence if row.request.draft_length == "confidence" else 0.0 for row in rows]
        stopped = [NEVER] * len(ks)
        while True:
            with alone(logits.numel()):
                values, ids = likeliest(logits[:, 0].float().softmax(-1))
                table = torch.stack([ids.double(), values.double()]).tolist()
            tokens = [int(token) for token in table[0]]
            for b, (token, prob) in enumerate(zip(tokens, table[1], strict=True)):
                if not left[b]:
                    continue
                left[b] -= 1
                if prob < least[b]:
                    left[b], stopped[b] = 0, prob
                elif token in self._to_target and prob > 0:
                    drafts[b].append(self._to_target[token])
                    left[b] = 0
                elif token in draft.spelled and prob > 0:
                    written[b] += draft.bytes_of(token)
                    drafts[b], sure = re_encode(target, behind[b], written[b])
                    if sure >= ks[b]:
                        left[b] = 0
                else:  # it ends, or its logits are not numbers
                    left[b] = 0
                    self._sound = self._sound & (prob > 0)
            goes_on = [space > 0 for space in left]
            if not any(goes_on):
                break
            for fed, token, go in zip(self._fed, tokens, goes_on, strict=True):
                if go:
                    fed.append(token)
            logits = self.runner.forward(
                upload([[token] for token in tokens], self.runner.logits_device), [int(go) for go in goes_on]
            )
        found = Proposal.of_lists([d[:k] for d, k in zip(drafts, ks, strict=True)], self._context.device, reasons)
        if any(least):
            found.stopped = upload(stopped, self._context.device, torch.float32)
        return found


def _join(chain: Proposal, text: Proposal) -> Proposal:
    """One proposal of rows that have drafts in either; what comes from text is one-hot."""
    assert chain.q is not None
    width = max(chain.ids.shape[1], text.ids.shape[1])
    ids = chain.ids.new_zeros(chain.ids.shape[0], width)
    q = chain.q.new_zeros(chain.ids.shape[0], width, chain.q.shape[-1])
    for b, count in enumerate(text.counts.tolist()):
        part = text if count else chain
        ids[b, : part.ids.shape[1]] = part.ids[b]
        if count:
            q[b].scatter_(1, ids[b, :, None], 1.0)
        else:
            q[b, : chain.q.shape[1]] = chain.q[b]
    stopped = [part.stopped for part in (chain, text) if part.stopped is not None]
    return Proposal(
        ids,
        chain.counts + text.counts,
        q,
        reasons=chain.reasons,
        stopped=torch.stack(stopped).amin(0) if stopped else None,
        sound=chain.sound,
    )
