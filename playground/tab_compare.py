"""Compare: several runs side by side, from History or an address, or freshly run for that purpose."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from decoder.trace import Run
from playground import compare_tables as tables
from playground import components, pairs
from playground.align import compare_value
from playground.authors import author_of
from playground.compare_variants import by_proposer, left_out, offered
from playground.comparing import by_length, progress
from playground.controls import CONTROLS, read_lengths, to_request
from playground.deeplinks import MAX_COMPARE, View, is_run_id, shown
from playground.history_actions import comparable, read_selection
from playground.history_view import one_line
from playground.listening import JS_ONLY, LIGHT, MODEL_WORK, QUICK
from playground.notes import note, people_before
from playground.pace import is_beside
from playground.plans import plan_comparison
from playground.playing import Ticket
from playground.queue_position import people_ahead
from playground.run_charts import SEVERAL_RUNS, RunCharts
from playground.saving import Label
from playground.shell import Shell, TabSpec
from playground.unsaved_view import UnsavedRow
from storage import RunFilter

ID = "compare"
_ADDRESS = "(ids) => { window.RedlineShell.compareAddress(ids); return []; }"


class CompareTab:
    """Top: run a comparison. Below: the runs, their texts, numbers, configuration and charts."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.store = shell.store
        self.service = shell.service

    # --- layout -----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the components."""
        with gr.Column(elem_id="rl-compare-tab", elem_classes="rl-compare-tab"):
            self.prompt = gr.HTML("", elem_id="rl-compare-prompt", elem_classes="rl-help")
            with gr.Row(elem_classes="rl-compare-start"):
                self._build_start()
            with gr.Row(elem_classes="rl-actions rl-progress-row"):
                self.progress = gr.HTML("", elem_id="rl-compare-progress", elem_classes="rl-note-line")
                self.cancel = gr.Button("Cancel", size="sm", visible=False, elem_id="rl-compare-cancel")
            self.unsaved = UnsavedRow(self.service, "rl-compare-unsaved")
            with gr.Column(visible=False, elem_id="rl-compare-result") as self.result:
                with gr.Row(elem_classes="rl-actions"):
                    self.base = gr.Dropdown([], label="Differences to", elem_id="rl-compare-base", min_width=200)
                    self.only = gr.Checkbox(True, label="Only what differs", elem_id="rl-only-differences")
                self.caution = gr.HTML("", elem_classes="rl-note-line")
                self.texts = components.compare()
                self.numbers = gr.HTML("", elem_id="rl-compare-numbers", elem_classes="rl-card")
                self.pooled = gr.HTML("", elem_id="rl-pooled", elem_classes="rl-help")
                self.charts = RunCharts(SEVERAL_RUNS, "rl-compare-charts")
                self.config = gr.HTML("", elem_id="rl-compare-config", elem_classes="rl-card")
        self.shown = gr.Textbox("", visible="hidden", elem_id="rl-compare-shown")
        self.address = gr.Textbox("", visible="hidden", elem_id="rl-compare-address")
        self.ticket = gr.State(None)
        self.ended = gr.State(None)
        self.waiting = gr.Timer(0.6, active=False)
        self.load_outputs: list[Any] = self.result_outputs

    def _build_start(self) -> None:
        with gr.Column(elem_classes="rl-card", min_width=280):
            gr.HTML(
                "<b>Compare draft lengths</b><div class='rl-help'>The Playground's prompt and settings, once with "
                "each length and once without drafting.</div>"
            )
            with gr.Row():
                self.lengths = gr.Textbox("1, 2, 4, 8", label="Lengths k", elem_id="rl-lengths", min_width=120)
                self.run_lengths = gr.Button("Run them", variant="primary", elem_id="rl-run-lengths", min_width=90)
        with gr.Column(elem_classes="rl-card", min_width=280):
            gr.HTML(
                "<b>Compare proposers and drafts</b><div class='rl-help'>The same prompt, drafted by each of "
                "these, and once without drafting. Each takes its settings from the Playground.</div>"
            )
            options = offered(self.shell.default_target, None)
            self.proposers = gr.CheckboxGroup(
                options,
                value=[value for _, value in options if value in ("ngram", "early-exit")],
                show_label=False,
                container=False,
                elem_id="rl-proposers",
            )
            self.left_out = gr.HTML(_left_out(self.shell.default_target), elem_id="rl-left-out", elem_classes="rl-help")
            self.run_proposers = gr.Button("Run them", variant="primary", elem_id="rl-run-proposers", min_width=90)
        with gr.Column(elem_classes="rl-card", min_width=280):
            gr.HTML(
                "<b>Compare stored runs</b><div class='rl-help'>Tick them in History and choose Compare, or name "
                "their ids here.</div>"
            )
            self.ids = gr.Textbox(label="Run ids", placeholder="r1a2b…, r3c4d…", elem_id="rl-compare-ids")
            self.show_ids = gr.Button("Show", elem_id="rl-compare-show", min_width=80)

    @property
    def result_outputs(self) -> list[Any]:
        """The outputs of ``show``."""
        return [
            self.ids,
            self.shown,
            self.progress,
            self.address,
            self.result,
            self.base,
            self.only,
            self.caution,
            self.texts,
            self.numbers,
            self.pooled,
            self.config,
            *self.charts.outputs,
        ]

    @property
    def _start_outputs(self) -> list[Any]:
        return [self.progress, self.ticket, self.run_lengths, self.run_proposers, self.cancel, self.waiting]

    # --- events -----------------------------------------------------------------------------------------------

    def wire(self) -> None:
        """Connect everything."""
        stage = self.shell.built["playground"]
        history = self.shell.built["history"]
        asked = [self.shell.header.name, *stage.controls.ordered]
        self.run_lengths.click(self.start_lengths, [self.lengths, *asked], self._start_outputs, **LIGHT)
        self.run_proposers.click(self.start_proposers, [self.proposers, *asked], self._start_outputs, **LIGHT)
        self.ticket.change(
            self.play, self.ticket, [self.progress, self.waiting, self.ended], **MODEL_WORK
        ).then(  # few outputs while runs decode: the page works through all of them at every frame
            self.settle,
            [self.ended, self.only],
            [self.ended, self.run_lengths, self.run_proposers, self.cancel, *self.result_outputs],
            **QUICK,
        )
        self.cancel.click(self.say_stopping, None, [self.progress, self.cancel], **QUICK).then(
            self.stop, None, None, **QUICK
        )
        self.waiting.tick(self.tell_place, None, self.progress, **QUICK)
        for trigger in (self.show_ids.click, self.ids.submit):
            trigger(self.show_typed, [self.ids, self.only], self.result_outputs, **QUICK)
        for changed in (self.base.input, self.only.input):
            changed(
                self.again,
                [self.shown, self.base, self.only],
                [self.numbers, self.config, self.progress],
                **QUICK,
            )
        self.address.change(None, self.address, None, js=_ADDRESS, **JS_ONLY)
        self.unsaved.wire(self.shown, self.progress)
        parts = stage.controls.parts
        self.shell.panes[ID].select(
            self.offer,
            [parts["prompt"], parts["target"], parts["draft"], self.proposers],
            [self.prompt, self.proposers, self.left_out],
            **QUICK,
        )
        history.compare.click(
            self.from_history,
            [history.picked, self.only],
            [*self.result_outputs, self.shell.tabs, history.note],
            js="(_, only) => [window.RedlineShell.selection(), only]",
            **QUICK,
        )

    def offer(self, prompt: Any, target: Any, draft: Any, chosen: Any) -> tuple[str, Any, str]:
        """What the Playground holds now: its prompt, and the proposers and drafts for its target."""
        pairs.warm_up(self.service.models.call)
        options = offered(target, draft, read=True)
        values = [value for _, value in options]
        words = one_line(prompt if isinstance(prompt, str) else "", 140) or "the Playground holds no prompt yet"
        line = f"New comparisons run the Playground's prompt: “{html.escape(words)}”"
        kept = [c for c in chosen or [] if c in values]
        # Without need the ticks are left alone: more may have been set while the drafts were read.
        ticked = gr.update(choices=options) if kept == list(chosen or []) else gr.update(choices=options, value=kept)
        return line, ticked, _left_out(target, read=True)

    # --- running ----------------------------------------------------------------------------------------------

    def start_lengths(self, request: gr.Request, lengths: str, typed: str, *values: Any) -> tuple[Any, ...]:
        """Check everything now; the runs wait for their turn."""
        try:
            wanted = to_request(dict(zip(CONTROLS, values, strict=True)))
            variants = by_length(wanted, read_lengths(lengths or ""))
        except RedlineError as error:
            return self._refused(error)
        return self._accept(request, variants, author_of(request.username, typed))

    def start_proposers(self, request: gr.Request, chosen: Any, typed: str, *values: Any) -> tuple[Any, ...]:
        """Check everything now; the runs wait for their turn."""
        held = dict(zip(CONTROLS, values, strict=True))
        try:
            pairs.warm_up(self.service.models.call)
            variants = by_proposer(held, chosen, read=True)
        except RedlineError as error:
            return self._refused(error)
        return self._accept(request, variants.requests, author_of(request.username, typed), variants.refused)

    def _refused(self, error: RedlineError) -> tuple[Any, ...]:
        return (note(str(error), "error"), *[gr.skip()] * 5)

    def _accept(
        self, request: gr.Request, variants: Sequence[Any], author: str, refused: tuple[str, ...] = ()
    ) -> tuple[Any, ...]:
        self.service.begin(_session(request))
        ticket = Ticket(tuple(plan_comparison(variants)), Label(author=author, tags=("comparison",)), refused)
        off = gr.update(interactive=False)
        return note("starting", "busy"), ticket, off, off, gr.update(visible=True), gr.Timer(active=True)

    def play(self, ticket: Ticket | None, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """Run one after the other."""
        if ticket is None:
            return
        session = _session(request)
        stop = self.service.signal(session)
        skip = gr.skip()
        yield note("starting", "busy"), gr.Timer(active=False), None
        try:
            events = self.service.execute(ticket.plan, ticket.label, stop, beside=is_beside(request))
            for step in progress(ticket.plan, events, ticket.refused):
                line = note(step.text, step.kind, step.fraction)
                yield line, skip, skip if step.runs is None else (step.runs, line)
        finally:
            self.service.end(session)

    def settle(self, ended: tuple[Sequence[Run], Any] | None, only: Any) -> list[Any]:
        """What follows the runs, however they ended: the buttons, and the comparison opens."""
        runs, line = ended or ((), gr.skip())
        on = gr.update(interactive=True)
        same = [gr.skip(), gr.skip(), line, *[gr.skip()] * (len(self.result_outputs) - 3)]
        return [None, on, on, gr.update(visible=False), *(self._show_runs(runs, line, only) if runs else same)]

    def stop(self, request: gr.Request) -> None:
        """Stop what this visitor runs."""
        self.service.stop(_session(request))

    def say_stopping(self, request: gr.Request) -> tuple[Any, Any]:
        """A click on Cancel: what has run is kept and shown."""
        heard = self.service.is_busy(_session(request))
        return note("stopping after this step" if heard else "nothing is running"), gr.update(visible=False)

    def tell_place(self, request: gr.Request) -> Any:
        """While the comparison waits in the queue: how many are before it."""
        before = people_ahead(self.shell.demo, request.session_hash)
        return gr.skip() if before is None else note("Waiting. " + people_before(before), "busy")

    # --- showing ----------------------------------------------------------------------------------------------

    def from_history(self, picked: str, only: Any) -> list[Any]:
        """History's selection."""
        try:
            shown_values = self.show(comparable(read_selection(picked)), only)
        except RedlineError as error:
            return [*[gr.skip()] * (len(self.result_outputs) + 1), note(str(error), "error")]
        return [*shown_values, gr.Tabs(selected=ID), ""]

    def show_typed(self, text: str, only: Any) -> list[Any]:
        """The ids that were typed."""
        ids = tuple(dict.fromkeys((text or "").replace(",", " ").split()))
        wrong = next((part for part in ids if not is_run_id(part)), None)
        if wrong is not None:
            return self._problem(f"“{shown(wrong)}” is not a run's id")
        if not 2 <= len(ids) <= MAX_COMPARE:
            return self._problem(f"name two to {MAX_COMPARE} runs by their ids, separated by commas")
        return self.show(ids, only)

    def show(self, ids: Sequence[str], only: Any = True) -> list[Any]:
        """Values for ``result_outputs``: the runs with these ids side by side. What is missing is named."""
        runs, missing = self._find(ids)
        if not runs:
            return self._problem("; ".join(missing))
        return self._show_runs(runs, note("; ".join(missing), "error") if missing else "", only)

    def _find(self, ids: Sequence[str]) -> tuple[list[Run], list[str]]:
        """The runs, of those that could not be saved too, and a sentence for each that is not there."""
        runs: list[Run] = []
        missing: list[str] = []
        for run_id in ids:
            unsaved = self.service.unsaved.get(run_id)
            try:
                runs.append(unsaved.run if unsaved else self.store.get_run(run_id).run)
            except RedlineError as error:
                missing.append(str(error))
        return runs, missing

    def _problem(self, sentence: str) -> list[Any]:
        return [gr.skip(), gr.skip(), note(sentence, "error"), *[gr.skip()] * (len(self.result_outputs) - 3)]

    def _show_runs(self, runs: Sequence[Run], line: Any, only: Any) -> list[Any]:
        names, speedups, stored = self._labels(runs)
        base = next((i for i, run in enumerate(runs) if run.proposer == "none"), 0)
        labels = [tables.label(run, name) for run, name in zip(runs, names, strict=True)]
        choices = [
            (f"{tables.letter(i)} · {words}", run.id) for i, (run, words) in enumerate(zip(runs, labels, strict=True))
        ]
        ids = [run.id for run in runs]
        caution = tables.caution(runs) or tables.divergence(runs)
        return [
            ", ".join(ids),
            ",".join(ids),
            line,
            ",".join(stored),
            gr.update(visible=True),
            gr.update(choices=choices, value=ids[base]),
            bool(only),
            note(caution, "warning") if caution else "",
            compare_value(runs, labels, base),
            tables.metrics_table(runs, names, base, speedups),
            tables.pooled_line(runs),
            tables.configuration_table(runs, names, only_differences=bool(only), base=base),
            *self.charts.draw(
                {f"{tables.letter(i)} {w}": r for i, (r, w) in enumerate(zip(runs, labels, strict=True))}
            ),
        ]

    def _labels(self, runs: Sequence[Run]) -> tuple[list[str], list[float | None], list[str]]:
        """Names and speed-ups of the runs, and the ids of those that the database has: an address names no others."""
        try:
            found = self.store.summaries(RunFilter(ids=[run.id for run in runs], archived=None), limit=len(runs)).rows
        except RedlineError:
            found = []
        by_id = {summary.id: summary for summary in found}
        names = [by_id[run.id].name if run.id in by_id else "" for run in runs]
        speedups = [by_id[run.id].speedup if run.id in by_id else None for run in runs]
        return names, speedups, [run.id for run in runs if run.id in by_id]

    def again(self, ids: str, base_id: Any, only: bool) -> list[Any]:
        """Another base run, or all settings instead of only those that differ."""
        runs, missing = self._find([run_id for run_id in (ids or "").split(",") if is_run_id(run_id)])
        if missing:
            gone = note("; ".join(missing) + ". The tables below stay as they were", "error")
            return [gr.skip(), gr.skip(), gone]
        if not runs:
            return [gr.skip()] * 3
        names, speedups, _ = self._labels(runs)
        base = next((i for i, run in enumerate(runs) if run.id == base_id), 0)
        return [
            tables.metrics_table(runs, names, base, speedups),
            tables.configuration_table(runs, names, only_differences=bool(only), base=base),
            gr.skip(),
        ]

    def on_load(self, view: View) -> list[Any]:
        """The runs that the address names."""
        if view.tab != ID:
            return [gr.skip()] * len(self.load_outputs)
        if view.problem:
            return self._problem(view.problem)
        return self.show(view.compare) if view.compare else [gr.skip()] * len(self.load_outputs)


def _left_out(target: Any, *, read: bool = False) -> str:
    """What cannot be compared for ``target``, and why, as a fold-out."""
    found = left_out(target, read=read)
    if not found:
        return ""
    lines = "".join(f"<li><b>{html.escape(title)}</b>: {html.escape(reason)}.</li>" for title, reason in found)
    count = "One proposer" if len(found) == 1 else f"{len(found)} proposers"
    title = f"{count} cannot draft for {html.escape(shown(str(target)))}"
    return f"<details><summary>{title}</summary><ul>{lines}</ul></details>"


def _session(request: gr.Request) -> str:
    """A comparison is stopped on its own: it is not the Playground's run."""
    return "compare " + (request.session_hash or "")


TAB = TabSpec(ID, "Compare", 20, CompareTab)
