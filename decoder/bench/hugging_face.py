"""transformers' own ``generate`` as variants: plain, assisted, prompt lookup, early exit.

The same weights in the same process. Its time is taken from outside: a streamer is told of every round's tokens, so
the clock runs from the first emission to the last, as for ours; the prefill is in neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decoder import loading
from decoder.bench.measure import Case, Report, Sample, Variant, VariantName
from decoder.bench.plan import BenchPlan
from decoder.bench.round_times import rounds_between

PLAIN, ASSISTED, LOOKUP, EXIT = "generate", "assisted", "prompt lookup", "early exit"


class RoundTimer:
    """A streamer: notes when tokens arrive and how many. The prompt, which comes first, is not counted."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate`` with new token ids, the prompt first."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if value.numel():
            self.rounds.append((time.perf_counter(), int(value.numel())))

    def end(self) -> None:
        """Called once at the end."""


class HuggingFaceVariant(Variant):
    """One way of ``generate``. ``model`` and ``assistant`` may be given (tests, synthetic models)."""

    def __init__(
        self,
        kind: str,
        k: int = 0,
        *,
        target: str = "",
        draft: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        exit_layer: int = 0,
        model: Any = None,
        assistant: Any = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(VariantName("transformers", kind, k))
        self.kind, self.k, self.exit_layer = kind, k, exit_layer
        self._target, self._draft, self._dtype, self._device = target, draft, dtype, device
        self.model, self.assistant, self.eos_ids = model, assistant, eos_ids

    def start(self, report: Report) -> None:
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()
        if self.model is None:
            loaded = loading.load(self._target, self._dtype, self._device, report)
            self.model, self.eos_ids = loaded.model, loaded.eos_ids
        if self.kind == ASSISTED and self.assistant is None:
            if not self._draft:
                raise loading.ModelError(f"no draft that is here was made for {self._target}")
            self.assistant = loading.load(self._draft, self._dtype, self._device, report, role="draft").model

    def measure(self, case: Case, repeat: int) -> Sample:
        from transformers import GenerationConfig

        options: dict[str, Any] = {}
        if self.kind == LOOKUP:
            options["prompt_lookup_num_tokens"] = self.k
        if self.kind == EXIT:
            options["assistant_early_exit"] = self.exit_layer
        eos = [] if case.request.ignore_eos else sorted(self.eos_ids)
        config = GenerationConfig(
            max_new_tokens=case.tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **options,
        )
        ids = torch.tensor([list(case.ids)], device=self.model.device)
        timer = RoundTimer()
        drafter = self.assistant if self.kind == ASSISTED else self.model
        with torch.inference_mode(), fixed_draft_length(drafter, self.k), own_defaults_only(self.model):
            begin = time.perf_counter()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=timer,
                **({"assistant_model": self.assistant} if self.kind == ASSISTED else {}),
            )
        first, last = timer.rounds[0][0], timer.rounds[-1][0]
        tokens = sum(count for _, count in timer.rounds[1:])
        ms = 1000 * (last - first)
        if repeat >= 0:
            self.rounds += rounds_between(timer.rounds)
        return Sample(
            variant=self.name.key,
            suite=case.suite,
            prompt=case.id,
            repeat=repeat,
            tokens=tokens,
            decode_ms=ms,
            wall_ms=ms,
            ttft_ms=1000 * (first - begin),
            rounds=len(timer.rounds) - 1,
            path="generate",
        )


@contextmanager
def fixed_draft_length(model: Any, k: int) -> Iterator[None]:
    """Always ``k`` draft tokens: no schedule, no confidence threshold. The model's own settings come back after."""
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    config = model.generation_config
    before = {name: getattr(config, name, None) for name in names}
    if k:
        for name, value in zip(names, (k, "constant", 0.0), strict=True):
            setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextmanager
def own_defaults_only(model: Any) -> Iterator[None]:
    """Keep a checkpoint's own sampling settings (temperature, penalties) out of a greedy measurement."""
    from transformers import GenerationConfig

    before = model.generation_config
    plain = GenerationConfig()
    for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
        setattr(plain, name, getattr(before, name, None))
    model.generation_config = plain
    try:
        yield
    finally:
        model.generation_config = before


def hugging_face_variants(plan: BenchPlan, draft: str | None, exit_layer: int) -> list[HuggingFaceVariant]:
    """transformers' plain decoding and its speculations that match the plan's proposers, at one k."""
    if not plan.transformers:
        return []
    common: dict[str, Any] = {"target": plan.target, "dtype": plan.dtype, "device": plan.device}
    found = [HuggingFaceVariant(PLAIN, **common)]
    if "draft-model" in plan.proposers:
        found.append(HuggingFaceVariant(ASSISTED, plan.their_k, draft=draft, **common))
    if "ngram" in plan.proposers:
        found.append(HuggingFaceVariant(LOOKUP, plan.their_k, **common))
    if "early-exit" in plan.proposers:
        found.append(HuggingFaceVariant(EXIT, plan.their_k, exit_layer=exit_layer, **common))
    return found
