"""Between a Run and its rows: JSON bodies and step payloads, the columns that lists show, the text that is searched.

JSON is written with ASCII escapes, so that NUL, bidi marks and anything else a token may hold never meets the
database's own idea of text.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from decoder.errors import TraceError
from decoder.metrics import acceptance, derive, timing
from decoder.trace import Run, Step
from storage.errors import StorageError, one_line

PREVIEW = 200
"""Characters of prompt and output that lists show."""


def dump(value: Any) -> str:
    """Compact ASCII JSON; NaN and infinities are refused (ValueError)."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def encode_body(run: Run) -> str:
    """``run`` without its steps. Raises StorageError when it could not be read back as it is."""
    header = run.replace(steps=(), output_ids=(), decode_ms=0.0)
    try:
        same = Run.from_json(header.to_json()) == header
    except TraceError as error:
        raise StorageError(f"this run cannot be stored: {one_line(str(error))}") from error
    if not same:
        raise StorageError("this run cannot be stored: it holds values that JSON does not bring back as they were")
    raw = run.replace(steps=()).to_json()
    del raw["steps"]
    return dump(raw)


def encode_step(step: Step) -> str:
    """The payload of ``step``. Raises StorageError when it could not be read back as it is."""
    raw = step.to_json()
    where = f"steps[{step.index}]"
    try:
        same = Step.from_json(raw, where) == step
    except TraceError as error:
        raise StorageError(f"this step cannot be stored: {one_line(str(error))}") from error
    if not same:
        raise StorageError(f"this step cannot be stored: {where} holds values that JSON does not bring back")
    return dump(raw)


def decode_run(body: str, payloads: Iterable[str], *, final: bool, baseline_id: str | None) -> Run:
    """The Run of these rows. A run without an end (``final`` False) is put together from its steps.

    Raises StorageError when the rows are damaged.
    """
    try:
        raw = json.loads(body)
        output_ids = tuple(raw["output_ids"])
        decode_ms = float(raw["decode_ms"])
        # The invariants were checked where the run came in; a run is read back even if later rules are stricter.
        header = Run.from_json(raw | {"steps": [], "output_ids": [], "decode_ms": 0.0})
        steps = tuple(Step.from_json(json.loads(payload), f"steps[{i}]") for i, payload in enumerate(payloads))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"what is stored of this run is damaged: {one_line(str(error))}") from error
    run = header.replace(steps=steps, output_ids=output_ids, decode_ms=decode_ms, baseline_id=baseline_id)
    return run if final else rebuild(run)


def rebuild(run: Run) -> Run:
    """A run whose end was never written, with everything that its steps tell."""
    return run.replace(
        output_ids=tuple(token.id for step in run.steps for token in step.emitted),
        text="".join(token.text for step in run.steps for token in step.emitted),
        decode_ms=sum((step.draft_ms + step.verify_ms + step.overhead_ms for step in run.steps), 0.0),
        metrics={
            name: finite(value) if isinstance(value, float) else value for name, value in derive(run.steps).items()
        },
    )


def columns_of(run: Run) -> dict[str, Any]:
    """The columns of table ``runs`` that the run decides. Numbers are derived from the steps, never taken over."""
    sampling = run.request.get("sampling")
    accepted = acceptance(run.steps)
    times = timing(run.steps)
    reason = run.metrics.get("not_speculating")
    return {
        "target": run.target,
        "proposer": run.proposer,
        "draft": run.draft,
        "k": run.k,
        "seed": run.seed,
        "temperature": _float(sampling.get("temperature")) if isinstance(sampling, dict) else None,
        "max_new_tokens": _int(run.request.get("max_new_tokens")),
        "dtype": run.dtype,
        "device": run.device,
        "baseline_id": run.baseline_id,
        "prompt_preview": preview(prompt_of(run)),
        "text_preview": preview(run.text),
        "finish_reason": run.finish_reason.value if run.finish_reason else None,
        "not_speculating": reason if isinstance(reason, str) else None,
        "num_prompt_tokens": len(run.prompt_ids),
        "num_output_tokens": len(run.output_ids),
        "num_spec_steps": accepted.num_spec_steps,
        "num_draft_tokens": accepted.num_draft_tokens,
        "num_accepted_draft_tokens": accepted.num_accepted_draft_tokens,
        "draft_acceptance_rate": finite(accepted.draft_acceptance_rate),
        "mean_acceptance_length": finite(accepted.mean_acceptance_length),
        "tokens_per_second": finite(times.tokens_per_second),
        "ms_per_token": finite(times.ms_per_token),
        "tokens_per_step": finite(times.tokens_per_step),
        "prefill_ms": run.prefill_ms,
        "ttft_ms": run.ttft_ms,
        "decode_ms": run.decode_ms,
    }


def finite(value: float | None) -> float | None:
    """``value``, or None where absurdly short times made it infinite: neither JSON nor every database holds that."""
    return value if value is not None and math.isfinite(value) else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def prompt_of(run: Run) -> str:
    """The prompt as it was typed; "" when the request holds none."""
    prompt = run.request.get("prompt")
    return prompt if isinstance(prompt, str) else ""


def preview(text: str) -> str:
    """The beginning of ``text``. NUL, where some databases end a text, becomes its visible symbol."""
    return text[:PREVIEW].replace("\0", "\u2400")


def searchable(parts: Sequence[str]) -> str:
    """``parts`` folded for searching: case and composition do not matter. Migration 0003 does the same."""
    text = "\x1e".join(parts).replace("\0", "\ufffd")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
