"""Token ids <-> text: prompts, labels for single tokens, and text that grows token by token.

A character may be spread over several tokens (emoji, CJK). ``TextStream`` then gives "" for the first of them and the
whole character with the last, so that the pieces always join to the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from decoder.errors import ModelError, RequestError
from decoder.request import GenerationRequest

_REPLACEMENT = "\ufffd"
_WINDOW = 5


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted (the alphabet of every byte-level BPE)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    missing = (b for b in range(256) if b not in printable)
    table.update({chr(256 + n): b for n, b in enumerate(missing)})
    return table


class TokenText:
    """Labels of single tokens and decoding of sequences for one tokenizer. Each token is looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._labels: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self.special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token stands for, where the tokenizer is byte-level BPE; None otherwise."""
        if not self._byte_level:
            return None
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def _find_bytes(self, token: int) -> bytes:
        raw = self.tokenizer.convert_ids_to_tokens(token)
        if raw is None:
            return b""
        table = _byte_of_char()
        if token not in self.special and all(c in table for c in raw):
            return bytes(table[c] for c in raw)
        return str(raw).encode()

    def label(self, token: int) -> str:
        r"""What token ``token`` stands for on its own; bytes that are no whole character are written ``\xF0\x9F``."""
        if token not in self._labels:
            self._labels[token] = self._label(token)
        return self._labels[token]

    def _label(self, token: int) -> str:
        raw = self.tokenizer.convert_ids_to_tokens(token)
        if raw is None:
            return f"<{token}>"
        if token in self.special:
            return str(raw)
        data = self.bytes_of(token)
        if data is not None:
            return _show_bytes(data)
        if len(raw) == 6 and raw.startswith("<0x") and raw.endswith(">"):
            return _show_bytes(bytes([int(raw[3:5], 16)]))
        if "▁" in raw:
            return str(raw).replace("▁", " ")
        text = self.tokenizer.decode([token])
        return str(raw) if _REPLACEMENT in text or not text else str(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Plain decoding, special tokens kept."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _show_bytes(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02X}" for b in data)


class TextStream:
    """Text of one row as its tokens arrive. ``push`` returns what each new token adds to the text."""

    def __init__(self, tokens: TokenText, prompt_ids: Sequence[int]) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Other tokenizers need the tokens around a token: a few of the prompt's give the first one its context.
        self._ids: list[int] = list(prompt_ids[-_WINDOW:])
        self._start = 0
        self._read = len(self._ids)

    def push(self, token: int) -> str:
        """Add a token; returns the text it completes ("" in the middle of a character)."""
        data = self._tokens.bytes_of(token)
        if data is not None:
            return self._utf8.decode(data)
        self._ids.append(token)
        before = self._tokens.decode(self._ids[self._start : self._read])
        after = self._tokens.decode(self._ids[self._start :])
        if after.endswith(_REPLACEMENT) and len(self._ids) - self._read < _WINDOW:
            return ""
        return self._take(before, after)

    def label(self, token: int) -> str:
        """What a token stands for on its own."""
        return self._tokens.label(token)

    def flush(self) -> str:
        """The rest of an incomplete character at the end of a run (as a replacement character), or ""."""
        if self._read == len(self._ids):
            return self._utf8.decode(b"", final=True)
        before = self._tokens.decode(self._ids[self._start : self._read])
        return self._take(before, self._tokens.decode(self._ids[self._start :]))

    def _take(self, before: str, after: str) -> str:
        self._start = max(self._read - _WINDOW, 0) if self._read - self._start > 4 * _WINDOW else self._start
        self._read = len(self._ids)
        return after[len(before) :]


class Answer:
    """The text of one row, with the few last characters at hand in which a stop string may have begun.

    Adding to it costs what is added, however long the text is.
    """

    def __init__(self, reach: int) -> None:
        """``reach``: characters that the longest stop string may reach back."""
        self._reach = reach
        self._pieces: list[str] = []
        self.tail = ""

    def take(self, added: str, removed: int = 0) -> None:
        """Append ``added``, after cutting off the last ``removed`` characters (a stop string that began there)."""
        if removed:
            self._pieces = [str(self)[:-removed]]
        self._pieces.append(added)
        self.tail = (self.tail + added)[-self._reach :] if self._reach else ""

    def __str__(self) -> str:
        return "".join(self._pieces)


def encode_prompt(request: GenerationRequest, tokenizer: Any, name: str) -> list[int]:
    """Prompt ids of a request, through the chat template or raw. Raises ModelError without a template."""
    if not request.chat:
        ids = tokenizer(request.prompt)["input_ids"]
        if not ids:
            raise RequestError("the prompt has no tokens")
        return [int(i) for i in ids]
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"{name} has no chat template: use raw text (--raw) instead of chat")
    messages = []
    if request.system_prompt is not None:
        messages.append({"role": "system", "content": request.system_prompt})
    messages.append({"role": "user", "content": request.prompt})
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # templates raise whatever they like
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"the chat template of {name} refuses this conversation: {reason}") from None
    return [int(i) for i in encoded["input_ids"]]
