"""Bytes of tokens, text in tokens, and what two vocabularies share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from decoder import vocabulary
from decoder.proposers.draft_text import OPEN, DraftText, look_behind, re_encode
from decoder.vocabulary import SharedVocabulary, Spelling
from tests.spellings import STORY, letters, sentencepiece_like, shared, small_tokenizer, word_pieces
from tests.tiny import tiny_tokenizer

BYTE_LEVEL = [tiny_tokenizer, small_tokenizer]
ALL = [*BYTE_LEVEL, sentencepiece_like]
texts = st.text(st.sampled_from("ab the\n\t. fox🦊灯é1"), max_size=40)


def joined(spelling: Spelling, ids: list[int]) -> bytes:
    return b"".join(spelling.bytes_of(i) for i in ids)


@pytest.mark.parametrize("make", ALL)
def test_encoding_spells_the_text_and_says_where_each_token_ends(make: Any) -> None:
    spelling = Spelling(make())
    for text in (STORY, " leading space", "trailing ", "\n", "🦊", "a", ""):
        encoded = spelling.encode(text.encode())
        assert joined(spelling, encoded.ids) == text.encode()
        assert encoded.whole
        at = 0
        for token, end in zip(encoded.ids, encoded.ends, strict=True):
            at += len(spelling.bytes_of(token))
            assert at == end


@pytest.mark.parametrize("make", BYTE_LEVEL)
def test_byte_level_text_is_split_as_the_tokenizer_itself_splits_it(make: Any) -> None:
    assert Spelling(make()).encode(STORY.encode()).ids == make()(STORY)["input_ids"]


def test_a_dummy_space_is_not_part_of_the_text() -> None:
    spelling = Spelling(sentencepiece_like())
    tokens = sentencepiece_like().convert_ids_to_tokens(spelling.encode(b" the").ids)
    assert tokens == ["▁the"]
    assert sentencepiece_like().convert_ids_to_tokens(spelling.encode(b"the").ids)[0] != "▁the"
    assert spelling.lead == [1]


@pytest.mark.parametrize("make", ALL)
@given(st.binary(max_size=12), texts)
@settings(max_examples=60, deadline=None)
def test_any_bytes_can_be_spelled(make: Any, data: bytes, text: str) -> None:
    spelling = Spelling(make())
    whole = text.encode() + data
    assert joined(spelling, spelling.encode(whole).ids) == whole


def test_a_character_that_is_not_complete_is_spelled_in_bytes() -> None:
    spelling = Spelling(tiny_tokenizer())
    encoded = spelling.encode("fox 🦊".encode()[:-2])
    assert encoded.ids[:-2] == tiny_tokenizer()("fox ")["input_ids"]
    assert [spelling.bytes_of(i) for i in encoded.ids[-2:]] == [b"\xf0", b"\x9f"]


def test_what_cannot_be_spelled_is_left_out_and_said() -> None:
    spelling = Spelling(letters("abc"))
    assert spelling.encode(b"abxc").ids == [0, 1, 2]
    assert spelling.encode(b"abxc").ends == [1, 2, 4]
    assert spelling.encode(b"abxc").whole
    assert not spelling.encode(b"abx").whole


def test_only_words_that_a_tokenizer_changes_are_spelled_in_bytes() -> None:
    tokenizer = small_tokenizer().__class__(
        tokenizer_object=Tokenizer.from_str(small_tokenizer().backend_tokenizer.to_str())
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    spelling = Spelling(tokenizer)
    text = "the lazy cafe\u0301 dog"
    encoded = spelling.encode(text.encode())
    assert joined(spelling, encoded.ids) == text.encode()
    assert encoded.ids[:2] == small_tokenizer()("the lazy")["input_ids"][:2]
    assert len(spelling.spelled[encoded.ids[-1]]) > 1, "the last word is spelled in its own tokens again"


def test_ids_beyond_the_head_are_neither_spelled_with_nor_shared() -> None:
    size = 300
    spelling = Spelling(tiny_tokenizer(), size)
    assert max(spelling.spelled) < size
    encoded = spelling.encode(STORY.encode())
    assert max(encoded.ids) < size
    assert joined(spelling, encoded.ids) == STORY.encode()
    assert max(SharedVocabulary(Spelling(tiny_tokenizer()), spelling).draft_ids) < size


def test_special_tokens_written_as_text_are_text() -> None:
    spelling = Spelling(tiny_tokenizer())
    tiny_tokenizer()("x")  # transformers' own call reads control tokens out of text from then on
    ids = spelling.encode(b"<|end|>").ids
    assert tiny_tokenizer().eos_token_id not in ids
    assert joined(spelling, ids) == b"<|end|>"


# --- what is shared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in ALL for b in ALL])
def test_shared_tokens_mean_the_same_and_occur_once(target: Any, draft: Any) -> None:
    found = shared(target(), draft())
    assert len(set(found.target_ids)) == len(set(found.draft_ids)) == len(found.target_ids)
    control = set(found.control.items())
    for ours, theirs in zip(found.target_ids, found.draft_ids, strict=True):
        same_control = (ours, theirs) in control
        assert same_control or found.target.spelled[ours] == found.draft.spelled[theirs]
    if target is draft:
        # All but the second of two tokens with one spelling.
        assert len(found.target_ids) == len(set(found.target.spelled.values())) + len(found.control)


def test_every_token_with_the_same_bytes_is_found() -> None:
    found = shared(tiny_tokenizer(), small_tokenizer())
    theirs = set(small_tokenizer().get_vocab())
    same = [token for token in tiny_tokenizer().get_vocab() if token in theirs]
    assert len(found.target_ids) == len(same)
    assert found.sentence == f"other vocabulary: {len(same):,} of {len(tiny_tokenizer()):,} tokens shared"
    assert found.refused is None
    end = tiny_tokenizer().eos_token_id
    assert found.control == {end: small_tokenizer().eos_token_id}


def test_a_control_token_is_not_shared_with_text_of_the_same_spelling() -> None:
    plain = letters([*"<|end>", "<|end|>"])
    found = shared(tiny_tokenizer(), plain)
    assert tiny_tokenizer().eos_token_id not in found.target_ids
    assert found.control == {}


def test_too_little_in_common_is_refused_with_numbers() -> None:
    found = shared(tiny_tokenizer(), letters([chr(0x100 + 34 + i) for i in range(60)]))
    assert found.refused is None, "single bytes are shared"
    foreign = letters(["a", *(chr(0x250 + i) for i in range(50))])
    found = shared(tiny_tokenizer(), foreign)
    assert found.refused == (
        f"only 1 of the draft's 51 tokens are among the target's {len(tiny_tokenizer()):,} "
        "(5% of the smaller vocabulary are needed)"
    )


def test_tokens_that_do_not_spell_bytes_are_refused() -> None:
    assert vocabulary.why_not(word_pieces()) == "its tokens do not spell text byte by byte (WordPiece)"
    assert "no tokenizer.json" in str(vocabulary.why_not(object()))
    with pytest.raises(ValueError, match="byte by byte"):
        Spelling(word_pieces())


# --- the row's text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in ALL for b in ALL])
def test_the_drafts_text_is_the_targets_text_however_it_comes(target: Any, draft: Any) -> None:
    found = shared(target(), draft())
    tokens = found.target.encode((STORY * 3).encode()).ids
    for sizes in ([len(tokens)], [1] * len(tokens), [3, 1, 5, 2] * len(tokens)):
        text, read = DraftText(found), 0
        settled: list[int] = []
        for size in sizes:
            read = min(read + size, len(tokens))
            text.extend(tokens[:read])
            assert text.ids[: len(settled)] == settled, "settled tokens never change"
            settled = text.ids[: text.settled]
            lead = len(found.draft.lead)
            assert joined(found.draft, text.ids[lead:]) == joined(found.target, tokens[:read])
            assert len(text.ids) - text.settled <= 2 * OPEN
            if read == len(tokens):
                break
        whole = found.draft.encode((STORY * 3).encode()).ids
        assert len(text.ids) - lead <= len(whole) + 2, "cutting costs hardly a token"


def test_text_between_words_is_split_as_if_encoded_at_once() -> None:
    found = shared(tiny_tokenizer(), small_tokenizer())
    story = "The quick brown fox jumps over the lazy dog. Drafting tokens verifies them, again and again. " * 20
    tokens = tiny_tokenizer()(story)["input_ids"]
    text = DraftText(found)
    for read in range(1, len(tokens) + 1):
        text.extend(tokens[:read])
    assert text.ids == small_tokenizer()(story)["input_ids"]


def test_control_tokens_stand_for_each_other_or_are_written_out() -> None:
    end, other_end = tiny_tokenizer().eos_token_id, small_tokenizer().eos_token_id
    story = [*tiny_tokenizer()("fox")["input_ids"], end, *tiny_tokenizer()("dog")["input_ids"]]
    text = DraftText(shared(tiny_tokenizer(), small_tokenizer()))
    text.extend(story)
    assert text.ids.count(other_end) == 1
    text = DraftText(found := shared(tiny_tokenizer(), sentencepiece_like()))
    text.extend(story)
    assert text.ids[0] == found.draft.lead[0]
    assert joined(found.draft, text.ids[1:]) == b"fox<|end|>dog"


def test_what_a_target_puts_before_every_text_is_not_text() -> None:
    found = shared(sentencepiece_like(), small_tokenizer())
    text = DraftText(found)
    text.extend(sentencepiece_like()("the fox")["input_ids"])
    assert joined(found.draft, text.ids) == b" the fox"


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in ALL for b in ALL])
@given(texts, texts, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_re_encoded_tokens_spell_what_was_written(target: Any, draft: Any, before: str, after: str, cut: int) -> None:
    """Also where the draft's text begins or ends inside a character."""
    spelling = Spelling(target())
    data = (before + after).encode()
    at = max(0, min(len(before.encode()) + cut - 1, len(data)))
    tokens = spelling.encode(data[:at]).ids
    behind = look_behind(spelling, tokens)
    assert data[:at].endswith(behind)
    assert joined(spelling, re_encode(spelling, behind, data[at:])[0]) == data[at:]


def test_re_encoding_continues_as_the_target_would_have_split_the_text() -> None:
    spelling = Spelling(tiny_tokenizer())
    whole = tiny_tokenizer()(STORY)["input_ids"]
    for at in range(1, len(whole)):
        tokens = whole[:at]
        written = joined(spelling, whole[at : at + 6])
        found, sure = re_encode(spelling, look_behind(spelling, tokens), written)
        assert found[:sure] == whole[at : at + sure], "what is said to stay is what the target would have written"


def test_a_token_across_the_end_of_the_text_is_split_there() -> None:
    """The text ends with a token that the target would not have chosen had it known what comes."""
    spelling = Spelling(letters([*"abcd", "ab", "abc"], [("a", "b"), ("ab", "c")]))
    assert spelling.encode(b"abcd").ids == [5, 3]
    assert re_encode(spelling, b"a", b"bcd")[0] == [1, 2, 3]
    assert re_encode(spelling, b"ab", b"cd")[0] == [2, 3]
    assert re_encode(spelling, b"d", b"abc")[0] == [5]


def test_the_last_word_may_still_be_split_otherwise() -> None:
    spelling = Spelling(tiny_tokenizer())
    tokens = tiny_tokenizer()("The")["input_ids"]
    behind = look_behind(spelling, tokens)
    for written, words in ((b" qu", b""), (b" quick", b""), (b" quick ", b" quick"), (b" quick, b", b" quick,")):
        found, sure = re_encode(spelling, behind, written)
        assert joined(spelling, found[:sure]) == words
