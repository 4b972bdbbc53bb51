"""Two vocabularies that spell the same text: the bytes of each token, text in tokens, and which tokens both have.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece pieces (Llama 2, Gemma, Mistral) spell text byte by
byte: the bytes of the tokens, joined, are the text. WordPiece and its like do not, and are refused. No torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decoder.text import TokenText

LEAST_SHARE = 0.05
"""Share of the smaller vocabulary that must be in the other one, so that there is anything to draft."""
_ANCHOR = "\n"
"""Put before a text so that a tokenizer's dummy space stands there and not at the text's own start."""


@dataclass(slots=True)
class Encoded:
    """A text in tokens. ``ends[i]`` is the number of bytes of the text up to the end of token i. Bytes that cannot be
    spelled are left out; ``whole`` is False where these are the last ones."""

    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    whole: bool = True


def why_not(tokenizer: Any) -> str | None:
    """Why this tokenizer's tokens do not spell text byte by byte; None when they do."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "its tokenizer has no tokenizer.json"
    kind = repr(backend.decoder)
    if "ByteLevel" in kind or "▁" in kind:
        return None
    return f"its tokens do not spell text byte by byte ({kind.split('(')[0]})"


class Spelling:
    """What a tokenizer's tokens spell. Takes the tokenizer over: it no longer truncates, pads or reads special tokens
    out of plain text. Raises ValueError where ``why_not`` has a reason. ``size``: ids from there on do not count."""

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        reason = why_not(tokenizer)
        if reason:
            raise ValueError(reason)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = tokenizer.added_tokens_decoder
        self.special = {i: token.content for i, token in added.items() if token.special}
        """Control tokens by id: they stand for themselves, not for the text that they are written as."""
        self._fallback: dict[int, bytes] = {}
        """The pieces <0x00> to <0xFF> of a SentencePiece vocabulary."""
        self._bytes = self._spell_all(tokenizer, {i: token.content for i, token in added.items()})
        if size is not None:
            self.special = {i: text for i, text in self.special.items() if i < size}
            self._bytes = {i: data for i, data in self._bytes.items() if i < size}
        singles = {data: i for i, data in reversed(self._bytes.items()) if len(data) == 1}
        self._byte_ids = [singles.get(bytes([b])) for b in range(256)]
        bos = tokenizer.bos_token_id
        lead = list(tokenizer("")["input_ids"])
        self.lead = lead if bos is not None and lead == [bos] else []
        """What the tokenizer itself puts before every text."""
        self._anchored = self._join(self._encode_raw("a")) == b" a"

    @property
    def entries(self) -> int:
        """Tokens, control tokens included."""
        return len(self._bytes) + len(self.special)

    @property
    def spelled(self) -> dict[int, bytes]:
        """The bytes of every token that stands for text; of two tokens with the same bytes both are here."""
        return self._bytes

    def is_fallback(self, token: int) -> bool:
        """True for a SentencePiece byte piece, which is only written where no other piece fits."""
        return token in self._fallback

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; of a control token the text that it is written as; nothing for an unknown id."""
        data = self._bytes.get(token)
        return data if data is not None else self.special.get(token, "").encode()

    def encode(self, data: bytes) -> Encoded:
        """``data`` in tokens: text as the tokenizer splits it, bytes that are no whole character one by one."""
        found = Encoded()
        text = data.decode("utf-8", "surrogateescape")
        for number, piece in enumerate(re.split("([\udc80-\udcff]+)", text)):
            if number % 2:
                self._add_bytes(found, piece.encode("utf-8", "surrogateescape"))
            elif piece:
                self._add_text(found, piece)
        return found

    def _add_text(self, found: Encoded, text: str) -> None:
        if self._add(found, text):
            return
        # The tokenizer normalises something: word by word, so that only the words it changes are spelled in bytes.
        for word in re.findall(r"\s*\S+|\s+", text):
            if not self._add(found, word):
                self._add_bytes(found, word.encode())

    def _add(self, found: Encoded, text: str) -> bool:
        ids = self._encode_text(text)
        if ids is None:
            return False
        end = found.ends[-1] if found.ends else 0
        for token in ids:
            end += len(self.bytes_of(token))
            found.ids.append(token)
            found.ends.append(end)
        found.whole = True
        return True

    def _add_bytes(self, found: Encoded, data: bytes) -> None:
        end = found.ends[-1] if found.ends else 0
        for byte in data:
            end += 1
            token = self._byte_ids[byte]
            found.whole = token is not None
            if token is not None:
                found.ids.append(token)
                found.ends.append(end)

    def _encode_text(self, text: str) -> list[int] | None:
        """The tokens that the tokenizer splits ``text`` into, or None where they do not spell it exactly."""
        if not self._anchored:
            ids = self._encode_raw(text)
            return ids if self._join(ids) == text.encode() else None
        ids, wanted = self._encode_raw(_ANCHOR + text), text.encode()
        joined = self._join(ids)
        if not joined.endswith(wanted):
            return None
        before = len(joined) - len(wanted)
        while before > 0 and ids:
            before -= len(self.bytes_of(ids.pop(0)))
        return ids if before == 0 else None

    def _encode_raw(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True  # transformers' own calls switch it off again
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _join(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes_of(i) for i in ids)

    def _spell_all(self, tokenizer: Any, added: dict[int, str]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        text = TokenText(tokenizer)
        byte_level = "ByteLevel" in repr(self._backend.decoder)
        for piece, i in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
            if i in self.special:
                continue
            if i in added:
                data = added[i].encode()
            elif byte_level:
                data = text.bytes_of(i) or b""
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
                data = self._fallback[i] = bytes([int(piece[3:5], 16)])
            else:
                data = piece.replace("▁", " ").encode()
            if data:
                found[i] = data
        return found


class SharedVocabulary:
    """Which tokens a target and a draft have in common: the same bytes, or the same control token.

    ``target_ids[i]`` and ``draft_ids[i]`` mean the same; no id occurs twice. ``control`` maps the target's control
    tokens to the draft's.
    """

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self.target, self.draft = target, draft
        theirs = _by_bytes(draft)
        pairs = [(i, theirs[data]) for data, i in _by_bytes(target).items() if data in theirs]
        ids = {content: i for i, content in draft.special.items()}
        self.control = {i: ids[content] for i, content in target.special.items() if content in ids}
        pairs = sorted([*pairs, *self.control.items()])
        self.target_ids = [i for i, _ in pairs]
        self.draft_ids = [i for _, i in pairs]

    @property
    def sentence(self) -> str:
        """What is shared, in words."""
        return f"other vocabulary: {len(self.target_ids):,} of {self.target.entries:,} tokens shared"

    @property
    def refused(self) -> str | None:
        """Why so little is shared that nothing can be drafted across; None where enough is."""
        smaller = min(self.target.entries, self.draft.entries)
        shared = len(self.target_ids)
        if shared >= LEAST_SHARE * smaller:
            return None
        return (
            f"only {shared:,} of the draft's {self.draft.entries:,} tokens are among the target's "
            f"{self.target.entries:,} ({LEAST_SHARE:.0%} of the smaller vocabulary are needed)"
        )


def _by_bytes(spelling: Spelling) -> dict[bytes, int]:
    """One id for each spelling: of several the lowest, byte pieces last."""
    found: dict[bytes, int] = {}
    for i, data in spelling.spelled.items():
        if data not in found or spelling.is_fallback(found[data]):
            found[data] = i
    return found
