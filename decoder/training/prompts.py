"""Messages for a target to answer: written by us from interchangeable parts, in the three kinds that people ask most.

Left to itself, a small target writes openings that nobody would ask. A draft that is to work on real questions must
have read answers to such. ``assets/training/prompts.json`` holds, by kind, templates and what fills their slots; a slot
named ``a_b`` fills ``{a}`` and ``{b}`` with the parts of one pair. None of the bench's prompts is among what comes out,
nor eight words in a row of one (tested): drafts are measured on those.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = Path(__file__).resolve().parents[2] / "assets" / "training" / "prompts.json"
SHARES = {"chat": 0.45, "code": 0.3, "summarise": 0.25}
"""How much of the messages is of each kind."""
_LINES = 4, 8
"""Sentences of a passage that is to be summarised."""


def write_prompts(count: int, seed: int = 0, passages: Sequence[str] = ()) -> list[str]:
    """``count`` different messages, in a fixed order for a ``seed``. Raises ValueError where there are not as many.

    ``passages`` are further texts to summarise: as many of the summaries are of them as of our own.
    """
    kinds: Mapping[str, Any] = json.loads(PARTS.read_text(encoding="utf-8"))
    chance = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        kind = kinds[chance.choices(list(SHARES), list(SHARES.values()))[0]]
        foreign = chance.choice(passages) if passages and chance.random() < 0.5 else None
        found.setdefault(_fill(chance.choice(kind["templates"]), kind["slots"], chance, foreign))
    if len(found) < count:
        raise ValueError(f"the parts make no {count:,} different messages")
    return list(found)


def passages_of(answers: Sequence[str]) -> list[str]:
    """What could be summarised among a target's ``answers``: a few sentences of prose each, none twice."""
    found: dict[str, None] = {}
    for answer in answers:
        lines = re.split(r"(?<=[.!?])\s+", answer.strip())[: _LINES[1]]
        prose = all(re.fullmatch(r"[A-Z][\w ,;:'’\"()-]{20,200}[.!?]", line) for line in lines)
        if len(lines) >= _LINES[0] and prose and len(set(lines)) == len(lines):
            found.setdefault(" ".join(lines))
    return list(found)


def _fill(template: str, slots: Mapping[str, Any], chance: random.Random, foreign: str | None) -> str:
    chosen: dict[str, str] = {}
    for name, values in slots.items():
        if name == "passages":
            chosen["passage"] = _passage(chance.choice(values), chance)
            continue
        value = chance.choice(values)
        pair = name.split("_") if isinstance(value, list) else [name]
        chosen.update(zip(pair, value if isinstance(value, list) else [value], strict=True))
    if foreign is not None:
        chosen["passage"] = foreign
    # Twice: a passage has slots of its own. Only names of slots are slots; code may hold braces.
    for _ in range(2):
        template = re.sub(r"\{(\w+)\}", lambda found: chosen.get(found[1], found[0]), template)
    return template


def _passage(lines: list[str], chance: random.Random) -> str:
    """The beginning of a passage, now and then without one of its sentences."""
    kept = list(lines[: chance.randint(min(_LINES[0], len(lines)), max(_LINES[1], 1))])
    if len(kept) > _LINES[0] and chance.random() < 0.5:
        kept.pop(chance.randrange(1, len(kept)))
    return chance.choice(["\n", " "]).join(kept)
