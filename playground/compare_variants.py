"""Which proposers and drafts a comparison can hold, why others cannot, and the request of each: the Playground's
settings with another drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoder import catalog
from decoder.errors import RedlineError, RequestError
from decoder.request import GenerationRequest
from playground import pairs
from playground.controls import to_request
from playground.deeplinks import shown
from playground.pairs import WITH_DRAFT, DraftOption

MAX_PROPOSERS = 11
"""With the baseline, twelve runs stand side by side."""


@dataclass(frozen=True, slots=True)
class Variants:
    """What will run, by title; and one sentence for each choice that cannot."""

    requests: tuple[tuple[str, GenerationRequest], ...]
    refused: tuple[str, ...] = ()


def offered(target: Any, draft: Any, *, read: bool = False) -> list[tuple[str, str]]:
    """Label and value of what can be compared for ``target``, by family; a value is ``proposer`` or ``proposer:draft``.

    With ``read``, a draft that was typed in the Playground is among it; without, no file is opened.
    """
    name = target.strip() if isinstance(target, str) else ""
    typed = draft.strip() if isinstance(draft, str) and read else ""
    own = typed and catalog.find(typed) is None and pairs.guess_proposer(typed)
    standings = pairs.standings(name, read=read)
    found = []
    for entry in _by_family():
        if entry.name not in WITH_DRAFT:
            if entry.name != "none" and standings[entry.name].state != "no":
                found.append((entry.title, entry.name))
            continue
        options = [o for o in pairs.draft_options(name, entry.name, read=read) if o.state in ("ready", "fetch")]
        if own == entry.name and pairs.check(name, typed, own).fits is not False:
            options.append(DraftOption(typed, 0, "fetch"))
        for option in options:
            label = f"{entry.title}: {shown(option.name) or 'the target’s own layer'}"
            found.append((label, f"{entry.name}:{option.name}"))
    return found


def left_out(target: Any, *, read: bool = False) -> list[tuple[str, str]]:
    """Title and reason of every proposer that cannot be compared for ``target``."""
    name = target.strip() if isinstance(target, str) else ""
    standings = pairs.standings(name, read=read)
    return [
        (entry.title, standings[entry.name].reason)
        for entry in _by_family()
        if standings[entry.name].state in ("own", "no")
    ]


def _by_family() -> list[catalog.ProposerEntry]:
    from playground.proposer_picker import FAMILIES

    order = list(FAMILIES)
    return sorted(
        catalog.proposers(), key=lambda entry: order.index(entry.family) if entry.family in order else len(order)
    )


def by_proposer(values: Mapping[str, Any], chosen: Any, *, read: bool = False) -> Variants:
    """A request for each chosen proposer, with its own settings from the controls (n-gram sizes, exit layer, text).

    One that cannot be run is refused with its reason, and the rest go on. Raises RequestError with one sentence where
    the choice is none, or where nothing is left to run.
    """
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or len(chosen) < 2:
        raise RequestError("tick at least two proposers to compare")
    if len(chosen) > MAX_PROPOSERS:
        raise RequestError("eleven proposers are the most that fit into one comparison")
    plain = to_request({**values, "proposer": "none"})  # a mistake in what all share is not blamed on one of them
    labels = {value: label for label, value in offered(plain.target, values.get("draft"), read=read)}
    requests, refused = [], []
    for value in chosen:
        if value not in labels:
            raise RequestError(f"{str(value)[:60]!r} is not offered for {plain.target}: choose again")
        proposer, _, draft = value.partition(":")
        try:
            requests.append((labels[value], to_request({**values, "proposer": proposer, "draft": draft})))
        except RedlineError as error:
            refused.append(f"{labels[value]}: {error}")
    if not requests:
        raise RequestError("; ".join(refused))
    return Variants(tuple(requests), tuple(refused))
