"""The text of a row in the tokens of a draft with another vocabulary, and the draft's text in the target's tokens.

Both are kept up by encoding only the newest part of the text again. No torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from decoder.vocabulary import Encoded, SharedVocabulary, Spelling

OPEN = 16
"""Draft tokens at the end of the text that may still change when more text comes; up to twice as many are kept open."""
LOOK_BEHIND = 8
"""Target tokens before the end that are encoded together with what the draft wrote, at least."""
_FAR = 64
"""How far to look for a place between two words where the text can be cut."""
_SPACES = (b" ", b"\n", b"\t", b"\r")


class DraftText:
    """A row's committed text in the draft's tokens: ``ids``, of which the first ``settled`` never change again.

    Control tokens that both have stand for each other, others are written out: the draft reads what the target wrote.
    ``whole`` is False while the text ends inside a character that the draft cannot spell.
    """

    def __init__(self, shared: SharedVocabulary) -> None:
        self._shared = shared
        self.ids = list(shared.draft.lead)
        self.settled = len(self.ids)
        self.whole = True
        self._read = 0
        """Target tokens taken in."""
        self._tail = b""
        """Text behind the settled tokens."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what was added; ``tokens`` are all of the row's target tokens."""
        shared = self._shared
        lead = shared.target.lead
        fresh = tokens[self._read :]
        if not self._read and lead and list(fresh[: len(lead)]) == lead:
            fresh = fresh[len(lead) :]  # the draft begins its texts in its own way
        self._read = len(tokens)
        for token in fresh:
            if token in shared.control:
                self._encode()
                self.ids.append(shared.control[token])
                self.settled, self._tail = len(self.ids), b""
            else:
                self._tail += shared.target.bytes_of(token)
        self._settle(self._encode())

    def _encode(self) -> Encoded:
        encoded = self._shared.draft.encode(self._tail)
        self.ids[self.settled :] = encoded.ids
        self.whole = encoded.whole
        return encoded

    def _settle(self, encoded: Encoded) -> None:
        """Once many tokens are open, settle the older ones up to a place between two words if there is one nearby: the
        rest is encoded on its own from then on, and splits there as it did in the whole text."""
        if len(encoded.ids) <= 2 * OPEN:
            return
        last = len(encoded.ids) - OPEN
        places = range(last, max(0, last - _FAR), -1)
        cut = next((at for at in places if self._between_words(encoded.ends[at - 1])), None)
        cut = cut or next((at for at in places if not self._inside_character(encoded.ends[at - 1])), last)
        self.settled += cut
        self._tail = self._tail[encoded.ends[cut - 1] :]

    def _between_words(self, at: int) -> bool:
        return self._tail[at : at + 1] in _SPACES and self._tail[at - 1 : at] not in _SPACES

    def _inside_character(self, at: int) -> bool:
        return self._tail[at] & 0xC0 == 0x80


def re_encode(target: Spelling, behind: bytes, written: bytes) -> tuple[list[int], int]:
    """What the draft has ``written`` behind the text that ends with ``behind``, in the target's tokens, and how many of
    these will stay whatever comes next: those before the last word.

    Both are encoded together, as the target would have split them. Where that splits ``behind`` in another way than the
    text is split, its length still decides where the new tokens begin; bytes that a token shares with ``behind`` are
    encoded apart.
    """
    encoded = target.encode(behind + written)
    at = next((i for i, end in enumerate(encoded.ends) if end > len(behind)), len(encoded.ids))
    begin = encoded.ends[at - 1] if at else 0
    sure = _last_word(behind + written)
    if begin == len(behind) or at == len(encoded.ids):
        return encoded.ids[at:], sum(end <= sure for end in encoded.ends[at:])
    first = target.encode(written[: encoded.ends[at] - len(behind)]).ids
    stays = sum(end <= sure for end in encoded.ends[at + 1 :])
    return [*first, *encoded.ids[at + 1 :]], len(first) + stays if encoded.ends[at] <= sure else 0


def _last_word(text: bytes) -> int:
    """Where the last word begins, with the space before it: tokens seldom reach across such a place."""
    found = re.search(rb"( ?(?:[A-Za-z\x80-\xff]+|[0-9]+|[^A-Za-z0-9\x80-\xff\s]+)|\s+)\Z", text)
    return found.start() if found else 0


def look_behind(target: Spelling, tokens: Sequence[int]) -> bytes:
    """The end of the text ``tokens`` that is encoded again: its last LOOK_BEHIND tokens or up to twice as many, so that
    it begins with a word if it can; never a control token."""
    last = len(tokens)
    start = earliest = max(0, last - 2 * LOOK_BEHIND)
    for at in range(last - 1, earliest - 1, -1):
        if tokens[at] in target.special:
            start = at + 1
            break
        if at <= last - LOOK_BEHIND and target.bytes_of(tokens[at])[:1] in _SPACES:
            start = at
            break
    return b"".join(target.bytes_of(token) for token in tokens[start:])
