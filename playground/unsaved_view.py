"""The two buttons that appear when runs could not be saved: try again, or take them along as a file."""

from __future__ import annotations

from typing import Any

import gradio as gr

from playground.deeplinks import is_run_id
from playground.downloads import Download
from playground.history_view import export_name
from playground.listening import QUICK
from playground.notes import note
from playground.service import ModelService


class UnsavedRow:
    """Watches ``shown``, a component that holds the ids of the runs on show (comma-separated)."""

    def __init__(self, service: ModelService, elem_id: str) -> None:
        self.service = service
        with gr.Row(visible=False, elem_id=elem_id, elem_classes="rl-actions") as self.row:
            self.again = gr.Button("Try to save again", size="sm")
            self.take = gr.Button("Download what is not saved", size="sm")
        self.download = Download(f"{elem_id}-download")

    def wire(self, shown: gr.Textbox, line: gr.HTML) -> None:
        """Connect the row to the runs on show and to the ``line`` that says what happened."""
        shown.change(self.look, shown, self.row, **QUICK)
        self.again.click(self.try_saving, shown, [line, self.row], **QUICK)
        self.download.wire(self.take, self.file, shown, line)

    def look(self, shown: Any) -> Any:
        """Visible while one of the runs on show, or their baseline, is not saved."""
        return gr.update(visible=any(self.service.unsaved.concerns(run_id) for run_id in ids_of(shown)))

    def try_saving(self, shown: Any) -> tuple[Any, Any]:
        """Save what the database refused; stops at the first that it refuses again."""
        for run_id in ids_of(shown):
            problem = self.service.save_again(run_id) if self.service.unsaved.concerns(run_id) else None
            if problem:
                return note(f"still not saved: {problem}", "error"), gr.skip()
        return note("saved", "good"), gr.update(visible=False)

    def file(self, shown: Any) -> tuple[str, str]:
        """File name and text with every run that is not saved."""
        ids, text = self.service.unsaved.export(*ids_of(shown))
        return export_name(ids, "json"), text


def ids_of(shown: Any) -> list[str]:
    """The run ids in what a page sent."""
    return [part for part in str(shown or "").split(",")[:64] if is_run_id(part)]
