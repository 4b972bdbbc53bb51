"""What a caller asks for: frozen, validated at the edge, and written into every run as JSON.

Validation here needs no model. What depends on one (context length, vocabulary) is checked by the engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decoder.errors import RequestError

MAX_K = 64
MAX_NEW_TOKENS = 32_768
MAX_SUFFIX_DEPTH = 128

PROPOSERS = (
    "none",
    "draft-model",
    "eagle3",
    "eagle",
    "mtp",
    "medusa",
    "ngram",
    "suffix",
    "prediction",
    "early-exit",
)
"""Names of the proposers that this version can run (design.md fixes them)."""


TREES = ("chain", "static", "dynamic")
"""Shapes of a draft."""


DRAFT_LENGTHS = ("fixed", "confidence", "moving-average", "auto")
"""Who decides how many of at most k tokens are drafted."""

WITHOUT_PROBABILITIES = ("ngram", "suffix", "prediction")
"""Proposers that look tokens up: there is nothing that could be unsure."""


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number, not {value!r}")
    if value < low or value > high or (open_low and value == low):
        bound = "above" if open_low else "at least"
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise RequestError(f"{name} must be {bound} {low:g}{upper}, not {value!r}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:,} and {high:,}, not {value:,}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from logits; applied to target and draft alike.

    ``temperature`` 0 is greedy (argmax after bias and penalties). ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch
    those filters off. ``repetition_penalty`` (1 = off) counts prompt and output, ``presence_penalty`` and
    ``frequency_penalty`` (0 = off) count the output only, as OpenAI and vLLM do. ``logit_bias`` maps token ids to
    an addend in logits. ``seed`` fixes every random draw of the run.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True when tokens are chosen by argmax."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True when a row's own history changes its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self) -> None:
        """Raise RequestError on the first value that is out of range."""
        _number("temperature", self.temperature, 0, 100)
        _integer("top-k", self.top_k, 0, 10_000_000)
        _number("top-p", self.top_p, 0, 1, open_low=True)
        _number("min-p", self.min_p, 0, 1)
        _number("repetition penalty", self.repetition_penalty, 0, 100, open_low=True)
        _number("presence penalty", self.presence_penalty, -100, 100)
        _number("frequency penalty", self.frequency_penalty, -100, 100)
        _integer("seed", self.seed, 0, 2**63 - 1)
        for entry in self.logit_bias:
            if len(entry) != 2:
                raise RequestError(f"logit bias takes pairs of token id and bias, not {entry!r}")
            _integer("logit bias token id", entry[0], 0, 2**31 - 1)
            _number("logit bias", entry[1], -1000, 1000)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: what to say to which target, and who drafts.

    ``chat`` puts ``prompt`` (and ``system_prompt``: None = the template's own default, "" = an empty one) through
    the tokenizer's chat template; otherwise the prompt is raw text. ``k`` is the draft length in tokens, or the most of
    them: with ``draft_length`` "confidence" a draft ends where its likeliest next token has less than the probability
    ``confidence``, with "moving-average" it follows what was accepted, with "auto" what takes the least measured time
    per token (see ``decoder/lengths.py``). ``draft``
    None lets a proposer that needs a draft take one that is here and fits; where none does, the run says so and decodes
    plainly. ``tree`` lets a head draft a tree instead of a chain, where one row decodes alone: "static" has a fixed
    shape, "dynamic" grows where the head is sure; k is its depth, ``tree_nodes`` the most tokens in it, ``tree_width``
    the most that follow one token.
    ``ngram_min``/``ngram_max`` are the sizes that prompt lookup tries. ``suffix_depth``, ``suffix_factor`` and
    ``suffix_min_prob`` are vLLM's suffix_decoding_max_tree_depth, _max_spec_factor and _min_token_prob;
    ``suffix_earlier`` also drafts from earlier runs that the caller hands over. ``prediction`` is the text that the
    caller expects, ``exit_layer`` the number of target layers that early exit drafts with (0 = a quarter of them).
    ``stop`` strings end the text and are not part of it; ``stop_ids`` end it like EOS.
    """

    prompt: str
    chat: bool = True
    system_prompt: str | None = None
    target: str = "smollm2-135m"
    proposer: str = "none"
    draft: str | None = None
    k: int = 4
    draft_length: str = "fixed"
    confidence: float = 0.4
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tree: str = "chain"
    tree_nodes: int = 16
    tree_width: int = 4
    ngram_min: int = 1
    ngram_max: int = 4
    suffix_depth: int = 24
    suffix_factor: float = 1.0
    suffix_min_prob: float = 0.1
    suffix_earlier: bool = False
    prediction: str | None = None
    exit_layer: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def validate(self) -> None:
        """Raise RequestError with one sentence on the first thing that cannot be run."""
        self._check_types()
        if not self.prompt.strip():
            raise RequestError("the prompt is empty: write something for the target to answer or continue")
        if self.proposer not in PROPOSERS:
            raise RequestError(f"unknown proposer {self.proposer!r}: choose one of {', '.join(PROPOSERS)}")
        _integer("k (draft length)", self.k, 1, MAX_K)
        self._check_length()
        _integer("max new tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS)
        if self.tree not in TREES:
            raise RequestError(f"unknown tree {self.tree!r}: choose one of {', '.join(TREES)}")
        _integer("tree nodes", self.tree_nodes, 2, 256)
        _integer("tree width", self.tree_width, 1, 32)
        _integer("n-gram minimum", self.ngram_min, 1, 64)
        _integer("n-gram maximum", self.ngram_max, self.ngram_min, 64)
        _integer("suffix depth", self.suffix_depth, 2, MAX_SUFFIX_DEPTH)
        _number("suffix factor", self.suffix_factor, 0, 64, open_low=True)
        _number("suffix least probability", self.suffix_min_prob, 0, 1)
        _integer("exit layer", self.exit_layer, 0, 10_000)
        if self.proposer == "prediction" and not (self.prediction or "").strip():
            raise RequestError("prediction needs the text that you expect the answer to contain")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("a stop string must not be empty")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise RequestError(f"unknown dtype {self.dtype!r}: auto, float32, bfloat16 or float16")
        self.sampling.validate()

    def _check_length(self) -> None:
        if self.draft_length not in DRAFT_LENGTHS:
            raise RequestError(f"unknown draft length {self.draft_length!r}: choose one of {', '.join(DRAFT_LENGTHS)}")
        _number("confidence", self.confidence, 0, 1)
        if self.draft_length == "confidence" and self.proposer in WITHOUT_PROBABILITIES:
            raise RequestError(
                f"{self.proposer} looks its drafts up and has no confidence in them: "
                "choose fixed, moving-average or auto"
            )
        if self.draft_length == "confidence" and self.tree != "chain":
            raise RequestError("confidence ends chains: a dynamic tree already grows where its head is sure")

    def _check_types(self) -> None:
        for name in ("prompt", "target", "proposer", "draft_length", "tree", "dtype", "device"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"{name.replace('_', ' ')} must be text, not {getattr(self, name)!r}")
        for name in ("system_prompt", "draft", "prediction"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"{name.replace('_', ' ')} must be text, not {getattr(self, name)!r}")
        for name in ("chat", "ignore_eos", "suffix_earlier"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name.replace('_', ' ')} must be true or false, not {getattr(self, name)!r}")
        for token in self.stop_ids:
            _integer("stop id", token, 0, 2**31 - 1)

    def baseline(self) -> GenerationRequest:
        """The same generation with the proposer off: the only fair thing to measure a speed-up against."""
        return self.replace(
            proposer="none",
            draft_length="fixed",
            confidence=0.4,
            draft=None,
            prediction=None,
            exit_layer=0,
            tree="chain",
            tree_nodes=16,
            tree_width=4,
            ngram_min=1,
            ngram_max=4,
            suffix_depth=24,
            suffix_factor=1.0,
            suffix_min_prob=0.1,
            suffix_earlier=False,
        )

    def replace(self, **changes: Any) -> GenerationRequest:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict; ``from_json`` reads it back unchanged."""
        raw = dataclasses.asdict(self)
        raw["stop"] = list(self.stop)
        raw["stop_ids"] = list(self.stop_ids)
        raw["sampling"]["logit_bias"] = [list(pair) for pair in self.sampling.logit_bias]
        return raw

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GenerationRequest:
        """Read what ``to_json`` wrote. Unknown fields are refused; missing ones take their default."""
        if not isinstance(data, Mapping):
            raise RequestError("a request must be a JSON object")
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise RequestError(f"unknown field {unknown[0]!r} in the request")
        if "prompt" not in data:
            raise RequestError("the request has no prompt")
        values = dict(data)
        raw_sampling = values.pop("sampling", {})
        if not isinstance(raw_sampling, Mapping):
            raise RequestError("sampling must be a JSON object")
        sampling = dict(raw_sampling)
        unknown = sorted(set(sampling) - {f.name for f in dataclasses.fields(SamplingParams)})
        if unknown:
            raise RequestError(f"unknown field {unknown[0]!r} in the request's sampling")
        try:
            sampling["logit_bias"] = tuple((i, b) for i, b in sampling.get("logit_bias", ()))
            values["stop"] = tuple(values.get("stop", ()))
            values["stop_ids"] = tuple(values.get("stop_ids", ()))
        except (TypeError, ValueError) as error:
            raise RequestError(f"logit_bias, stop and stop_ids must be lists ({error})") from None
        request = cls(sampling=SamplingParams(**sampling), **values)
        request.validate()
        return request
