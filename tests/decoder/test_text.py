"""Text that grows token by token: pieces join to the text, characters over several tokens stay whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.errors import ModelError
from decoder.request import GenerationRequest
from decoder.text import TextStream, TokenText, encode_prompt
from tests.tiny import tiny_tokenizer

TOKENS = TokenText(tiny_tokenizer())


def pieces(ids: list[int]) -> list[str]:
    stream = TextStream(TOKENS, [5, 6, 7])
    found = [stream.push(i) for i in ids]
    return [*found, stream.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_pieces_of_any_text_join_to_it(text: str) -> None:
    ids = tiny_tokenizer()(text)["input_ids"]
    assert "".join(pieces(ids)) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 383), max_size=40))
def test_pieces_of_any_ids_join_to_what_the_tokenizer_decodes(ids: list[int]) -> None:
    ids = [i for i in ids if i < len(tiny_tokenizer())]
    assert "".join(pieces(ids)) == tiny_tokenizer().decode(ids)


def test_a_character_over_several_tokens_comes_with_its_last_one() -> None:
    ids = tiny_tokenizer()("🚀")["input_ids"]
    assert len(ids) > 1
    assert pieces(ids) == [""] * (len(ids) - 1) + ["🚀", ""]


def test_half_a_character_at_the_end_is_flushed_once() -> None:
    ids = tiny_tokenizer()("🚀")["input_ids"][:-1]
    assert "".join(pieces(ids)) == "\ufffd"


def test_labels_show_bytes_that_are_no_character() -> None:
    ids = tiny_tokenizer()("🚀")["input_ids"]
    assert TOKENS.label(ids[0]).startswith("\\x")
    assert TOKENS.label(tiny_tokenizer()(" ")["input_ids"][0]) == " "
    assert TOKENS.label(0) == "<|end|>"
    assert TOKENS.label(10**6) == "<1000000>"


def test_chat_template_and_system_prompt() -> None:
    tokenizer = tiny_tokenizer()
    plain = encode_prompt(GenerationRequest("hello"), tokenizer, "tiny")
    assert tokenizer.decode(plain) == "user: hello\nassistant: "
    system = encode_prompt(GenerationRequest("hello", system_prompt="be kind"), tokenizer, "tiny")
    assert tokenizer.decode(system).startswith("system: be kind\n")
    empty = encode_prompt(GenerationRequest("hello", system_prompt=""), tokenizer, "tiny")
    assert tokenizer.decode(empty).startswith("system: \n")
    raw = encode_prompt(GenerationRequest("hello", chat=False), tokenizer, "tiny")
    assert tokenizer.decode(raw) == "hello"


def test_a_template_that_refuses_is_a_sentence() -> None:
    tokenizer = tiny_tokenizer(300, "another text for another tokenizer")
    tokenizer.chat_template = "{{ raise_exception('no system prompts here') }}"
    with pytest.raises(ValueError, match="no system prompts here"):
        encode_prompt(GenerationRequest("hello"), tokenizer, "tiny")
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        encode_prompt(GenerationRequest("hello"), tokenizer, "tiny")
