"""Greys out what cannot be combined, while a person changes the controls."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from playground import pairs
from playground.controls_view import ControlsView, gate
from playground.deeplinks import shown
from playground.shell import QUICK

_WATCHED = ("mode", "system_mode", "target", "proposer", "draft", "temperature")


def wire_rules(controls: ControlsView) -> None:
    """Connect the controls that others depend on."""
    parts = controls.parts
    inputs = [parts[name] for name in _WATCHED]
    for name in ("mode", "system_mode", "proposer"):
        parts[name].change(_refresh, inputs, controls.gated, **QUICK)
    parts["temperature"].change(_refresh, inputs, controls.gated, trigger_mode="always_last", **QUICK)
    for name in ("target", "proposer"):
        parts[name].change(
            _offer,
            [parts["target"], parts["proposer"], parts["draft"]],
            [parts["draft"], controls.draft_line],
            **QUICK,
        )


def _refresh(*values: Any) -> list[Any]:
    held = dict(zip(_WATCHED, values, strict=True))
    offered, _ = pairs.draft_choices(_name(held["target"]))
    return gate(held, has_drafts=bool(offered) or bool(held["draft"]))


def _offer(target: Any, proposer: Any, chosen: Any) -> tuple[Any, Any]:
    """Only drafts that fit the target can be chosen; the others are named with the reason."""
    name = _name(target)
    if proposer != "draft-model" or not name:
        return gr.skip(), ""
    offered, left_out = pairs.draft_choices(name, check=True)
    names = [value for _, value in offered]
    lost = ""
    if isinstance(chosen, str) and chosen and chosen not in names:
        reason = pairs.misfit(name, chosen) if pairs.is_here(name) else None
        if reason is None:
            offered.append((chosen, chosen))
            names.append(chosen)
        else:
            lost = f"“{shown(chosen)}” is no longer chosen: {reason}. "
    value = chosen if chosen in names else names[0] if names else None
    return gr.update(choices=offered, value=value), html.escape(lost + left_out)


def _name(target: Any) -> str:
    return target.strip()[:500] if isinstance(target, str) else ""
