"""Which proposers a comparison can hold, and the request of each: the Playground's settings with another drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoder.errors import RedlineError, RequestError
from decoder.request import GenerationRequest
from playground.comparing import DRAFT_PREFIX, proposer_options
from playground.controls import to_request
from playground.deeplinks import shown

MAX_PROPOSERS = 11
"""With the baseline, twelve runs stand side by side."""


def offered(target: Any, draft: Any) -> list[tuple[str, str]]:
    """Label and value of what can be compared for ``target``; a draft that was typed in the Playground is among it."""
    name = target.strip() if isinstance(target, str) else ""
    options = proposer_options(name)
    typed = draft.strip() if isinstance(draft, str) else ""
    if typed and DRAFT_PREFIX + typed not in [value for _, value in options]:
        first = next((i for i, (_, value) in enumerate(options) if not value.startswith(DRAFT_PREFIX)), len(options))
        options.insert(first, (f"Draft model: {shown(typed)}", DRAFT_PREFIX + typed))
    return options


def by_proposer(values: Mapping[str, Any], chosen: Any) -> list[tuple[str, GenerationRequest]]:
    """A request for each chosen proposer, with its own settings from the controls (n-gram sizes, exit layer, text).

    Raises RequestError with one sentence for a choice that cannot be run.
    """
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or len(chosen) < 2:
        raise RequestError("tick at least two proposers to compare")
    if len(chosen) > MAX_PROPOSERS:
        raise RequestError("eleven proposers are the most that fit into one comparison")
    plain = to_request({**values, "proposer": "none"})  # a mistake in what all share is not blamed on one of them
    labels = {value: label for label, value in offered(plain.target, values.get("draft"))}
    variants = []
    for value in chosen:
        if value not in labels:
            raise RequestError(f"{str(value)[:60]!r} is not offered for {plain.target}: choose again")
        own = {"proposer": value}
        if value.startswith(DRAFT_PREFIX):
            own = {"proposer": "draft-model", "draft": value.removeprefix(DRAFT_PREFIX)}
        try:
            variants.append((labels[value], to_request({**values, **own})))
        except RedlineError as error:
            raise RequestError(f"{labels[value]}: {error}") from None
    return variants
