"""Addresses carry the view: ``/?run=ID&step=N&token=M``, ``/?compare=ID,ID``, ``/?tab=history``.

Everything in an address comes from a stranger: it is checked here, and what is wrong becomes a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoder.errors import RedlineError

MAX_COMPARE = 12
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class View:
    """What an address asks for. ``problem`` is a sentence about the part that could not be used."""

    tab: str = "playground"
    run_id: str | None = None
    compare: tuple[str, ...] = ()
    problem: str | None = None


def is_run_id(value: Any) -> bool:
    """True for text that can be a run's id."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def shown(value: str, limit: int = 60) -> str:
    """Foreign text made short and visible, for a sentence that quotes it. Still to be escaped where it is shown."""
    visible = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value[: limit + 1])
    return visible[:limit] + "…" if len(visible) > limit else visible


def parse_view(params: Mapping[str, Any], tabs: Sequence[str]) -> View:
    """Read an address's query. Never raises: an unusable part is named in ``problem``."""
    run = params.get("run")
    compare = params.get("compare")
    tab = params.get("tab")
    if isinstance(compare, str) and compare:
        ids = tuple(dict.fromkeys(part.strip() for part in compare.split(",") if part.strip()))
        wrong = next((part for part in ids if not is_run_id(part)), None)
        if wrong is not None:
            return View(tab="compare", problem=f"“{shown(wrong)}” in the address is not a run's id.")
        if len(ids) > MAX_COMPARE:
            return View(tab="compare", problem=f"The address names {len(ids)} runs; {MAX_COMPARE} fit side by side.")
        return View(tab="compare", compare=ids)
    if isinstance(run, str) and run:
        if not is_run_id(run):
            return View(problem=f"“{shown(run)}” in the address is not a run's id.")
        return View(run_id=run)
    if isinstance(tab, str) and tab:
        if tab not in tabs:
            return View(problem=f"There is no tab “{shown(tab)}”; there are {', '.join(tabs)}.")
        return View(tab=tab)
    return View()


def read_ids(payload: Any, limit: int = 10_000) -> tuple[str, ...]:
    """Run ids that came back from the browser, checked and without repeats; raises RedlineError for anything else."""
    if not isinstance(payload, list | tuple) or len(payload) > limit:
        raise RedlineError("the selection that came from the browser is not a list of run ids")
    if not all(is_run_id(item) for item in payload):
        raise RedlineError("the selection that came from the browser holds something that is not a run's id")
    return tuple(dict.fromkeys(payload))
