"""Long texts: 6,000 tokens of context with every proposer; of a step's work only attention grows with the text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, SupportsIndex

import pytest
import torch
from transformers import GenerationConfig

from decoder.rounds import Decoding
from decoder.text import Answer, TextStream, TokenText
from decoder.trace import violations
from tests import heads
from tests.decoder.every_proposer import EVERY, HEADS, every_decoder, request_for
from tests.tiny import PATHS, tiny_llama, tiny_tokenizer
from tests.toys import ToyTokenizer

CONTEXT = 8192
TOKENS = 6000
NEW = 24


@lru_cache
def long_prompt() -> str:
    """6,000 tokens: prose that repeats itself with changes, so that look-ups find something."""
    sentences = (
        f"The quick brown fox number {i % 37} jumps over the lazy dog. def f{i}(x): return x + {i}\n"
        for i in range(400)
    )
    ids = tiny_tokenizer()("".join(sentences))["input_ids"]
    assert len(ids) > TOKENS
    return str(tiny_tokenizer().decode(ids[:TOKENS]))


@lru_cache
def expected(head: bool) -> list[int]:
    """transformers' own greedy output behind the long prompt."""
    model = heads.predictable() if head else tiny_llama()
    ids = torch.tensor([tiny_tokenizer()(long_prompt())["input_ids"]])
    assert ids.shape[1] >= TOKENS - 10
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        full = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return list(full[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    ("key", "path"),
    [(key, path) for path in PATHS for key in EVERY if path in PATHS[:2] or key in ("none", "draft-model, copy")],
)
def test_six_thousand_tokens_of_context(key: str, path: str) -> None:
    decoder = every_decoder(key, path, CONTEXT)
    if key in HEADS and hasattr(decoder.proposer, "runner"):
        decoder.proposer.runner.context = CONTEXT  # the synthetic checkpoints say less
    right = expected(key in HEADS)
    guess = tiny_tokenizer().decode(right[2:20])
    run = decoder.run(request_for(key, long_prompt(), k=4, max_new_tokens=NEW, ignore_eos=True, prediction=guess))
    assert len(run.prompt_ids) >= TOKENS - 10
    assert list(run.output_ids) == right
    assert violations(run) == []
    if key in ("early-exit", "draft-model, copy", *HEADS):
        assert run.metrics["num_draft_tokens"] > 0


class Counting(list[int]):
    """A text that counts how many of its tokens are looked at or copied."""

    touched = 0

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        found = super().__getitem__(at)
        Counting.touched += len(found) if isinstance(at, slice) else 1  # type: ignore[arg-type]
        return found

    def __iter__(self) -> Iterator[int]:
        Counting.touched += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        Counting.touched += len(self)
        return super().__add__(other)


@pytest.mark.parametrize("key", EVERY)
def test_a_step_looks_at_what_is_new_not_at_the_whole_text(key: str) -> None:
    decoder = every_decoder(key, "fused", CONTEXT)
    prompt = long_prompt()[:6000]
    request = request_for(
        key, prompt, k=4, max_new_tokens=60, ignore_eos=True, stop=("never said",), draft_length="moving-average"
    )
    decoding = Decoding(decoder, [request])
    decoding.prefill(0.0)
    row = decoding.states[0].row
    assert len(row.tokens) > 1500
    decoding.step()
    row.tokens = Counting(row.tokens)
    for _ in range(6):
        Counting.touched = 0
        decoding.step()
        assert Counting.touched < 60, key


def test_the_text_of_an_answer_costs_what_is_added() -> None:
    """Neither decoding a token nor looking for a stop string reads the text from its beginning."""
    longest = 0

    class Watched(ToyTokenizer):
        def decode(self, ids: Any, **options: object) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, **options)

    text = TextStream(TokenText(Watched()), [1, 2, 3] * 1000)
    answer = Answer(reach=5)
    for i in range(2000):
        answer.take(text.push(i % 26))
        assert len(answer.tail) <= 5
    assert longest < 40
    assert str(answer) == "".join("abcdefghijklmnopqrstuvwxyz"[i % 26] for i in range(2000))
    answer.take("!", removed=3)
    assert str(answer).endswith("stu!")
    assert len(str(answer)) == 1998
