"""Every proposer there is, built around a tiny target. What all of them must survive is tested by going through these:
a new proposer is one more line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoder.engine import SpeculativeDecoder
from decoder.proposers.base import Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.proposers.other_vocabulary import OtherVocabularyProposer
from decoder.proposers.prediction import PredictionProposer
from decoder.proposers.suffix import SuffixProposer
from decoder.request import GenerationRequest, SamplingParams
from decoder.target import RowRunner
from tests import heads
from tests.spellings import shared, small_tokenizer
from tests.tiny import CONTEXT, runner, runner_of, tiny_decoder, tiny_tokenizer

Build = Callable[[RowRunner, str, int], Proposer | None]
"""The target's runner, the path that it is on, and its context -> a proposer that fits it."""


def _encode(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


EVERY: dict[str, Build] = {
    "none": lambda target, path, context: None,
    "ngram": lambda target, path, context: NgramProposer(),
    "suffix": lambda target, path, context: SuffixProposer(),
    "prediction": lambda target, path, context: PredictionProposer(_encode),
    "early-exit": lambda target, path, context: EarlyExitProposer(target, 3, 2),
    "draft-model, poor": lambda target, path, context: DraftModelProposer(
        runner(seed=1, layers=1, path=path, context=context)
    ),
    "draft-model, copy": lambda target, path, context: DraftModelProposer(runner(path=path, context=context)),
    "draft-model, other vocabulary": lambda target, path, context: OtherVocabularyProposer(
        runner(seed=1, layers=1, vocab_size=len(small_tokenizer()), path=path, context=context),
        shared(tiny_tokenizer(), small_tokenizer()),
    ),
}
"""Proposer's name, and what tells two of one name apart behind a comma."""

HEADS = ("eagle", "eagle3", "mtp", "medusa")
"""Heads are made for one target, another than the others': their builders are in ``tests/heads.py``."""
EVERY |= {name: (lambda target, path, context, name=name: heads.tiny_head(name)) for name in HEADS}

WITH_PROBABILITIES = ("early-exit", "draft-model, poor", "draft-model, copy", *HEADS)
"""Those whose drafts come with the distribution that they were drawn from."""


def every_decoder(key: str, path: str, context: int = CONTEXT) -> SpeculativeDecoder:
    """A decoder with that proposer, all of it in float32."""
    target = runner_of(heads.predictable(), context, path) if key in HEADS else runner(path=path, context=context)
    return tiny_decoder(EVERY[key](target, path, context), target)


def request_for(key: str, prompt: str, **changes: Any) -> GenerationRequest:
    """A raw request for that proposer; names of sampling parameters go to the sampling parameters."""
    names = set(SamplingParams.__dataclass_fields__)
    sampling = {k: v for k, v in changes.items() if k in names}
    rest: dict[str, Any] = {"prediction": prompt, **{k: v for k, v in changes.items() if k not in names}}
    return GenerationRequest(
        prompt, chat=False, proposer=key.split(",")[0], sampling=SamplingParams(**sampling), **rest
    )
