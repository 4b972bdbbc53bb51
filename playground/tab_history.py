"""History: every run, found by what it was, kept in order, opened, compared, run again, carried away and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from decoder.request import GenerationRequest
from playground import history_actions as act
from playground.authors import author_of
from playground.deeplinks import View, is_run_id, read_ids
from playground.downloads import Download
from playground.history_list import NO_FILTER, START, RunList
from playground.listening import LIGHT, QUICK
from playground.notes import note
from playground.plans import plan_run
from playground.playing import Ticket
from playground.saving import Label
from playground.shell import Shell, TabSpec

ID = "history"


def with_selection(inputs: int) -> str:
    """JavaScript that puts the browser's selection in place of the first of ``inputs`` values."""
    return f"(...values) => [window.RedlineShell.selection(), ...values.slice(1, {inputs})]"


class HistoryTab:
    """Filters, what to do with the selection, the table, its pages, and the details of one run."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.store = shell.store
        self.list = RunList(shell.store)

    # --- layout -----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the components."""
        with gr.Column(elem_id="rl-history", elem_classes="rl-history"):
            self.list.build_filters()
            with gr.Row(elem_id="rl-history-actions", elem_classes="rl-actions"):
                self.chosen = gr.HTML(_chosen_line(0), elem_id="rl-chosen", elem_classes="rl-chosen")
                self.open = gr.Button("Open", size="sm", interactive=False, elem_id="rl-do-open")
                self.compare = gr.Button("Compare", size="sm", interactive=False, elem_id="rl-do-compare")
                self.again = gr.Button("Run again", size="sm", interactive=False, elem_id="rl-do-again")
                self.archive = gr.Button("Archive", size="sm", interactive=False, elem_id="rl-do-archive")
                self.restore = gr.Button("Bring back", size="sm", visible=False, elem_id="rl-do-restore")
                self.as_json = gr.Button("Export JSON", size="sm", interactive=False, elem_id="rl-do-json")
                self.as_csv = gr.Button("Export CSV", size="sm", interactive=False, elem_id="rl-do-csv")
                self.delete = gr.Button("Delete…", size="sm", interactive=False, elem_id="rl-do-delete")
                self.upload = gr.UploadButton(
                    "Import JSON", file_types=[".json"], type="filepath", size="sm", elem_id="rl-do-import"
                )
                self.reload = gr.Button("Refresh", size="sm", elem_id="rl-do-refresh")
            with gr.Row(visible=False, elem_id="rl-confirm", elem_classes="rl-confirm") as self.confirm:
                self.question = gr.HTML("")
                self.yes = gr.Button("Delete for good", variant="stop", size="sm", elem_id="rl-do-delete-yes")
                self.no = gr.Button("Keep", size="sm", elem_id="rl-do-delete-no")
            self.note = gr.HTML("", elem_id="rl-history-note", elem_classes="rl-note-line")
            with gr.Row(visible=False, elem_id="rl-details", elem_classes="rl-card") as self.details:
                self.name = gr.Textbox(label="Name", max_length=200, elem_id="rl-edit-name")
                self.tags = gr.Textbox(label="Tags, separated by commas", elem_id="rl-edit-tags")
                self.remark = gr.Textbox(label="Note", lines=1, max_lines=8, elem_id="rl-edit-note")
                self.save = gr.Button("Save", size="sm", variant="primary", elem_id="rl-do-save")
            self.list.build_table()
        self.picked = gr.Textbox("[]", visible="hidden", elem_id="rl-picked")
        self.download = Download("rl-history-download")
        self.load_outputs: list[Any] = [*self.list.outputs(self.note), *self.list.offered]

    def _choice_outputs(self) -> list[Any]:
        buttons = [
            self.open,
            self.compare,
            self.again,
            self.archive,
            self.restore,
            self.as_json,
            self.as_csv,
            self.delete,
        ]
        return [self.chosen, *buttons, self.confirm, self.details, self.name, self.tags, self.remark]

    # --- events -----------------------------------------------------------------------------------------------

    def wire(self) -> None:
        """Connect everything."""
        self.list.wire(self.note, [self.reload.click, self.shell.panes[ID].select])
        self.list.table.pick(self.pick, None, self._choice_outputs(), trigger_mode="always_last", **QUICK)
        self._wire_actions()

    def _wire_actions(self) -> None:
        shell, picked = self.shell, self.picked
        stage = shell.built["playground"]
        opened = [*stage.stage_outputs, shell.tabs, self.note]
        self.list.table.open_run(self.open_row, None, opened, **QUICK)
        self.open.click(self.open_picked, picked, opened, js=with_selection(1), **QUICK)
        self.again.click(
            self.run_again,
            [picked, shell.header.name],
            [*stage.controls.ordered, *stage.ticket_outputs, shell.tabs, self.note],
            js=with_selection(2),
            **LIGHT,
        )
        changed = [*self.list.outputs(self.note), *self._choice_outputs()]
        inputs = [picked, *self.list.inputs]
        js = with_selection(len(inputs))
        self.archive.click(self.archive_picked, inputs, changed, js=js, **QUICK)
        self.restore.click(self.restore_picked, inputs, changed, js=js, **QUICK)
        self.delete.click(
            self.ask_delete, picked, [self.confirm, self.question, self.note], js=with_selection(1), **QUICK
        )
        self.no.click(_hide, None, self.confirm, **QUICK)
        self.yes.click(self.delete_picked, inputs, changed, js=js, **QUICK)
        words = [picked, self.name, self.tags, self.remark, *self.list.inputs]
        self.save.click(self.save_words, words, self.list.outputs(self.note), js=with_selection(len(words)), **QUICK)
        self.upload.upload(
            self.import_file,
            [self.upload, shell.header.name, *self.list.inputs],
            [*self.list.outputs(self.note), *self.list.offered, *self._choice_outputs()],
            **QUICK,
        )
        self.download.wire(self.as_json, self.json_file, picked, self.note, js=with_selection(1))
        self.download.wire(self.as_csv, self.csv_file, picked, self.note, js=with_selection(1))

    def on_load(self, view: View) -> list[Any]:
        """The first page, when the address asks for this tab; otherwise it is filled when the tab is chosen."""
        if view.tab != ID:
            return [gr.skip()] * len(self.load_outputs)
        said = note(view.problem, "error") if view.problem else ""
        return [*self.list.listing(dict(START), NO_FILTER, said=said), *self.list.offers()]

    # --- the selection ----------------------------------------------------------------------------------------

    def pick(self, event: gr.EventData) -> list[Any]:
        """The selection changed in the browser."""
        payload = event._data if isinstance(event._data, dict) else {}
        try:
            return self._chosen(read_ids(payload.get("selected")))
        except RedlineError:
            return self._chosen(())

    def _chosen(self, ids: Sequence[str]) -> list[Any]:
        one, some = len(ids) == 1, bool(ids)
        summary = None
        if one:
            try:
                summary = act.summary_of(self.store, ids[0])
            except RedlineError:
                one = False
        words = ["", "", ""] if summary is None else [summary.name, ", ".join(summary.tags), summary.note]
        archived = summary is not None and summary.archived
        enabled = [one, len(ids) >= 2, one, some]
        return [
            _chosen_line(len(ids)),
            *(gr.update(interactive=on) for on in enabled),
            gr.update(visible=some and (archived or not one)),
            *(gr.update(interactive=some) for _ in range(3)),
            gr.update(visible=False),
            gr.update(visible=summary is not None),
            *words,
        ]

    # --- actions ----------------------------------------------------------------------------------------------

    def open_row(self, event: gr.EventData, request: gr.Request) -> list[Any]:
        """A click on a run's name."""
        payload = event._data if isinstance(event._data, dict) else {}
        return self._open(request, payload.get("id"))

    def open_picked(self, request: gr.Request, picked: str) -> list[Any]:
        """The button Open."""
        try:
            return self._open(request, act.one_of(act.read_selection(picked), "open"))
        except RedlineError as error:
            return self._not_opened(str(error))

    def _open(self, request: gr.Request, run_id: Any) -> list[Any]:
        if self.shell.service.is_busy(request.session_hash or ""):
            return self._not_opened("a run of yours is going on: stop it or wait for its end, then open another")
        shown = self.shell.built["playground"].show(run_id)
        if isinstance(shown, str):
            return self._not_opened(shown)
        return [*shown, gr.Tabs(selected="playground"), ""]

    def _not_opened(self, sentence: str) -> list[Any]:
        outputs = len(self.shell.built["playground"].stage_outputs) + 1
        return [*[gr.skip()] * outputs, note(sentence, "error")]

    def run_again(self, request: gr.Request, picked: str, typed: str) -> list[Any]:
        """The same request once more; the controls show it."""
        stage = self.shell.built["playground"]
        outputs = len(stage.controls.ordered) + len(stage.ticket_outputs) + 1
        try:
            if self.shell.service.is_busy(request.session_hash or ""):
                raise RedlineError("a run of yours is going on: stop it first, then run another again")
            stored = self.store.get_run(act.one_of(act.read_selection(picked), "run it again")).run
            wanted = GenerationRequest.from_json(stored.request)
        except RedlineError as error:
            return [*[gr.skip()] * outputs, note(str(error), "error")]
        label = Label(author=author_of(request.username, typed))
        baseline = stored.baseline_id is not None
        ticket = Ticket(tuple(plan_run(wanted, baseline=baseline)), label)
        return [
            *stage.fill(wanted, baseline=baseline),
            *stage.accept(request, ticket),
            gr.Tabs(selected="playground"),
            "",
        ]

    def archive_picked(self, picked: str, view: dict[str, Any], *values: Any) -> list[Any]:
        """Put the selected runs away."""
        return self._change(picked, view, values, True)

    def restore_picked(self, picked: str, view: dict[str, Any], *values: Any) -> list[Any]:
        """Bring the selected runs back."""
        return self._change(picked, view, values, False)

    def _change(self, picked: str, view: dict[str, Any], values: Sequence[Any], away: bool) -> list[Any]:
        word = "archived" if away else "brought back"
        try:
            number = self.store.archive(act.some_of(act.read_selection(picked), "archive"), away)
        except RedlineError as error:
            return self._unchanged(view, error)
        said = note(f"{act.runs(number)} {word}" + (": choose Show “archived” to see them" if away else ""), "good")
        return [*self.list.listing(view, values, keep=[], said=said), *self._chosen(())]

    def ask_delete(self, picked: str) -> list[Any]:
        """Nothing is deleted without a second, named yes."""
        try:
            ids = act.some_of(act.read_selection(picked), "delete")
        except RedlineError as error:
            return [gr.update(visible=False), "", note(str(error), "error")]
        question = f"Delete {act.runs(len(ids))} with all steps? This cannot be undone."
        return [gr.update(visible=True), note(question, "warning"), ""]

    def delete_picked(self, picked: str, view: dict[str, Any], *values: Any) -> list[Any]:
        """Delete what is selected now."""
        try:
            number = self.store.delete(act.some_of(act.read_selection(picked), "delete"))
        except RedlineError as error:
            return self._unchanged(view, error)
        said = note(f"{act.runs(number)} deleted", "good")
        return [*self.list.listing(view, values, keep=[], said=said), *self._chosen(())]

    def _unchanged(self, view: dict[str, Any], error: RedlineError) -> list[Any]:
        untouched = [gr.skip()] * len(self._choice_outputs())
        return [*[gr.skip()] * 4, view, note(str(error), "error"), *untouched]

    def save_words(
        self, picked: str, name: str, tags: str, remark: str, view: dict[str, Any], *values: Any
    ) -> list[Any]:
        """Store name, tags and note of the selected run."""
        try:
            run_id = act.one_of(act.read_selection(picked), "name it")
            said = act.describe(self.store, run_id, name.strip(), tags, remark)
        except RedlineError as error:
            return [*[gr.skip()] * 4, view, note(str(error), "error")]
        return self.list.listing(view, values, said=note(said, "good"))

    def import_file(self, request: gr.Request, path: str, typed: str, view: dict[str, Any], *values: Any) -> list[Any]:
        """Take in an export; what was imported is selected, so that it is found at once."""
        try:
            said, ids = act.take_in(self.store, path, author_of(request.username, typed))
        except RedlineError as error:
            untouched = [gr.skip()] * (5 + len(self._choice_outputs()))
            return [*[gr.skip()] * 4, view, note(f"nothing was imported: {error}", "error"), *untouched]
        kept = [run_id for run_id in ids if is_run_id(run_id)]
        listed = self.list.listing({**view, "offset": 0}, values, keep=kept, said=note(said, "good"))
        return [*listed, *self.list.offers(), *self._chosen(kept)]

    def json_file(self, picked: str) -> tuple[str, str]:
        """The selected runs, complete."""
        return act.export(self.store, act.read_selection(picked), "json")

    def csv_file(self, picked: str) -> tuple[str, str]:
        """The selected runs, one row each."""
        return act.export(self.store, act.read_selection(picked), "csv")


def _chosen_line(number: int) -> str:
    return f"<b>{number:,}</b> selected" if number else "Tick runs to act on them"


def _hide() -> Any:
    return gr.update(visible=False)


TAB = TabSpec(ID, "History", 30, HistoryTab)
