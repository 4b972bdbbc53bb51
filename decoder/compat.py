"""Does a draft fit a target? Not by family name: by vocabulary. Says exactly what differs.

The same tokenizer with heads padded to different sizes is compatible: what counts is that every id of the tokenizer
means the same string on both sides. Where ids differ, a draft can still be used across vocabularies, if both spell text
byte by byte and share enough tokens; it then drafts in another way, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from decoder import catalog, loading, vocabulary
from decoder.errors import ModelError
from decoder.heads import fit
from decoder.heads.expect import TargetFacts
from decoder.heads.files import open_files
from decoder.heads.layout import HEADS, Layout, find_layout, require
from decoder.vocabulary import SharedVocabulary, Spelling

_SHOWN = 3
"""Differing vocabulary entries that are named one by one."""


def compare_tokenizers(target: Any, draft: Any) -> list[str]:
    """What differs between two tokenizers, as sentences; empty when a draft's ids mean the target's strings."""
    reasons = []
    theirs = {i: token for token, i in target.get_vocab().items()}
    ours = {i: token for token, i in draft.get_vocab().items()}
    different = [i for i in sorted(theirs.keys() & ours.keys()) if theirs[i] != ours[i]]
    if different:
        shown = "; ".join(
            f"id {i} is {theirs[i]!r} in the target and {ours[i]!r} in the draft" for i in different[:_SHOWN]
        )
        more = f" (and {len(different) - _SHOWN:,} more)" if len(different) > _SHOWN else ""
        reasons.append(f"{len(different):,} of {len(theirs):,} vocabulary entries differ: {shown}{more}")
    missing = sorted(theirs.keys() ^ ours.keys())
    if missing:
        first = missing[0]
        side = "target" if first in theirs else "draft"
        token = theirs.get(first, ours.get(first))
        reasons.append(
            f"the vocabularies have {len(theirs):,} and {len(ours):,} entries: "
            f"id {first} ({token!r}) is only in the {side}'s"
        )
    for name in ("bos_token", "eos_token"):
        a, b = getattr(target, name, None), getattr(draft, name, None)
        if a != b and b is not None:
            reasons.append(f"{name} is {a!r} in the target and {b!r} in the draft")
    return reasons


def compare_heads(tokenizer: Any, target_size: int, draft_size: int) -> list[str]:
    """Whether both heads cover the tokenizer; padding beyond it may differ."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if draft_size < needed:
        return [f"the draft's head has {draft_size:,} rows, fewer than the {needed:,} entries of the vocabulary"]
    return []


@lru_cache(maxsize=64)
def _pair(target: str, draft: str) -> tuple[str, ...]:
    if _made_for(target, draft):
        return ()
    reasons = compare_tokenizers(loading.load_tokenizer(target), loading.load_tokenizer(draft, role="draft"))
    if reasons:
        return tuple(reasons)
    sizes = [
        int(loading.load_config(name, role=role).get_text_config().vocab_size)
        for name, role in ((target, "target"), (draft, "draft"))
    ]
    return tuple(compare_heads(loading.load_tokenizer(target), *sizes))


def _made_for(target: str, draft: str) -> bool:
    """A shipped draft without a tokenizer of its own uses its target's."""
    entry = catalog.find(draft)
    return bool(entry and entry.path and entry.fits == target and not (entry.path / "tokenizer.json").is_file())


def check_pair(target: str, draft: str) -> list[str]:
    """Why ``draft`` does not fit ``target``, as sentences; empty when it fits, be it across vocabularies (``pairing``).
    Raises ModelError for unreadable ones.

    Reads tokenizers and configurations only, no weights.
    """
    layout = head_layout(draft)
    return check_head(target, draft, layout.proposer) if layout else pairing(target, draft).misfit


def head_layout(draft: str) -> Layout | None:
    """The layout of a draft that is a head; None for a model, and for what can only be read from the Hub."""
    entry = catalog.find(draft)
    if entry is not None and not entry.path:
        return Layout(entry.proposer, "") if entry.proposer in HEADS else None
    if entry is None and not Path(draft).expanduser().is_dir():
        return None
    files = open_files(draft)
    return find_layout(files.config, files.shapes)


def check_head(target: str, draft: str, proposer: str) -> list[str]:
    """Why ``proposer`` cannot draft for ``target`` with the head ``draft``, as sentences; empty when it can.

    Reads configurations, and of a head that is here the headers of its weights. Raises ModelError for unreadable ones.
    """
    files = open_files(draft, weights=False)
    layout = require(draft, proposer, files.config, files.shapes)
    return fit.problems(files, layout, TargetFacts.of_config(target, loading.load_config(target)))


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a draft can be used with a target. ``reasons``: why not token for token (none: it can). ``across``: what both
    vocabularies share, where it can be used all the same. ``refused``: why not even so."""

    reasons: tuple[str, ...] = ()
    across: str | None = None
    refused: str | None = None

    @property
    def fits(self) -> bool:
        """True when the draft can be used in either way."""
        return self.refused is None

    @property
    def misfit(self) -> list[str]:
        """Why it cannot be used at all; empty when it can."""
        return [] if self.fits else [*self.reasons, f"across vocabularies: {self.refused}"]

    @property
    def sentence(self) -> str:
        """Whether it fits and in which way, or why not."""
        if not self.reasons:
            return "fits, token for token"
        if not self.fits:
            return f"does not fit: {'; '.join(self.misfit)}"
        return f"fits across vocabularies ({self.across}); not token for token: {'; '.join(self.reasons)}"


@lru_cache(maxsize=64)
def pairing(target: str, draft: str) -> Pairing:
    """Whether and how ``draft`` can be used with ``target``. Raises ModelError for unreadable ones."""
    reasons = _pair(target, draft)
    if not reasons:
        return Pairing()
    for name, role in ((target, "target"), (draft, "draft")):
        reason = vocabulary.why_not(loading.load_tokenizer(name, role=role))
        if reason:
            return Pairing(reasons, refused=f"{name}: {reason}")
    rows = int(loading.load_config(draft, role="draft").get_text_config().vocab_size)
    entries = max(loading.load_tokenizer(draft, role="draft").get_vocab().values()) + 1
    if rows < entries:
        # Not another vocabulary but a broken model: it cannot read its own tokenizer's text.
        return Pairing(reasons, refused=f"the draft's head lacks {entries - rows:,} of its own {entries:,} entries")
    shared = shared_vocabulary(target, draft)
    return Pairing(reasons, shared.sentence, shared.refused)


def verdict(target: str, entry: catalog.ModelEntry) -> str:
    """Whether the draft ``entry`` fits ``target``, and how or why not, in one sentence; raises nothing."""
    if not entry.present:
        return f"not here; made for {entry.fits}" if entry.fits else "not here"
    try:
        layout = head_layout(entry.name)
        if layout is None:
            return pairing(target, entry.name).sentence
        reasons = check_head(target, entry.name, layout.proposer)
    except ModelError as error:
        return str(error)
    return f"does not fit: {'; '.join(reasons)}" if reasons else "fits"


@lru_cache(maxsize=2)
def shared_vocabulary(target: str, draft: str) -> SharedVocabulary:
    """What the two vocabularies have in common. Ids that a head lacks do not count."""

    def spelling(name: str, role: str) -> Spelling:
        size = int(loading.load_config(name, role=role).get_text_config().vocab_size)
        return Spelling(loading.load_tokenizer(name, role=role), size)

    return SharedVocabulary(spelling(target, "target"), spelling(draft, "draft"))
