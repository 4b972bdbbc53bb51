"""What a proposer is: it drafts tokens for B rows; the engine knows nothing about who proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decoder.request import GenerationRequest
from decoder.sampling import Draws, Sampler
from decoder.target import Runner
from decoder.transfer import upload


@dataclass(slots=True)
class Row:
    """One request that is being decoded. ``tokens`` are prompt and output; only the engine appends to them."""

    request: GenerationRequest
    tokens: list[int]
    prompt_length: int
    sampler: Sampler
    draws: Draws

    @property
    def emitted(self) -> int:
        """How many tokens were emitted so far; ``tokens[prompt_length:]`` are they (a copy: not for every step)."""
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Context:
    """What a proposer is given at the start of a run. The engine takes rows that have finished out of ``rows``."""

    target: Runner
    rows: list[Row]
    vocab_size: int
    device: str


@dataclass(slots=True)
class Proposal:
    """Drafts for B rows, at most K each.

    ``ids`` [B, K] (padding behind a row's count), ``counts`` [B] drafts per row (both on the device). ``q``
    [B, K, V]: the distribution each draft was drawn from (when greedy: the draft's softmax, to be shown), or None for
    a proposer without probabilities (one-hot). ``scores`` [B, K, V] may stand in its place where all rows are greedy:
    processed logits, whose softmax is made when the trace is written. ``parents`` makes a row's drafts a tree (only
    B = 1). ``reasons[b]`` says why row b has no draft. ``stopped`` [B] comes from ``Confidence`` (below), ``sound``
    [B] is False for rows in whose drafting something was not a number.
    """

    ids: Tensor
    counts: Tensor
    q: Tensor | None = None
    scores: Tensor | None = None
    parents: Sequence[int | None] | None = None
    reasons: list[str | None] = field(default_factory=list)
    stopped: Tensor | None = None
    sound: Tensor | None = None

    @classmethod
    def of_lists(cls, drafts: Sequence[Sequence[int]], device: str, reasons: Sequence[str | None]) -> Proposal:
        """A proposal without probabilities from plain lists of ids."""
        width = max((len(d) for d in drafts), default=0)
        ids = upload([[*d, *[0] * (width - len(d))] for d in drafts], device)
        return cls(ids, upload([len(d) for d in drafts], device), reasons=list(reasons))


class Proposer(ABC):
    """Drafts for the rows of one run at a time. One instance serves many runs, one after the other.

    A round is ``propose``, the target's verification, ``commit``; then rows that have finished leave (``select``).

    How long to draft is decided outside (``decoder/lengths.py``), except for requests with ``draft_length``
    "confidence", which stop within a round: a proposer with probabilities asks ``confidence.Confidence`` before it
    draws each token, and hands ``stopped`` over with its proposal. ``chain.draft_chain`` does all of this: whoever
    drafts through it need not think of it, except that ``step`` may be called less often than k - 1 times.
    """

    name: str = ""
    capture: tuple[int, ...] = ()
    """Hidden states of the target that it reads (see ``Runner.capture``), from the prompt's pass on."""

    @abstractmethod
    def begin(self, context: Context) -> None:
        """Start a run, at the beginning of its first round and on its clock.

        The rows hold their prompts and the first token of their answers, which the prefill gave (rows that it ended
        are gone); ``context.target.captured`` is that of the prompt's pass.
        """

    @abstractmethod
    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        """Draft up to ``ks[b]`` tokens behind ``rows[b].tokens``; ``u`` [B, max(ks)] are the draws to use.

        Some ``ks`` may be 0 (such a row has a count of 0); where all are, it is not called.
        """

    def commit(self, paths: Sequence[Sequence[int]]) -> None:  # noqa: B027 (most keep nothing to roll back)
        """Row b kept the drafts ``paths[b]`` (indices into its proposal: 0, 1, ... for a chain; nodes for a tree); its
        ``tokens`` already hold them and the target's own token. ``target.captured`` is still the verifying pass's.
        Called after every round, also one in which nothing was asked for."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027 (some keep nothing per row)
        """Only ``rows`` (increasing indices) go on; whatever is kept per row follows. ``context.rows``, the target's
        cache and its ``captured`` states have been changed already."""

    def remember(self, runs: Sequence[Sequence[int]]) -> str:
        """Token ids of earlier runs that it may draft from; says what it keeps of them, "" when nothing."""
        return ""

    def path(self) -> str:
        """Which implementation drafts, for the record of a run; "" when there is no model in it."""
        return ""
