"""The Playground: a prompt goes in, the edit becomes visible."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from decoder.request import GenerationRequest
from decoder.trace import Run
from playground.authors import author_of
from playground.control_rules import wire_rules
from playground.controls import CONTROLS, from_request, to_request
from playground.controls_view import ControlsView
from playground.deeplinks import View, is_run_id
from playground.downloads import Download
from playground.example_prompts import EXAMPLES, Example
from playground.history_view import export_name
from playground.listening import JS_ONLY, LIGHT, MODEL_WORK, QUICK
from playground.notes import note, people_before
from playground.pace import is_beside
from playground.plans import plan_run
from playground.playing import Ticket, frames
from playground.queue_position import people_ahead
from playground.run_charts import ONE_RUN, RunCharts
from playground.saving import Label
from playground.shell import Shell, TabSpec
from playground.stage import Stage
from playground.stored_view import find_stored, show_example, stored_view
from storage import RunFilter

ID = "playground"
_KEEP = "(id) => { window.RedlineShell.keepRun(id); return []; }"


def start_request(target: str) -> GenerationRequest:
    """What the controls hold at first: the shipped draft if there is one, else n-gram lookup."""
    from decoder import catalog

    draft = catalog.default_draft(target)
    return GenerationRequest(
        prompt=EXAMPLES[0].prompt,
        target=target,
        proposer="draft-model" if draft else "ngram",
        draft=draft,
        max_new_tokens=96,
    )


class PlaygroundTab:
    """Controls at the left, what happened in the centre, why at the right."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.service = shell.service
        self.stage = Stage()

    # --- layout -----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the components."""
        with gr.Row(elem_id="rl-columns", elem_classes="rl-columns"):
            with gr.Column(scale=3, min_width=260, elem_id="rl-left", elem_classes="rl-left rl-card"):
                self.controls = ControlsView(start_request(self.shell.default_target))
                self.note = gr.HTML("", elem_id="rl-note", elem_classes="rl-note-line")
                self.more = gr.Button(
                    "Compare draft lengths or proposers", size="sm", elem_id="rl-to-compare", elem_classes="rl-link"
                )
                with gr.Row(visible=False, elem_id="rl-unsaved", elem_classes="rl-actions") as self.unsaved:
                    self.save_again = gr.Button("Try to save again", size="sm")
                    self.keep_file = gr.Button("Download this run", size="sm")
                with gr.Row(elem_classes="rl-run-row"):
                    self.run = gr.Button("Run", variant="primary", elem_id="rl-run", elem_classes="rl-run")
                    self.stop = gr.Button("Stop", elem_id="rl-stop", elem_classes="rl-stop", interactive=False)
            with gr.Column(scale=7, min_width=320, elem_id="rl-centre", elem_classes="rl-centre"):
                self.caption = gr.HTML("", elem_id="rl-caption", elem_classes="rl-caption")
                self.stage.build_centre()
            with gr.Column(scale=4, min_width=280, elem_id="rl-right", elem_classes="rl-right"):
                self.stage.build_right()
        self.charts = RunCharts(ONE_RUN, "rl-run-charts")
        self.download = Download("rl-playground-download")
        self.ticket = gr.State(None)
        self.shown_id = gr.State(None)
        self.ended = gr.State(None)
        self.kept_id = gr.Textbox("", visible="hidden", elem_id="rl-kept-id")
        self.waiting = gr.Timer(0.6, active=False)
        self.load_outputs: list[Any] = self.stage_outputs

    @property
    def stage_outputs(self) -> list[Any]:
        """The outputs of ``show``: feed, caption, note and charts."""
        return [self.stage.feed, self.caption, self.note, *self.charts.outputs]

    @property
    def ticket_outputs(self) -> list[Any]:
        """The outputs of ``accept``."""
        parts = [self.note, self.ticket, self.run, self.stop, self.waiting, self.unsaved, self.shown_id]
        return [*parts, *self.charts.outputs]

    # --- events -----------------------------------------------------------------------------------------------

    def wire(self) -> None:
        """Connect controls, run and stop."""
        wire_rules(self.controls, self.shell.demo, self.service.models)
        parts = self.controls.parts
        for button, example in self.controls.examples:
            button.click(
                partial(_use_example, example), None, [parts["prompt"], parts["prediction"], parts["mode"]], **QUICK
            )
        self.run.click(self.start, [self.shell.header.name, *self.controls.ordered], self.ticket_outputs, **LIGHT)
        # The page works through every output of an event at every frame, skipped or not: while a run decodes, few.
        self.ticket.change(
            self.play,
            self.ticket,
            [self.stage.feed, self.note, self.caption, self.waiting, self.kept_id, self.ended],
            **MODEL_WORK,
        ).then(
            self.settle,
            self.ended,
            [self.ended, self.note, self.run, self.stop, self.unsaved, self.shown_id, *self.charts.outputs],
            **QUICK,
        )
        self.more.click(_to_compare, None, self.shell.tabs, **QUICK)
        # Said first, then done: the run's last sentence must not be overtaken by this one.
        self.stop.click(self.say_stopping, None, [self.note, self.stop], **QUICK).then(
            self.stop_run, None, None, **QUICK
        )
        self.waiting.tick(self.tell_place, None, self.note, **QUICK)
        self.save_again.click(self.try_saving, self.shown_id, [self.note, self.unsaved, self.kept_id], **QUICK)
        self.kept_id.change(None, self.kept_id, None, js=_KEEP, **JS_ONLY)
        self.download.wire(self.keep_file, self.unsaved_file, self.shown_id, self.note)

    def start(self, request: gr.Request, typed: str, *values: Any) -> tuple[Any, ...]:
        """A click on Run: everything is checked now, so that a mistake is answered at once and never waits."""
        held = dict(zip(CONTROLS, values, strict=True))
        if self.service.is_busy(request.session_hash or ""):
            return tuple([gr.skip()] * len(self.ticket_outputs))
        try:
            wanted = to_request(held)
        except RedlineError as error:
            return note(str(error), "error"), *[gr.skip()] * (len(self.ticket_outputs) - 1)
        label = Label(author=author_of(request.username, typed))
        return self.accept(request, Ticket(tuple(plan_run(wanted, baseline=bool(held["baseline"]))), label))

    def accept(self, request: gr.Request, ticket: Ticket) -> tuple[Any, ...]:
        """Updates for ``ticket_outputs``: the ticket is taken, its turn will come; it can be stopped already."""
        self.service.begin(request.session_hash or "")
        buttons = (gr.update(interactive=False), gr.update(interactive=True))
        line = note("starting", "busy")
        return line, ticket, *buttons, gr.Timer(active=True), gr.update(visible=False), None, *self.charts.clear()

    def play(self, ticket: Ticket | None, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """The run itself, frame by frame."""
        if ticket is None:
            return
        session = request.session_hash or ""
        stop = self.service.signal(session)
        skip = gr.skip()
        named = ""
        yield skip, note("starting", "busy"), skip, gr.Timer(active=False), "", None
        try:
            events = self.service.execute(ticket.plan, ticket.label, stop, beside=is_beside(request))
            for frame in frames(ticket, events):
                line = note(frame.text, frame.kind, frame.fraction)
                value, caption = (skip, skip) if frame.feed is None else (frame.feed, "")
                if frame.run and not named and self.is_kept(frame.run.id):
                    named = frame.run.id
                if not frame.finished:
                    yield value, line, caption, skip, named or skip, skip
                    continue
                kept = "" if frame.run and frame.run.id in self.service.unsaved else named
                yield value, line, caption, skip, kept, (frame.run, frame.unsaved, line)
        finally:
            self.service.end(session)

    def settle(self, ended: tuple[Run | None, bool, str] | None) -> tuple[Any, ...]:
        """What follows a run, however it ended: the buttons, its last sentence again, which a late click on Stop may
        have covered, and what is only drawn when all is known."""
        run, unsaved, line = ended or (None, False, gr.skip())
        charts = self.charts.draw({"this run": run}) if run else self.charts.clear()
        buttons = (gr.update(interactive=True), gr.update(interactive=False))
        return None, line, *buttons, gr.update(visible=unsaved), run.id if run else None, *charts

    def say_stopping(self, request: gr.Request) -> tuple[Any, Any]:
        """A click on Stop."""
        heard = self.service.is_busy(request.session_hash or "")
        return note("stopping after this step" if heard else "nothing is running"), gr.update(interactive=False)

    def stop_run(self, request: gr.Request) -> None:
        """Stop what this visitor runs."""
        self.service.stop(request.session_hash or "")

    def tell_place(self, request: gr.Request) -> Any:
        """While the run waits in the queue: how many are before it."""
        before = people_ahead(self.shell.demo, request.session_hash)
        return gr.skip() if before is None else note("Waiting. " + people_before(before), "busy")

    def is_kept(self, run_id: str) -> bool:
        """True when the database has the run: only then may an address name it."""
        try:
            return bool(self.shell.store.summaries(RunFilter(ids=[run_id], archived=None), limit=1).rows)
        except RedlineError:
            return False

    def try_saving(self, run_id: str | None) -> tuple[Any, Any, Any]:
        """Save a run that the database refused."""
        if not is_run_id(run_id):
            return gr.skip(), gr.skip(), gr.skip()
        problem = self.service.save_again(str(run_id))
        if problem:
            return note(f"still not saved: {problem}", "error"), gr.skip(), gr.skip()
        return note("saved", "good"), gr.update(visible=False), run_id

    def unsaved_file(self, run_id: str | None) -> tuple[str, str]:
        """File name and text of a run that is not in the database."""
        ids, text = self.service.unsaved.export(str(run_id))
        return export_name(ids, "json"), text

    # --- what other tabs and addresses show here --------------------------------------------------------------

    def show(self, run_id: Any) -> list[Any] | str:
        """Values for ``stage_outputs``, a stored run to replay; or the sentence that says why there is none."""
        found = find_stored(self.shell.store, run_id)
        if isinstance(found, str):
            return found
        feed, caption, line = stored_view(self.shell.store, found)
        return [feed, caption, line, *self.charts.draw({"this run": found.run})]

    def fill(self, request: GenerationRequest, *, baseline: bool) -> list[Any]:
        """Values for the controls, in their order, that lead to ``request``, with or without ``baseline``."""
        values = from_request(request, baseline=baseline)
        values["k"] = gr.update(value=request.k, maximum=max(16, request.k))
        return [values[name] for name in CONTROLS]

    def on_load(self, view: View) -> list[Any]:
        """The run that the address names; without one, the recorded example."""
        problem = view.problem if view.tab == ID else None
        if view.tab == ID and view.run_id:
            shown = self.show(view.run_id)
            if not isinstance(shown, str):
                return shown
            problem = shown
        line = note(problem, "error") if problem else ""
        if not line and self.shell.store.read_only:
            line = note("this database may only be read: what you run is shown, but not kept", "warning")
        run, feed, caption = show_example()
        charts = self.charts.draw({"this run": run}) if run else self.charts.clear()
        return [feed, caption, line, *charts]


def _to_compare() -> Any:
    return gr.Tabs(selected="compare")


def _use_example(example: Example) -> list[Any]:
    return [example.prompt, example.settings.get("prediction", ""), "chat"]


TAB = TabSpec(ID, "Playground", 10, PlaygroundTab)
