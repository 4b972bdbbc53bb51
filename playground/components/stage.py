"""The parts of the stage as Gradio components: empty containers that the browser-side store draws into.

Token text never enters a template: Gradio would evaluate it. The only value that crosses is the feed's text, and it is
handed to ``Redline.feed`` as a string.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

_MOUNT = """
(window.RedlineWaiting = window.RedlineWaiting || []).push(() => window.Redline.mount(element));
"""

_FEED = """
const hand = () => window.Redline.feed(props.value || "");
(window.RedlineWaiting = window.RedlineWaiting || []).push(hand);
watch('value', () => { if (window.Redline && window.Redline.feed) hand(); });
"""

_COMPARE = """
const draw = () => window.Redline.compare.draw(element.querySelector('[data-rl-compare]'), props.value || "");
(window.RedlineWaiting = window.RedlineWaiting || []).push(draw);
watch('value', () => { if (window.Redline && window.Redline.compare) draw(); });
"""


def _view(name: str, label: str, elem_id: str | None, **kwargs: Any) -> gr.HTML:
    return gr.HTML(
        html_template=f'<section class="rl-panel rl-{name}" data-rl="{name}" aria-label="{label}"></section>',
        js_on_load=_MOUNT,
        apply_default_css=False,
        elem_id=elem_id or f"rl-{name}",
        elem_classes=["rl-view"],
        **kwargs,
    )


def feed(value: str = "", elem_id: str = "rl-feed") -> gr.HTML:
    """The hidden carrier of the feed (NDJSON of ``playground.feed``): set its value, and the whole stage follows."""
    return gr.HTML(
        value=value,
        html_template='<div class="rl-feed"></div>',
        js_on_load=_FEED,
        apply_default_css=False,
        visible="hidden",
        elem_id=elem_id,
    )


def answer(elem_id: str | None = None) -> gr.HTML:
    """The answer as an edited manuscript, with its legend and switches."""
    return _view("answer", "Answer", elem_id)


def numbers(elem_id: str | None = None) -> gr.HTML:
    """Five headline numbers, the break-even sentence, the time split and the smaller facts."""
    return _view("numbers", "Numbers", elem_id)


def scrubber(elem_id: str | None = None) -> gr.HTML:
    """Play, pause, step: directly above the ladder it joins the ladder's card."""
    return _view("scrubber", "Replay", elem_id)


def ladder(elem_id: str | None = None) -> gr.HTML:
    """One row per step."""
    return _view("ladder", "Step by step", elem_id)


def why(elem_id: str | None = None) -> gr.HTML:
    """The selected token explained."""
    return _view("why", "Why", elem_id)


def race(elem_id: str | None = None) -> gr.HTML:
    """The run and its baseline on one clock."""
    return _view("race", "Race", elem_id)


def compare(value: str = "", elem_id: str = "rl-compare") -> gr.HTML:
    """Several runs token under token. ``value`` is the JSON of ``playground.align.compare_value``."""
    return gr.HTML(
        value=value,
        html_template='<section class="rl-panel rl-compare" data-rl-compare aria-label="Texts side by side"></section>',
        js_on_load=_COMPARE,
        apply_default_css=False,
        elem_id=elem_id,
        elem_classes=["rl-view"],
    )
