"""Toy models for unit tests: a table in the place of a network, a tokenizer of letters, proposers that recite.

``TableRunner`` keeps a cache of token ids the way the real runner keeps keys and values, so that a wrong rollback or a
wrong position shows up as a wrong prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoder.engine import SpeculativeDecoder, Target
from decoder.proposers.base import Context, Proposal, Proposer
from decoder.request import GenerationRequest, SamplingParams

Rows = Callable[[tuple[int, ...]], Sequence[float]]
"""prefix ids -> logits [V]"""


class ToyTokenizer:
    """Token i is the i-th of ``words``; prompts are split at every character that is a word."""

    chat_template = None
    eos_token_id = None
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, words: Sequence[str] = "abcdefghijklmnopqrstuvwxyz") -> None:
        self.words = list(words)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self.words.index(c) for c in text]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(self.words[i] for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.words[token]

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


class TableRunner:
    """A Runner whose logits are a function of the exact prefix that its cache holds."""

    device = logits_device = "cpu"
    capture: tuple[int, ...] = ()
    captured: torch.Tensor | None = None

    def __init__(self, rows: Rows, vocab_size: int, context: int = 4096) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.context = context
        self.lengths: list[int] = []
        self.slots: list[list[int]] = []
        self.passes: list[tuple[int, int]] = []
        """(rows, width) of every forward pass."""

    def reset(self, batch: int) -> None:
        self.lengths = [0] * batch
        self.slots = [[] for _ in range(batch)]

    def forward(
        self,
        ids: Tensor,
        counts: Sequence[int] | None = None,
        *,
        last: bool = False,
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        batch, width = ids.shape
        self.passes.append((batch, width))
        counts = [width] * batch if counts is None else list(counts)
        logits = torch.zeros(batch, width, self.vocab_size)
        for b in range(batch):
            start = self.lengths[b]
            kept = self.slots[b][:start]
            new = [int(i) for i in ids[b]]
            self.slots[b] = kept + new
            for t in range(width):
                if parents is None:
                    prefix = kept + new[: t + 1]
                else:
                    chain: list[int] = []
                    node: int | None = t - 1 if t else None
                    while node is not None:
                        chain.insert(0, new[node + 1])
                        node = parents[node]
                    prefix = [*kept, new[0], *chain]
                logits[b, t] = torch.tensor(list(self.rows(tuple(prefix))))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if not last:
            return logits
        return torch.stack([logits[b, max(counts[b] - 1, 0)] for b in range(batch)])[:, None]

    def rollback(self, lengths: Sequence[int]) -> None:
        for before, after in zip(self.lengths, lengths, strict=True):
            assert after <= before, "a rollback never lengthens"
        self.lengths = list(lengths)

    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        kept = [self.slots[row][start + node] for node in nodes]
        self.slots[row][start : start + len(nodes)] = kept
        self.lengths[row] = start + len(nodes)

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) == sorted(set(rows)), "rows stay in their order"
        self.slots = [self.slots[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]

    def wipe(self, row: int) -> None:
        self.slots[row] = [0] * len(self.slots[row])

    def cached(self, row: int = 0) -> list[int]:
        """The ids that the cache holds for a row."""
        return self.slots[row][: self.lengths[row]]


class Recite(Proposer):
    """Proposes what ``script(tokens, k)`` says; without probabilities, or with the rows of ``q``."""

    name = "recite"

    def __init__(
        self,
        script: Callable[[list[int], int], Sequence[int]],
        parents: Callable[[int], Sequence[int | None]] | None = None,
    ) -> None:
        self.script = script
        self.parents = parents
        self.accepted: list[int] = []

    def begin(self, context: Context) -> None:
        self.context = context

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts = [list(self.script(row.tokens, k)) for row, k in zip(self.context.rows, ks, strict=True)]
        proposal = Proposal.of_lists(drafts, self.context.device, ["the script has nothing"] * len(drafts))
        if self.parents is not None and drafts[0]:
            proposal.parents = list(self.parents(len(drafts[0])))
        return proposal

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.accepted.extend(len(path) for path in paths)


def log(probs: Sequence[float]) -> list[float]:
    """Probabilities -> logits."""
    return torch.tensor(list(probs), dtype=torch.float64).log().tolist()


def toy_decoder(
    rows: Rows,
    vocab_size: int,
    proposer: Proposer | None = None,
    *,
    eos: Sequence[int] = (),
    context: int = 4096,
    tokenizer: ToyTokenizer | None = None,
) -> SpeculativeDecoder:
    """A decoder around a table."""
    target = Target(TableRunner(rows, vocab_size, context), tokenizer or ToyTokenizer(), "toy", frozenset(eos))
    return SpeculativeDecoder(target, proposer)


def ask(prompt: str = "a", *, proposer: str = "ngram", **changes: object) -> GenerationRequest:
    """A raw request; ``temperature`` and the other sampling names go to the sampling parameters."""
    names = set(SamplingParams.__dataclass_fields__)
    sampling = {k: v for k, v in changes.items() if k in names}
    rest = {k: v for k, v in changes.items() if k not in names}
    return GenerationRequest(prompt, chat=False, proposer=proposer, sampling=SamplingParams(**sampling), **rest)  # type: ignore[arg-type]
