"""What the synthetic bench times: a random model, what drafts for it, what it writes by itself behind one prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from decoder.assemble import new_runner
from decoder.bench.measure import Case
from decoder.bench.random_models import Shape, build, loaded, random_head, truncated
from decoder.engine import SpeculativeDecoder, Target
from decoder.fused import FusedRunner
from decoder.proposers.base import Context, Proposal, Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.proposers.prediction import PredictionProposer
from decoder.proposers.suffix import SuffixProposer
from decoder.request import GenerationRequest
from decoder.target import RowRunner


class ReplayProposer(Proposer):
    """Proposes the continuation that the target itself wrote; each token is wrong with probability ``error``."""

    name = "replay"

    def __init__(self, continuation: Sequence[int], error: float, vocab_size: int, seed: int = 1) -> None:
        self.continuation, self.error, self.vocab_size, self.seed = list(continuation), error, vocab_size, seed

    def begin(self, context: Context) -> None:
        self._context = context
        self._random = random.Random(self.seed)

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts = []
        for row, k in zip(self._context.rows, ks, strict=True):
            at = row.emitted
            drafts.append([self.spoilt(token) for token in self.continuation[at : at + k]])
        return Proposal.of_lists(drafts, self._context.device, ["the recorded continuation is over"] * len(drafts))

    def spoilt(self, token: int) -> int:
        """``token``, or another one."""
        return (token + 1) % self.vocab_size if self._random.random() < self.error else token


class Bed:
    """A target of ``shape``, its truncated draft, and ``tokens`` tokens that the target writes plainly and greedily."""

    def __init__(self, shape: Shape, *, device: str, dtype: str, k: int, prompt_tokens: int, tokens: int) -> None:
        self.device, self.dtype = device, dtype
        self.model = build(shape, device, dtype)
        self.draft = truncated(self.model, shape, device, dtype)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        target = loaded(self.model, shape.name, device, dtype)
        self.runner = new_runner(target)
        self.draft_runner = new_runner(loaded(self.draft, f"{shape.name}-draft", device, dtype))
        self._tokenizer, self._name = target.tokenizer, shape.name
        generator = random.Random(1)
        self.ids = tuple(generator.randrange(shape.vocabulary) for _ in range(prompt_tokens))
        self.request = GenerationRequest(
            _text(self.ids), chat=False, target=shape.name, max_new_tokens=tokens, ignore_eos=True, k=k, dtype=dtype,
            device="auto",
        )  # fmt: skip
        self.case = Case("synthetic", shape.name, self.request, self.ids)
        self.continuation = list(self.decoder(None).run(self.request).output_ids)

    @property
    def path(self) -> str:
        """What computes the target's passes, and why not what is fastest."""
        note = getattr(self.runner, "path_note", lambda: None)()
        return f"{self.runner.path} ({note})" if note else self.runner.path

    def decoder(self, proposer: Proposer | None, runner: RowRunner | None = None) -> SpeculativeDecoder:
        """The target with a proposer; ``runner`` may be another one of the same weights."""
        return SpeculativeDecoder(
            Target(runner or self.runner, self._tokenizer, self._name, frozenset(), self.dtype, self._name), proposer
        )

    def eager(self) -> FusedRunner | None:
        """The same weights on the eager lean path, where the target's own runner is on a faster one."""
        if type(self.runner) is FusedRunner or not isinstance(self.runner, FusedRunner):
            return None
        return FusedRunner(self.runner.weights, context=self.runner.context, device=self.device)

    def proposers(self, errors: Sequence[float]) -> dict[str, Proposer]:
        """What is timed: acceptance under control, a draft model, early exit, a look-up that finds nothing."""
        vocabulary = self.runner.vocab_size
        found: dict[str, Proposer] = {
            f"replay, {error:.0%} wrong": ReplayProposer(self.continuation, error, vocabulary) for error in errors
        }
        found["draft-model"] = DraftModelProposer(self.draft_runner)
        found["early-exit"] = EarlyExitProposer(self.runner, int(self.model.config.num_hidden_layers))
        found["ngram"] = NgramProposer()
        return found

    def other_proposers(self, heads: Sequence[str]) -> dict[str, Proposer]:
        """The others that there are: for exactness, not for speed. ``heads`` have random weights."""
        found: dict[str, Proposer] = {"suffix": SuffixProposer(), "prediction": PredictionProposer(_ids)}
        return found | {name: random_head(name, self.model, self.device) for name in heads}

    def prediction(self, error: float) -> str:
        """The continuation with some tokens wrong, as a predicted output."""
        spoiler = ReplayProposer((), error, self.runner.vocab_size)
        spoiler._random = random.Random(2)
        return _text([spoiler.spoilt(token) for token in self.continuation])


def _text(ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids)


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]
