"""Small tokenizers of each kind that drafts across vocabularies meet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from decoder.vocabulary import SharedVocabulary, Spelling
from tests.tiny import TEXT, tiny_tokenizer

STORY = (
    "The quick brown fox jumps over the lazy dog. A fox, 🦊🐻 灯塔是什么! Drafting verifies the speculative dog;\n\n"
    "    def f(x): return x + 1\n  naïve café, the the the lazy\tfox.  Two  spaces. 灯塔 🦊. "
)
"""Words that the tiny tokenizers know and do not know, spaces in rows, characters of several bytes."""


@lru_cache
def small_tokenizer() -> Any:
    """A byte-level BPE with other merges and other ids than ``tiny_tokenizer``; the same end token."""
    return tiny_tokenizer(330, "the lazy dog jumps and a quick verified token returns 1 + 2; over and over. " * 3)


@lru_cache
def sentencepiece_like() -> Any:
    """Pieces with ▁, byte pieces for what is missing, a dummy space before every text, <s> in front (as Llama 2)."""
    raw = Tokenizer(models.BPE())
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    ascii_only = "".join(c for c in TEXT if c.isascii())
    raw.train_from_iterator([word for word in ascii_only.split() for _ in range(4)], trainer)
    learned = json.loads(raw.to_str())["model"]
    vocab = {**learned["vocab"]}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]
    whole = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    whole.normalizer = normalizer
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    whole.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def letters(words: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Any:
    """A byte-level tokenizer whose ids are the places of ``words``; the first ones must be single letters."""
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def word_pieces() -> Any:
    """A tokenizer whose tokens do not spell text byte by byte."""
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


def shared(target: Any, draft: Any) -> SharedVocabulary:
    """What two tokenizers have in common."""
    return SharedVocabulary(Spelling(target), Spelling(draft))
