"""What the proposer and the draft picker offer for a target, and what becomes of a choice that no longer fits.

No Gradio: values are JSON for ``assets/js/picker.js``, which sets every text with ``textContent``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoder import catalog
from playground import pairs
from playground.deeplinks import shown
from playground.pairs import KINDS, WITH_DRAFT, DraftOption, Standing

FAMILIES: dict[str, str] = {
    "plain": "Nobody drafts",
    "text lookup": "Looked up in the text: no model",
    "independent model": "A smaller model",
    "self-speculation": "The target itself",
    "draft head": "A head that reads the target's states",
}
"""Families of the catalog in the order of the picker, with their headings; others follow under their own name."""
MAX_OWN = 500
"""Characters of a name that somebody types."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Proposer and draft after the target or one of them changed. ``lost`` says what is no longer chosen, and why."""

    proposer: str
    draft: str
    lost: str = ""


def settle(target: str, proposer: str, draft: str, *, standings: Mapping[str, Standing]) -> Choice:
    """Keep what can be used; replace what cannot, with a sentence. A draft of one's own that is not here is kept."""
    found = standings.get(proposer)
    if found is None:
        return Choice(proposer, draft)  # its own run will say that there is no such proposer
    lost = ""
    if proposer in WITH_DRAFT:
        draft, lost = _settle_draft(target, proposer, draft)
    if found.state == "no" or (found.state == "own" and not draft):
        title = next((entry.title for entry in catalog.proposers() if entry.name == proposer), proposer)
        lost = f"{title} is no longer chosen: {found.reason}"
        usable = standings.get("draft-model")
        proposer = "draft-model" if usable is not None and usable.state == "ready" else "ngram"
        if proposer == "draft-model":
            draft, _ = _settle_draft(target, proposer, "")
    return Choice(proposer, draft, lost)


def _settle_draft(target: str, proposer: str, draft: str) -> tuple[str, str]:
    options = pairs.draft_options(target, proposer, read=True)
    known = next((option for option in options if option.name == draft), None)
    if known is not None and known.state in ("ready", "fetch"):
        return draft, ""
    best = pairs.best_draft(options)
    if not draft:
        return best, ""
    if pairs.is_left_over(draft, proposer):
        return best, ""  # nobody misses it
    fit = pairs.check(target, draft, proposer)
    if known is None and fit.fits is not False:
        return draft, ""
    reason = known.reason if known is not None else fit.reason
    return best, f"{shown(draft)} is no longer chosen: {reason}"


# --- what the browser draws -------------------------------------------------------------------------------------------


def proposer_value(target: str, standings: Mapping[str, Standing]) -> str:
    """The proposers by family: one sentence on each, what it needs, and why it cannot be used with ``target``."""
    groups: dict[str, list[dict[str, Any]]] = {family: [] for family in FAMILIES}
    for entry in catalog.proposers():
        found = standings.get(entry.name, Standing("ready"))
        groups.setdefault(entry.family, []).append(
            {
                "value": entry.name,
                "title": entry.title,
                "text": entry.sentence,
                "needs": "" if entry.needs in ("", "nothing") else entry.needs,
                "state": found.state,
                "reason": _sentence(found.reason),
            }
        )
    return _json(
        [{"title": FAMILIES.get(family, family), "entries": entries} for family, entries in groups.items() if entries],
        {"label": "A draft or head of your own", "hint": "folder or Hugging Face id"},
    )


def draft_value(target: str, proposer: str, chosen: str, options: Sequence[DraftOption]) -> str:
    """The drafts of ``proposer``: those that can be used, then the others with the reason why not."""
    kind = KINDS.get(proposer, "draft")
    usable = [_draft_entry(option, kind) for option in options if option.state in ("ready", "fetch")]
    if chosen and chosen not in [option.name for option in options]:
        fit = pairs.check(target, chosen, proposer)
        note = _sentence(pairs.across(target, chosen)) if proposer == "draft-model" else ""
        usable.append({"value": chosen, "title": chosen, "text": note, "needs": "", "state": "ready", "reason": ""})
        if fit.fits is None:
            usable[-1] |= {"state": "fetch", "reason": _sentence(fit.reason)}
    others = [_draft_entry(option, kind) for option in options if option.state not in ("ready", "fetch")]
    groups = []
    if usable:
        groups.append({"title": f"For {target}", "entries": usable})
    if others:
        groups.append({"title": f"Not for {target}", "entries": others})
    return _json(groups, {"label": f"Another {kind}", "hint": "folder or Hugging Face id"}, f"no {kind} chosen")


def _draft_entry(option: DraftOption, kind: str) -> dict[str, Any]:
    if not option.name:
        return {
            "value": "", "title": f"the target's own {kind}", "text": "It is part of the target's checkpoint.",
            "needs": "", "state": option.state, "reason": "",
        }  # fmt: skip
    usable = option.state in ("ready", "fetch")
    size = f"{option.size_mb:,} MB"
    return {
        "value": option.name,
        "title": option.name,
        "text": f"{size}. {_sentence(option.note)}".removesuffix(". ") if usable and not option.reason else "",
        "needs": "",
        "state": option.state if usable else "no",
        "reason": _sentence(option.reason),
    }


def _sentence(reason: str) -> str:
    """A reason with a capital letter where that is safe, and a full stop; long lists of reasons are cut."""
    if not reason:
        return ""
    reason = reason if len(reason) <= 400 else reason[:400] + " …"
    first = reason.split(maxsplit=1)[0]
    start = reason[0].upper() + reason[1:] if first.isalpha() and first.islower() else reason
    return start if start[-1] in ".…" else start + "."


def _json(groups: Sequence[Mapping[str, Any]], own: Mapping[str, str], empty: str = "nothing chosen") -> str:
    return json.dumps({"groups": list(groups), "own": dict(own), "empty": empty}).replace("<", "\\u003c")
