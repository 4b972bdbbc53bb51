"""The interface for programs: ``list_runs``, ``show_run`` and ``run``, usable with ``gradio_client``.

No ``from __future__ import annotations`` here: Gradio reads the types of the functions as they stand.
"""

from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from decoder.request import GenerationRequest
from playground.authors import author_of
from playground.deeplinks import is_run_id, shown
from playground.events import Done, Ended, Failed
from playground.queue_position import MODEL
from playground.saving import Label
from playground.service import plan_run
from playground.shell import Shell
from storage import RunFilter

MAX_LIMIT = 500


def refuse(error: RedlineError) -> gr.Error:
    """The error as a program sees it: the sentence alone."""
    return gr.Error(str(error), print_exception=False)


def register(shell: Shell) -> None:
    """Add the endpoints to the page that is being built."""

    def list_runs(text: str = "", target: str = "", proposer: str = "", limit: int = 50, offset: int = 0) -> dict:
        """Runs, newest first, without their steps.

        text is looked for in name, note, prompt and output; target and proposer must match exactly where they are
        given. limit is at most 500. Returns {"total": number, "runs": [summary, ...]}.
        """
        if not 1 <= int(limit) <= MAX_LIMIT or int(offset) < 0:
            raise gr.Error(f"limit must be from 1 to {MAX_LIMIT}, offset 0 or more", print_exception=False)
        wanted = RunFilter(text=str(text)[:500], target=target or None, proposer=proposer or None, archived=None)
        try:
            page = shell.store.summaries(wanted, limit=int(limit), offset=int(offset))
        except RedlineError as error:
            raise refuse(error) from None
        return {"total": page.total, "runs": [row.to_json() for row in page.rows]}

    def show_run(run_id: str) -> dict:
        """One run with all its steps, as JSON of schema 1."""
        if not is_run_id(run_id):
            raise gr.Error(f"“{shown(str(run_id))}” is not a run's id", print_exception=False)
        try:
            return shell.store.get_run(run_id).run.to_json()
        except RedlineError as error:
            raise refuse(error) from None

    def run(
        prompt: str,
        target: str = shell.default_target,
        proposer: str = "ngram",
        draft: str = "",
        k: int = 4,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        chat: bool = True,
        baseline: bool = True,
        options: dict[str, Any] = {},  # noqa: B006
        author: str = "",
        request: gr.Request = None,  # type: ignore[assignment]
    ) -> dict:
        """Run a prompt and wait for its end; the run is kept in History.

        options takes any further field of a request (ngram_min, ngram_max, prediction, exit_layer, stop, dtype,
        system_prompt, sampling: {top_k, top_p, ...}). With baseline the same prompt is measured with the proposer off
        as well. Returns the run as JSON of schema 1.
        """
        raw = dict(options or {})
        sampling = {**dict(raw.pop("sampling", {}) or {}), "temperature": temperature, "seed": seed}
        try:
            wanted = GenerationRequest.from_json(
                {
                    **raw,
                    "prompt": prompt,
                    "target": target,
                    "proposer": proposer,
                    "draft": draft or None,
                    "k": k,
                    "max_new_tokens": max_new_tokens,
                    "chat": chat,
                    "sampling": sampling,
                }
            )
        except (RedlineError, TypeError) as error:
            raise gr.Error(str(error), print_exception=False) from None
        session = (request.session_hash if request else None) or "api"
        label = Label(author=author_of(request.username if request else None, author), tags=("api",))
        result = None
        plan = plan_run(wanted, baseline=bool(baseline))
        try:
            for event in shell.service.execute(plan, label, shell.service.begin(session)):
                if isinstance(event, Failed) and event.index == 0:
                    raise gr.Error(event.sentence, print_exception=False)
                if isinstance(event, Ended) and event.index == 0:
                    result = event.run
                if isinstance(event, Done) and event.runs:
                    result = event.runs[0]
        finally:
            shell.service.end(session)
        if result is None:
            raise gr.Error("the run was stopped before it began", print_exception=False)
        return result.to_json()

    gr.api(list_runs, api_name="list_runs", concurrency_limit=None)
    gr.api(show_run, api_name="show_run", concurrency_limit=None)
    gr.api(run, api_name="run", concurrency_id=MODEL, concurrency_limit=1)
