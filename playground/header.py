"""The line above the tabs: what this is, who you are, and what the model is doing."""

from __future__ import annotations

import html
from collections.abc import Callable

import gradio as gr

from playground.authors import ANONYMOUS, MAX_AUTHOR, clean_author
from playground.listening import QUICK
from playground.model_thread import Status

_BRAND = '<a class="rl-brand" href="./" aria-label="Redline, start page"><s>draft</s>&thinsp;<b>Redline</b></a>'
_SHOWN = {"idle": "○", "loading": "◐", "ready": "●", "failed": "✕"}


def status_html(status: Status) -> str:
    """The model's state: a sign, words, and a bar while it loads."""
    bar = ""
    if status.state == "loading" and status.fraction is not None:
        share = round(100 * status.fraction)
        bar = f'<span class="rl-bar" aria-hidden="true"><span style="width:{share}%"></span></span>'
    sign = f'<span class="rl-status-dot" aria-hidden="true">{_SHOWN[status.state]}</span>'
    text = html.escape(status.text)
    if status.detail:
        text += f'<span class="rl-status-detail"> · {html.escape(status.detail)}</span>'
    return f'<div class="rl-status-line rl-is-{status.state}" role="status">{sign}<span>{text}</span>{bar}</div>'


class Header:
    """Builds the header where it is called. ``name`` holds the typed author, kept in the visitor's browser."""

    def __init__(self, status: Status, *, signed_in: bool) -> None:
        with gr.Row(elem_id="rl-header", elem_classes="rl-header"):
            gr.HTML(_BRAND, elem_id="rl-brand")
            self.status = gr.HTML(status_html(status), elem_id="rl-status", elem_classes="rl-status")
            self.name = gr.Textbox(
                label="Your name",
                placeholder=f"your name ({ANONYMOUS})",
                max_length=MAX_AUTHOR,
                max_lines=1,
                container=False,
                show_label=False,
                elem_id="rl-name",
                visible=not signed_in,
                html_attributes=gr.InputHTMLAttributes(autocomplete="off", spellcheck=False, autocorrect="off"),
            )
            self.who = gr.HTML("", elem_id="rl-who", visible=signed_in)
        # The secret only hides the name from a glance at the browser's storage; it is no credential.
        self.kept = gr.BrowserState("", storage_key="redline-name", secret="redline")
        self.tick = gr.Timer(0.7)

    def wire(self, demo: gr.Blocks, status: Callable[[], Status]) -> None:
        """Keep the name in the browser and the status line up to date until the model is there."""

        def restore(kept: object, request: gr.Request) -> tuple[str, str, str]:
            typed = clean_author(kept)
            who = html.escape(clean_author(request.username)) if request.username else ""
            signed = f'<span class="rl-who">signed in as <b>{who}</b></span>' if who else ""
            return "" if typed == ANONYMOUS else typed, signed, status_html(status())

        def keep(typed: str) -> str:
            name = clean_author(typed)
            return "" if name == ANONYMOUS else name

        def tell() -> tuple[str, object]:
            now = status()
            # Once nothing moves any more a slow look is enough; a later load is shown by the run that causes it.
            return status_html(now), gr.Timer(0.7 if now.state in ("idle", "loading") else 5.0)

        demo.load(restore, self.kept, [self.name, self.who, self.status], **QUICK)
        self.name.change(keep, self.name, self.kept, **QUICK)
        self.tick.tick(tell, None, [self.status, self.tick], **QUICK)
