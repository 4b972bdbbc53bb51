"""Greys out what cannot be combined, and keeps proposer and draft usable, while a person changes the controls."""

from __future__ import annotations

from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from playground import pairs
from playground.controls_view import ControlsView, gate
from playground.deeplinks import shown
from playground.draft_cards import card
from playground.listening import QUICK
from playground.notes import note
from playground.proposer_picker import MAX_OWN, draft_value, proposer_value, settle

if TYPE_CHECKING:
    from playground.model_thread import ModelThread

_WATCHED = ("mode", "system_mode", "proposer", "draft_length", "tree", "temperature")


def wire_rules(controls: ControlsView, demo: gr.Blocks, models: ModelThread) -> None:
    """Connect the controls that others depend on."""
    parts = controls.parts
    inputs = [parts[name] for name in _WATCHED]
    for name in ("mode", "system_mode", "proposer", "draft_length", "tree"):
        parts[name].change(_refresh, inputs, controls.gated, **QUICK)
    parts["temperature"].change(_refresh, inputs, controls.gated, trigger_mode="always_last", **QUICK)
    chosen = [parts["target"], parts["proposer"], parts["draft"]]
    said = gr.State(None)
    outputs = [
        controls.proposers.offers,
        controls.drafts.offers,
        parts["proposer"],
        parts["draft"],
        controls.draft_line,
        controls.card,
        said,
    ]
    # One listener: answers come in the order of the changes, and the last one is that of what is on the page.
    gr.on(
        [demo.load, *(part.change for part in chosen)],
        partial(_offer, models),
        [*chosen, said],
        outputs,
        trigger_mode="always_last",
        **QUICK,
    )

    def take_own(target: Any, proposer: Any, event: gr.EventData) -> list[Any]:  # Gradio reads its type hints
        pairs.warm_up(models.call)
        return _take_own(target, proposer, event._data.get("name"))

    for picker in (controls.proposers, controls.drafts):
        picker.part.own(
            take_own,
            [parts["target"], parts["proposer"]],
            [parts["proposer"], parts["draft"], controls.draft_line, said],
            **QUICK,
        )


def _refresh(*values: Any) -> list[Any]:
    return gate(dict(zip(_WATCHED, values, strict=True)))


def _offer(models: ModelThread, target: Any, proposer: Any, draft: Any, said: Any) -> list[Any]:
    """What fits the target, and a choice that can be used: what cannot is replaced, with the reason.

    Values that stay are not sent back, so that a slow answer undoes nothing. ``said`` is the choice that the line
    beside the draft is about: it goes with that choice.
    """
    name, who, held = _name(target), _name(proposer), _name(draft)
    if not name:
        return [gr.skip()] * 7
    try:
        pairs.warm_up(models.call)
    except CancelledError:  # the page is being closed
        return [gr.skip()] * 7
    standings = pairs.standings(name, read=True)
    choice = settle(name, who, held, standings=standings)
    now = [name, choice.proposer, choice.draft]
    with_draft = choice.proposer in pairs.WITH_DRAFT
    options = pairs.draft_options(name, choice.proposer, read=True) if with_draft else []
    return [
        proposer_value(name, standings),
        draft_value(name, choice.proposer, choice.draft, options) if with_draft else gr.skip(),
        choice.proposer if choice.proposer != who else gr.skip(),
        choice.draft if choice.draft != held else gr.skip(),
        note(choice.lost, "warning") if choice.lost else gr.skip() if said == now else "",
        card(choice.draft) if with_draft else "",
        now,
    ]


def _take_own(target: Any, proposer: Any, own: Any) -> list[Any]:
    """A draft that somebody typed: chosen with the proposer that it is for, or refused with the reason."""
    name, typed = _name(target), _name(own)
    if not name or not typed:
        return [gr.skip()] * 4
    who = pairs.guess_proposer(typed)
    if pairs.here(typed) is None and proposer in pairs.WITH_DRAFT and who == "draft-model":
        who = proposer  # its name says nothing: it is taken for what is chosen
    fit = pairs.check(name, typed, who)
    if fit.fits is False:
        return [gr.skip(), gr.skip(), note(f"{shown(typed)} does not fit {name}: {fit.reason}", "error"), gr.skip()]
    words = f"{shown(typed)} fits {name}" if fit.fits else fit.reason
    return [who, typed, note(words, "good" if fit.fits else "info"), [name, who, typed]]


def _name(value: Any) -> str:
    return value.strip()[:MAX_OWN] if isinstance(value, str) else ""
