"""The interface for programs: ``list_runs``, ``show_run`` and ``run``, usable with ``gradio_client``.

No ``from __future__ import annotations`` here: Gradio reads the types of the functions as they stand.
"""

from collections.abc import Mapping
from typing import Any

import gradio as gr

from decoder.errors import RedlineError, RequestError
from decoder.request import GenerationRequest
from playground.authors import author_of
from playground.deeplinks import is_run_id, shown
from playground.events import Done, Ended, Failed
from playground.plans import plan_run
from playground.queue_position import MODEL
from playground.saving import Label
from playground.shell import Shell
from storage import RunFilter

MAX_LIMIT = 500


def refuse(error: RedlineError) -> gr.Error:
    """The error as a program sees it: the sentence alone."""
    return gr.Error(str(error), print_exception=False)


def text_field(name: str, value: Any) -> str:
    """``value`` as text; None counts as not given. Raises RequestError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {shown(repr(value))}")
    return value


def read_request(fields: Mapping[str, Any], options: Any, sampling: Mapping[str, Any]) -> GenerationRequest:
    """The request of a call. ``fields`` and ``sampling`` go before what ``options`` says. Raises RequestError."""
    if not isinstance(options, Mapping | None):
        raise RequestError("options must be a JSON object")
    further = dict(options or {})
    more = further.pop("sampling", None)
    if not isinstance(more, Mapping | None):
        raise RequestError("options: sampling must be a JSON object")
    raw = {**further, **fields, "sampling": {**(more or {}), **sampling}}
    try:
        return GenerationRequest.from_json(raw)
    except TypeError as error:
        raise RequestError(f"a field of the request has the wrong type: {error}") from None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def register(shell: Shell) -> None:
    """Add the endpoints to the page that is being built."""

    def list_runs(text: str = "", target: str = "", proposer: str = "", limit: int = 50, offset: int = 0) -> dict:
        """Runs, newest first, without their steps.

        text is looked for in name, note, prompt and output; target and proposer must match exactly where they are
        given. limit is at most 500. Returns {"total": number, "runs": [summary, ...]}.
        """
        if not _whole(limit) or not _whole(offset) or not 1 <= limit <= MAX_LIMIT or not 0 <= offset < 2**63:
            raise gr.Error(
                f"limit must be a whole number from 1 to {MAX_LIMIT}, offset 0 or more", print_exception=False
            )
        try:
            wanted = RunFilter(
                text=text_field("text", text)[:500],
                target=text_field("target", target) or None,
                proposer=text_field("proposer", proposer) or None,
                archived=None,
            )
            page = shell.store.summaries(wanted, limit=limit, offset=offset)
        except RedlineError as error:
            raise refuse(error) from None
        return {"total": page.total, "runs": [row.to_json() for row in page.rows]}

    def show_run(run_id: str) -> dict:
        """One run with all its steps, as JSON of schema 1."""
        if not isinstance(run_id, str) or not is_run_id(run_id):
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
        fields = {"prompt": prompt, "target": target, "proposer": proposer, "draft": draft or None, "k": k}
        fields |= {"max_new_tokens": max_new_tokens, "chat": chat}
        try:
            wanted = read_request(fields, options, {"temperature": temperature, "seed": seed})
            author = text_field("author", author)
        except RedlineError as error:
            raise refuse(error) from None
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
