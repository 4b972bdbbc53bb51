"""Which drafts fit a target, who can draft for it, and exactly why the others cannot.

Only what is on this machine is read: configurations, tokenizers and the headers of weights. Nothing is downloaded for
an answer; what is not here says so, and is checked when it runs.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from decoder import catalog
from decoder.catalog import ModelEntry
from decoder.errors import RedlineError
from decoder.heads.layout import HEADS

log = logging.getLogger(__name__)

WITH_DRAFT = ("draft-model", *HEADS)
"""The proposers that draft with weights of their own."""
KINDS = {
    "draft-model": "draft model",
    "eagle3": "EAGLE-3 head",
    "eagle": "EAGLE-1/2 head",
    "mtp": "MTP layer",
    "medusa": "Medusa head",
}
"""What each of them drafts with, for a sentence."""

State = Literal["ready", "fetch", "own", "no"]
"""Can be used now; after a download; only with a draft that one names oneself; not at all."""


@dataclass(frozen=True, slots=True)
class Fit:
    """``fits`` None: it cannot be told from here. ``reason`` says why it does not fit, or why that cannot be told."""

    fits: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A named draft for one target and proposer. ``reason`` is empty where it is ready; ``here``: on this machine.

    A ``name`` of "" is the layer in the target's own checkpoint.
    """

    name: str
    size_mb: int
    state: State
    reason: str = ""
    here: bool = True
    note: str = ""
    """In which way it drafts, where that is not plain."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a proposer can draft for a target; ``reason`` is empty where it can without further ado."""

    state: State
    reason: str = ""


_imported = threading.Event()
_reading = threading.Lock()
"""transformers imports its parts when they are first used, and fails where two threads begin that at once."""


def warm_up(on_model_thread: Callable[[Callable[[], None]], object]) -> None:
    """Import what reading needs, once, where models are loaded: nobody else may be importing it meanwhile."""
    if not _imported.is_set():
        on_model_thread(_import)
        _imported.set()


def _import() -> None:
    from decoder import loading

    entry = catalog.find(catalog.DEFAULT_TARGET)
    try:
        if entry is not None and entry.present:
            loading.load_config(entry.name)
            loading.load_tokenizer(entry.name)
    except Exception as error:  # its own run will say what is wrong with it
        log.info("the embedded target cannot be read: %s", error)


# --- one pair -------------------------------------------------------------------------------------------------------


def here(name: str) -> str | None:
    """What to read ``name`` from without a network: itself, or its folder in the Hub's cache. None: it is not here."""
    entry = catalog.find(name)
    if entry is not None and entry.path is not None:
        return name
    try:
        if Path(name).expanduser().exists():
            return name
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json")
    except (OSError, ValueError):  # no name of a file or of a repository
        return None
    return str(Path(config).parent) if isinstance(config, str) else None


def check(target: str, draft: str, proposer: str) -> Fit:
    """Whether ``proposer`` can draft for ``target`` with ``draft``; raises nothing.

    Only a verdict is remembered. What could not be read (a file that is still being copied) may be readable at the next
    try.
    """
    places = here(target), here(draft)
    for name, place in zip((target, draft), places, strict=True):
        if place is None:
            return Fit(None, f"{name} is not here, so it is checked when it runs")
    try:
        with _reading:
            reason = _verdict(str(places[0]), str(places[1]), proposer)
    except RedlineError as error:
        reason = str(error)
    except Exception as error:
        log.exception("checking %s against %s failed", draft, target)
        reason = f"it could not be read ({type(error).__name__})"
    for name, place in zip((target, draft), places, strict=True):
        reason = reason.replace(str(place), name)
    return Fit(not reason, reason)


@functools.lru_cache(maxsize=256)
def _verdict(target: str, draft: str, proposer: str) -> str:
    """The reasons why not, or ""."""
    from decoder import compat

    if proposer in HEADS:
        return "; ".join(compat.check_head(target, draft, proposer))
    layout = compat.head_layout(draft)
    if layout is not None:
        return f"it is {layout.title}, no model of its own: choose the proposer {layout.proposer}"
    return "; ".join(compat.check_pair(target, draft))


def across(target: str, draft: str) -> str:
    """What a draft model with another vocabulary shares with the target, and why it does not fit token for token; ""
    for any other draft, and for what is not here. Raises nothing."""
    places = here(target), here(draft)
    try:
        if places[0] is None or places[1] is None:
            return ""
        return _across(places[0], places[1]).replace(places[0], target).replace(places[1], draft)
    except Exception as error:  # whatever is wrong with it, check() says
        log.info("comparing the vocabularies of %s and %s: %s", target, draft, error)
        return ""


@functools.lru_cache(maxsize=64)
def _across(target: str, draft: str) -> str:
    from decoder.compat import head_layout, pairing

    found = None if head_layout(draft) is not None else pairing(target, draft)
    return f"{found.across}; not token for token: {found.reasons[0]}" if found and found.fits and found.across else ""


def own_layer(target: str) -> Fit:
    """Whether the target's own checkpoint holds an MTP layer; raises nothing."""
    place = here(target)
    if place is None:
        return Fit(None, f"whether {target} has an MTP layer can be told once it is here")
    try:
        with _reading:
            found = _own_layer(place)
    except RedlineError as error:
        return Fit(None, str(error).replace(place, target))
    except Exception as error:
        log.exception("looking for an MTP layer in %s failed", target)
        return Fit(None, f"{target} could not be read ({type(error).__name__})")
    return Fit(found, "" if found else f"no MTP layer in the checkpoint of {target}")


@functools.lru_cache(maxsize=64)
def _own_layer(place: str) -> bool:
    from decoder.heads.files import open_files
    from decoder.heads.layout import find_layout

    files = open_files(place, role="target")
    layout = find_layout(files.config, files.shapes)
    return layout is not None and layout.proposer == "mtp"


def _layers(target: str) -> int | None:
    """Layers of a target that is here, or None."""
    place = here(target)
    if place is None:
        return None
    try:
        from decoder.loading import load_config

        with _reading:
            return int(load_config(place).get_text_config().num_hidden_layers)
    except Exception as error:  # whatever is wrong with it, its own run will say
        log.info("the configuration of %s cannot be read: %s", target, error)
        return None


# --- lists ------------------------------------------------------------------------------------------------------------


def draft_options(target: str, proposer: str, *, read: bool) -> list[DraftOption]:
    """Every named draft of ``proposer``, the usable ones first.

    Without ``read`` no file is opened: a draft that was made for the target counts as fitting.
    """
    options = [_option(entry, target, proposer, read=read) for entry in catalog.drafts_for(proposer)]
    if proposer == "mtp" and read and own_layer(target).fits:
        options.insert(0, DraftOption("", 0, "ready"))
    return sorted(options, key=lambda option: _ORDER.index(option.state))


_ORDER: tuple[State, ...] = ("ready", "fetch", "own", "no")


def _option(entry: ModelEntry, target: str, proposer: str, *, read: bool) -> DraftOption:
    def option(state: State, reason: str = "") -> DraftOption:
        return DraftOption(entry.name, entry.size_mb, state, reason, entry.present)

    made_for = entry.fits == target
    if not entry.present:
        if made_for:
            return option("fetch", f"made for {target}; the first run downloads it ({entry.size_mb:,} MB)")
        return option("no", f"made for {entry.fits}, and not here" if entry.fits else "not here")
    if not read:
        return option("ready") if made_for else option("no", f"made for {entry.fits}" if entry.fits else "not checked")
    fit = check(target, entry.name, proposer)
    if fit.fits is None:
        return option("ready") if made_for else option("no", f"made for {entry.fits}; {fit.reason}")
    if not fit.fits:
        return option("no", fit.reason)
    return replace(option("ready"), note=across(target, entry.name) if proposer == "draft-model" else "")


def standings(target: str, *, read: bool) -> dict[str, Standing]:
    """Whether each proposer can draft for ``target``. Without ``read`` from the catalog alone."""
    found = {}
    for entry in catalog.proposers():
        if entry.name in WITH_DRAFT:
            options = draft_options(target, entry.name, read=read)
            own = own_layer(target) if entry.name == "mtp" and read else None
            found[entry.name] = standing(entry.name, target, options, own)
        elif entry.name == "early-exit" and read and _layers(target) == 1:
            found[entry.name] = Standing("no", f"{target} has a single layer: there is none to leave early")
        else:
            found[entry.name] = Standing("ready")
    return found


def standing(proposer: str, target: str, options: Sequence[DraftOption], own: Fit | None = None) -> Standing:
    """From the drafts of a proposer (and, for MTP, the target's ``own`` layer) to whether it can draft."""
    best = next(iter(sorted(options, key=lambda option: _ORDER.index(option.state))), None)
    if best is not None and best.state == "ready":
        return Standing("ready")
    if best is not None and best.state == "fetch":
        return Standing("fetch", f"{best.name} is {best.reason}")
    if own is not None and own.fits is None:
        return Standing("fetch", own.reason)
    kind = KINDS.get(proposer, "draft")
    refused = [option for option in options if option.here]
    if not refused:
        none = f"no {kind} for {target} is here"
        return Standing("own", f"{own.reason}, and none that was trained for it is here" if own is not None else none)
    more = f" ({len(refused) - 1} more do not fit either)" if len(refused) > 1 else ""
    reason = f"no {kind} here fits {target}; {refused[0].name}: {refused[0].reason}{more}"
    return Standing("own", f"{own.reason}, and {reason}" if own is not None else reason)


def is_left_over(draft: str, proposer: str) -> bool:
    """True for a draft of the catalog that was made for another proposer: the choice that the last proposer left."""
    entry = catalog.find(draft)
    return entry is not None and entry.kind == "draft" and entry.proposer != proposer


def best_draft(options: Sequence[DraftOption]) -> str:
    """The draft to choose where none was, or "" where none can be used."""
    return next((option.name for option in options if option.state in ("ready", "fetch")), "")


def guess_proposer(draft: str) -> str:
    """Who would draft with ``draft``, a name that somebody typed: read from its files, else guessed from its name."""
    entry = catalog.find(draft)
    if entry is not None:
        return entry.proposer
    place = here(draft)
    if place is not None:
        try:
            from decoder import compat

            layout = compat.head_layout(place)
            return layout.proposer if layout else "draft-model"
        except RedlineError:
            return "draft-model"
    name = draft.lower()
    return next((p for word, p in _WORDS if word in name), "draft-model")


_WORDS = (("eagle3", "eagle3"), ("eagle-3", "eagle3"), ("eagle", "eagle"), ("medusa", "medusa"), ("mtp", "mtp"))
