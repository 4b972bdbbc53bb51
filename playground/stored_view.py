"""A run from the database, or a recorded example, as the stage shows it: feed, caption and note."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from decoder.trace import Run
from playground import example_runs
from playground.deeplinks import is_run_id, shown
from playground.feed import whole
from playground.notes import note
from playground.playing import next_seq, outcome
from storage import State, Store, StoredRun


def stored_view(store: Store, stored: StoredRun) -> tuple[str, str, str]:
    """Feed, caption and note of a stored run, with its baseline if that is here."""
    run, meta = stored.run, stored.meta
    baseline: Run | None = None
    reason: str | None = None
    if run.baseline_id:
        try:
            baseline = store.get_run(run.baseline_id).run
        except RedlineError:
            reason = "its baseline is no longer in this database"
    parts = [run.id, meta.author, meta.created_at.strftime("%Y-%m-%d %H:%M UTC")]
    caption = f"<b>{html.escape(meta.name or 'Stored run')}</b> · " + " · ".join(html.escape(p) for p in parts)
    caption += asked(run)
    text, kind = outcome(run)
    if meta.state is State.RUNNING:
        text, kind = "this run is still going on: open it again to see more of it", "info"
    return whole(run, meta, baseline, next_seq(), reason), caption, "" if kind == "good" else note(text, kind)


def asked(run: Run) -> str:
    """The beginning of the run's prompt as HTML for a caption: whoever opens a run sees what it answers."""
    prompt = run.request.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        return ""
    return f'<br><span class="rl-asked">Prompt: “{html.escape(shown(" ".join(prompt.split()), 160))}”</span>'


def find_stored(store: Store, run_id: Any) -> StoredRun | str:
    """The run with this id, or the sentence that says why there is none."""
    if not is_run_id(run_id):
        return f"“{shown(str(run_id))}” is not a run's id"
    try:
        return store.get_run(run_id)
    except RedlineError as error:
        return str(error)


def show_example() -> tuple[Run | None, Any, str]:
    """Run, feed and caption for a first visitor."""
    found = example_runs.first()
    if found is None:
        return None, gr.skip(), "No run yet. Write a prompt and choose <b>Run</b>."
    run, baseline = found
    caption = "<b>A recorded example.</b> Step through it with the arrow keys, or run your own prompt." + asked(run)
    return run, whole(run, None, baseline, next_seq()), caption
