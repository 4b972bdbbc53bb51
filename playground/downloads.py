"""Downloads without a folder that is served: the text goes to the browser, which makes the file itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from playground.listening import JS_ONLY, QUICK
from playground.notes import note

_SAVE = "(payload) => { window.RedlineShell.download(payload); return []; }"
TYPES = {"json": "application/json", "csv": "text/csv"}


class Download:
    """A hidden carrier for one file at a time."""

    def __init__(self, elem_id: str) -> None:
        self.carrier = gr.Textbox(visible="hidden", elem_id=elem_id, max_lines=1)

    def wire(
        self,
        button: gr.Button,
        make: Callable[..., tuple[str, str]],
        inputs: Any,
        note_line: gr.HTML,
        js: str | None = None,
    ) -> None:
        """On a click of ``button``, ``make(*inputs)`` gives file name and text; a RedlineError becomes a note."""

        def prepare(*values: Any) -> tuple[str, str]:
            try:
                name, text = make(*values)
            except RedlineError as error:
                return "", note(str(error), "error")
            kind = TYPES.get(name.rpartition(".")[2], "text/plain")
            return json.dumps({"name": name, "type": kind, "text": text}), note(f"{name} is in your downloads", "good")

        button.click(
            prepare,
            inputs,
            [self.carrier, note_line],
            js=js,
            **QUICK,
        ).then(None, self.carrier, None, js=_SAVE, **JS_ONLY)
