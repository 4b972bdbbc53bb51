"""A picker as a Gradio component: a button that opens a list by groups, each entry with its sentence and its state.

Its value is the chosen name and is set in the browser at once; what it offers comes through a hidden carrier, as JSON
of ``playground.proposer_picker``.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

_ON_LOAD = """
(window.RedlineWaiting = window.RedlineWaiting || []).push(() =>
  window.Redline.picker(element.querySelector('.rl-picker'), props, watch, (name, data) => trigger(name, data)));
/* events: 'own' {name} */
"""
_CARRY = """
const hand = () => window.Redline.pickerOffers('NAME', props.value || '');
(window.RedlineWaiting = window.RedlineWaiting || []).push(hand);
watch('value', () => { if (window.Redline && window.Redline.pickerOffers) hand(); });
"""


class Picker:
    """Builds the picker where it is called. ``part`` holds the choice, ``offers`` what can be chosen; listen to
    ``part.change`` and, for a name that was typed, to ``part.own`` (``event._data["name"]``)."""

    def __init__(self, name: str, label: str, value: str, offers: str, *, visible: bool = True) -> None:
        # Nothing but these two constants enters the template: Gradio evaluates it.
        self.part: Any = gr.HTML(
            value=value,
            html_template=f'<div class="rl-picker" data-name="{name}" data-label="{label}"></div>',
            js_on_load=_ON_LOAD,
            apply_default_css=False,
            visible=visible,
            elem_id=f"rl-{name}",
        )
        self.offers = gr.HTML(
            value=offers,
            html_template="<div></div>",
            js_on_load=_CARRY.replace("NAME", name),
            apply_default_css=False,
            visible="hidden",
            elem_id=f"rl-{name}-offers",
        )
