"""The feed: one run as append-only NDJSON, the only thing that the browser is told about it.

A feed is text that grows by whole lines, so that Gradio sends small differences and the browser parses only what is
new. The first line is ``begin``, then one ``step`` line per step, then ``end`` (again when a baseline arrives later:
the last ``end`` counts). Another ``seq`` means another run. While a long run is live, ``tail`` of the text is enough.
``<`` is written as ``\\u003c``, so that no line can hold a tag. No Gradio and no torch in here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from decoder import metrics
from decoder.trace import RUN_FIELDS, Run, Step

PREVIEW_CHARS = 400
_HEAVY = ("steps", "output_ids", "prompt_ids", "text", "metrics")
_LONG_REQUEST_FIELDS = ("prompt", "system_prompt", "prediction")


def _line(kind: str, **fields: Any) -> str:
    text = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029") + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return str(value)


def _cut(text: str, limit: int = PREVIEW_CHARS) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _head(run: Run) -> dict[str, Any]:
    """The run without what is long: steps and ids stay out, prompts are cut to a preview."""
    data = {name: value for name in RUN_FIELDS if name not in _HEAVY for value in [_plain_field(getattr(run, name))]}
    request = dict(run.request)
    for name in _LONG_REQUEST_FIELDS:
        if isinstance(request.get(name), str):
            request[name] = _cut(request[name])
    data["request"] = request
    data["prompt_preview"] = _cut(str(run.request.get("prompt", "")))
    data["num_prompt_tokens"] = len(run.prompt_ids)
    # The steps also show the end token or stop string, which are not part of the text.
    data["num_text_chars"] = len(run.text)
    data["floor_ms"] = metrics.floor_ms(run)
    return data


def _plain_field(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def begin_line(run: Run, meta: Any | None, live: bool, seq: int) -> str:
    """First line of a feed. ``meta`` is a ``storage.RunMeta``, a mapping, or None for a run that is not kept."""
    return _line("begin", seq=seq, live=live, run=_head(run), meta=None if meta is None else _plain(meta))


def step_line(step: Step, prefill: tuple[float, float] | None = None) -> str:
    """One step, with the keys of schema 1. ``prefill`` (prefill_ms, ttft_ms) goes with a live run's first step: they
    were not known when the run began."""
    times = {} if prefill is None else {"prefill_ms": prefill[0], "ttft_ms": prefill[1]}
    return _line("step", step=step.to_json(), **times)


def tail(text: str, limit: int = 240_000) -> str:
    """What a live run has to hand over of ``text`` (a feed that began): all of it, or its last part.

    Gradio's page compares the whole value at each update, which would slow a run of thousands of tokens down. The part
    begins with a ``resume`` line, grows like the feed itself, starts anew every ``limit`` characters, and repeats the
    last quarter of ``limit``, so that updates may be skipped. Hand over all of ``text`` when the run is over.
    """
    chunk = len(text) // limit
    seq = re.match(r'\{"type":"begin","seq":(\d+),', text)
    if chunk == 0 or seq is None:
        return text
    start = text.index("\n", chunk * limit - limit // 4) + 1
    return _line("resume", seq=int(seq[1]), chunk=chunk) + text[start:]


def timeline(run: Run) -> list[list[float]]:
    """``[ms since the request began, tokens]`` at the end of each step; the first token stands at ``ttft_ms``."""
    now = max(run.ttft_ms, run.prefill_ms)
    points: list[list[float]] = []
    for step in run.steps:
        if step.index > 0:
            now += step.draft_ms + step.verify_ms + step.overhead_ms
        points.append([round(now, 3), len(step.emitted)])
    return points


def missing_baseline(run: Run, baseline: Run | None) -> str | None:
    """Why there is no measured speed-up, in words that end a sentence, or None when there is one."""
    if run.proposer == "none":
        return "this run is a baseline itself: nothing drafts"
    if baseline is None:
        return "the same request was not run with the proposer off"
    misfit = metrics.baseline_fits(run, baseline)
    if misfit is not None:
        return f"the baseline does not fit: {misfit}"
    if metrics.break_even(run, baseline) is None:
        return "the run has no decoded token to time"
    return None


def end_line(run: Run, baseline: Run | None = None, no_baseline_reason: str | None = None) -> str:
    """Last line of a feed: the final numbers, always derived from the steps, never taken from the stored ``metrics``.

    ``no_baseline_reason`` overrides the reason shown where no speed-up was measured ("the baseline runs next").
    """
    verdict = metrics.break_even(run, baseline)
    reason = run.metrics.get("not_speculating") if isinstance(run.metrics, Mapping) else None
    numbers = metrics.derive(run.steps, not_speculating=str(reason) if reason else None)
    fitting = baseline if baseline is not None and verdict is not None else None
    why_not = None if verdict is not None else (no_baseline_reason or missing_baseline(run, baseline))
    return _line(
        "end",
        run=_head(run),
        metrics=numbers,
        break_even=None if verdict is None else dataclasses.asdict(verdict),
        baseline=None if fitting is None else _baseline(fitting),
        no_baseline_reason=why_not,
    )


def _baseline(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "decode_ms": run.decode_ms,
        "prefill_ms": run.prefill_ms,
        "ttft_ms": run.ttft_ms,
        "tokens": len(run.output_ids),
        "steps": timeline(run),
    }


def whole(run: Run, meta: Any | None, baseline: Run | None, seq: int, no_baseline_reason: str | None = None) -> str:
    """A finished (or interrupted) run as one feed, to be replayed."""
    lines: Sequence[str] = [
        begin_line(run, meta, False, seq),
        *(step_line(step) for step in run.steps),
        end_line(run, baseline, no_baseline_reason),
    ]
    return "".join(lines)
