"""What a proposer is: it drafts tokens for B rows; the engine knows nothing about who proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoder.request import GenerationRequest
from decoder.sampling import Draws, Sampler
from decoder.target import Runner


@dataclass(slots=True)
class Row:
    """One request that is being decoded. ``tokens`` are prompt and output; only the engine appends to them."""

    request: GenerationRequest
    tokens: list[int]
    prompt_length: int
    sampler: Sampler
    draws: Draws

    @property
    def output(self) -> list[int]:
        """Tokens that were emitted so far."""
        return self.tokens[self.prompt_length :]


@dataclass(slots=True)
class Context:
    """What a proposer is given at the start of a run."""

    target: Runner
    rows: list[Row]
    vocab_size: int
    device: str


@dataclass(slots=True)
class Proposal:
    """Drafts for B rows, at most K each.

    ``ids`` [B, K] (padding behind a row's count), ``counts`` [B] drafts per row (both on the device). ``q``
    [B, K, V]: the distribution each draft was drawn from (when greedy: the draft's softmax, to be shown), or None for
    a proposer without probabilities (one-hot). ``parents`` makes a row's drafts a tree (only B = 1). ``reasons[b]``
    says why row b has no draft.
    """

    ids: Tensor
    counts: Tensor
    q: Tensor | None = None
    parents: Sequence[int | None] | None = None
    reasons: list[str | None] = field(default_factory=list)

    @classmethod
    def of_lists(cls, drafts: Sequence[Sequence[int]], device: str, reasons: Sequence[str | None]) -> Proposal:
        """A proposal without probabilities from plain lists of ids."""
        width = max((len(d) for d in drafts), default=0)
        ids = torch.zeros(len(drafts), width, dtype=torch.long)
        for row, draft in enumerate(drafts):
            ids[row, : len(draft)] = torch.tensor(list(draft), dtype=torch.long)
        counts = torch.tensor([len(d) for d in drafts])
        return cls(ids.to(device), counts.to(device), reasons=list(reasons))


class Proposer(ABC):
    """Drafts for the rows of one run at a time. One instance serves many runs, one after the other."""

    name: str = ""
    capture: tuple[int, ...] = ()
    """Hidden states of the target that it reads (see ``Runner.capture``), from the prompt's pass on."""

    @abstractmethod
    def begin(self, context: Context) -> None:
        """Start a run: the rows hold their prompts and the token that the prefill gave is appended before
        ``propose`` is called for the first time."""

    @abstractmethod
    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        """Draft up to ``ks[b]`` tokens behind ``rows[b].tokens``; ``u`` [B, max(ks)] are the draws to use."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:  # noqa: B027 (most keep nothing to roll back)
        """Row b kept the drafts ``paths[b]`` (indices into its proposal: 0, 1, ... for a chain; nodes for a tree); its
        ``tokens`` already hold them and the target's own token. ``target.captured`` is still the verifying pass's.
        Called after every round, also one in which nothing was asked for."""

    def remember(self, runs: Sequence[Sequence[int]]) -> str:
        """Token ids of earlier runs, likeliest to be of use first, for a proposer that drafts from them. Says what it
        kept of them, for the record of a run; "" when it has no use for them."""
        return ""

    def path(self) -> str:
        """Which implementation drafts, for the record of a run; "" when there is no model in it."""
        return ""
