"""Compare without Gradio: configuration side by side, numbers with signed differences, pooled rates, and cautions.

All text is escaped here; the tables are plain HTML. Whether a difference is good stands there as a word, colour only
helps. A rate of accepted drafts is never called better or worse: alone it proves nothing.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from decoder import catalog, metrics
from decoder.trace import FinishReason, Run
from playground.history_view import percent
from playground.length_picker import length_words

Better = Literal["higher", "lower"]
MAX_CELL = 300
COMPLETE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)
"""How a run ends whose text may be compared as a whole; one without a reason was cut off, or still goes on."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the numbers. ``better`` None: neither direction is good in itself."""

    title: str
    hint: str
    read: Callable[[Run, Mapping[str, Any]], float | None]
    unit: str
    digits: int
    better: Better | None


def _derived(name: str) -> Callable[[Run, Mapping[str, Any]], float | None]:
    return lambda run, derived: derived.get(name)


def _per_step(name: str) -> Callable[[Run, Mapping[str, Any]], float | None]:
    def read(run: Run, derived: Mapping[str, Any]) -> float | None:
        steps = derived["num_decode_steps"]
        return derived[name] / steps if steps else None

    return read


METRICS: tuple[Metric, ...] = (
    Metric("Tokens per second", "decode only", _derived("tokens_per_second"), "", 1, "higher"),
    Metric("Time per token", "decode", _derived("ms_per_token"), "ms", 1, "lower"),
    Metric("Time to first token", "from the request to the first token", lambda r, d: r.ttft_ms, "ms", 0, "lower"),
    Metric("Prefill", "reading the prompt", lambda r, d: r.prefill_ms, "ms", 0, "lower"),
    Metric("Decode", "all steps after the first token", lambda r, d: r.decode_ms, "ms", 0, None),
    Metric("Output tokens", "", lambda r, d: len(r.output_ids), "", 0, None),
    Metric("Tokens per step", "drafting or not", _derived("tokens_per_step"), "", 2, None),
    Metric("Acceptance rate", "accepted ÷ drafted", lambda r, d: _times_100(d["draft_acceptance_rate"]), "%", 0, None),
    Metric("Mean acceptance length", "1 + accepted ÷ drafting steps", _derived("mean_acceptance_length"), "", 2, None),
    Metric("Drafted tokens", "", _derived("num_draft_tokens"), "", 0, None),
    Metric("Draft time per step", "", _per_step("draft_ms"), "ms", 1, "lower"),
    Metric("Verify time per step", "", _per_step("verify_ms"), "ms", 1, "lower"),
    Metric("Overhead per step", "", _per_step("overhead_ms"), "ms", 1, "lower"),
)


def _times_100(rate: float | None) -> float | None:
    return None if rate is None else 100 * rate


def letter(index: int) -> str:
    """A, B, C ... as the aligned texts call the runs."""
    return chr(ord("A") + index % 26)


def label(run: Run, name: str = "") -> str:
    """A run in a few words: its name, or who drafted how much."""
    return name or drafter(run)


def drafter(run: Run) -> str:
    """Who drafted, with which draft, how long and who decides that: ``EAGLE-3, my-head, k ≤ 8 by measured time``."""
    if run.proposer == "none":
        return "baseline"
    title = next((entry.title for entry in catalog.proposers() if entry.name == run.proposer), run.proposer)
    return ", ".join([title, *([run.draft] if run.draft else []), length_words({**run.request, "k": run.k})])


def signed(value: float, base: float, metric: Metric) -> str:
    """The difference to the base in words and signs: ``+3.2 (+15 %) better``."""
    delta = value - base
    if round(abs(delta), metric.digits) == 0:
        return "the same"
    sign = "+" if delta > 0 else "−"
    text = f"{sign}{abs(delta):,.{metric.digits}f}{' ' + metric.unit if metric.unit else ''}"
    if base and metric.unit != "%":
        text += f" ({sign}{abs(100 * delta / base):.0f} %)"
    if metric.better:
        text += " better" if (delta > 0) == (metric.better == "higher") else " worse"
    return text


def metrics_table(runs: Sequence[Run], names: Sequence[str], base: int, speedups: Sequence[float | None]) -> str:
    """Numbers of the runs, each with its difference to run ``base``."""
    derived = [metrics.derive(run.steps) for run in runs]
    rows = [_speedup_row(runs, speedups)]
    for metric in METRICS:
        values = [metric.read(run, numbers) for run, numbers in zip(runs, derived, strict=True)]
        rows.append(_metric_row(metric, values, base))
    return _table("rl-metrics", "Numbers", runs, names, rows, base)


def _metric_row(metric: Metric, values: Sequence[float | None], base: int) -> str:
    cells = []
    reference = values[base]
    for index, value in enumerate(values):
        if value is None:
            cells.append('<td class="rl-num"><span class="rl-why-not">nothing drafted</span></td>')
            continue
        shown = f"{value:,.{metric.digits}f}{' ' + metric.unit if metric.unit else ''}"
        difference = ""
        if index != base and reference is not None:
            words = signed(value, reference, metric)
            kind = "better" if words.endswith("better") else "worse" if words.endswith("worse") else "neutral"
            difference = f'<div class="rl-delta rl-delta-{kind}">{words}</div>'
        cells.append(f'<td class="rl-num">{shown}{difference}</td>')
    hint = f'<div class="rl-sub">{html.escape(metric.hint)}</div>' if metric.hint else ""
    return f'<tr><th scope="row">{html.escape(metric.title)}{hint}</th>{"".join(cells)}</tr>'


def _speedup_row(runs: Sequence[Run], speedups: Sequence[float | None]) -> str:
    cells = []
    for run, value in zip(runs, speedups, strict=True):
        if value is not None:
            cells.append(f'<td class="rl-num"><b>{value:.2f}×</b></td>')
        else:
            reason = "it is a baseline" if run.proposer == "none" else "no baseline"
            cells.append(f'<td class="rl-num"><span class="rl-why-not">{reason}</span></td>')
    return (
        '<tr><th scope="row">Measured speed-up<div class="rl-sub">against its own baseline</div></th>'
        f"{''.join(cells)}</tr>"
    )


def configuration(run: Run) -> dict[str, str]:
    """Everything that was set, or that was found when the run began, as flat text."""
    request = dict(run.request)
    found: dict[str, Any] = {
        "target": run.target,
        "target weights": run.fingerprint,
        "proposer": run.proposer,
        "draft": run.draft,
        "k": run.k if run.proposer != "none" else None,
        "dtype": run.dtype,
        "device": run.device,
        "prompt": request.pop("prompt", None),
        "system prompt": request.pop("system_prompt", None),
    }
    for name in ("target", "proposer", "draft", "k", "dtype", "device"):
        request.pop(name, None)
    sampling = request.pop("sampling", None)
    if isinstance(sampling, Mapping):
        found |= {str(key).replace("_", " "): value for key, value in sampling.items()}
    found |= {str(key).replace("_", " "): value for key, value in request.items()}
    found |= {f"version: {key}": value for key, value in run.versions.items()}
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if value == "":
        return "empty"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "none"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CELL else text[:MAX_CELL] + "…"


def configuration_table(runs: Sequence[Run], names: Sequence[str], *, only_differences: bool, base: int = 0) -> str:
    """Settings of the runs side by side; a setting that differs says so in its heading."""
    settings = [configuration(run) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = []
    for key in keys:
        values = [one.get(key, "not set") for one in settings]
        differs = len(set(values)) > 1
        if only_differences and not differs:
            continue
        mark = ' <span class="rl-differs">differs</span>' if differs and not only_differences else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        rows.append(f'<tr><th scope="row">{html.escape(key)}{mark}</th>{cells}</tr>')
    if not rows:
        return '<p class="rl-help">The runs have exactly the same configuration.</p>'
    return _table("rl-config", "Configuration", runs, names, rows, base)


def _table(kind: str, title: str, runs: Sequence[Run], names: Sequence[str], rows: Sequence[str], base: int) -> str:
    heads = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        mark = '<div class="rl-sub">differences are to this one</div>' if index == base and kind == "rl-metrics" else ""
        words = html.escape(label(run, name))
        about = f'<div class="rl-sub">{html.escape(drafter(run))}</div>' if name else ""
        heads.append(f'<th scope="col"><b>{letter(index)}</b> {words}{about}{mark}</th>')
    head = f'<thead><tr><th scope="col">{title}</th>{"".join(heads)}</tr></thead>'
    return (
        f'<div class="rl-scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table class="rl-table {kind}">{head}<tbody>{"".join(rows)}</tbody></table></div>'
    )


def pooled_line(runs: Sequence[Run]) -> str:
    """Acceptance over all runs, pooled by drafted tokens, with each run's own rate beside it."""
    drafting = [run for run in runs if run.proposer != "none"]
    if not drafting:
        return "None of these runs drafted anything."
    found = metrics.pool(drafting)
    if found.pooled.draft_acceptance_rate is None:
        return "Nothing was drafted in these runs."
    own = [f"{letter(list(runs).index(run))} {percent(found.per_run[run.id]) or 'nothing drafted'}" for run in drafting]
    return (
        f"Pooled over {len(drafting)} drafting runs: {found.pooled.num_accepted_draft_tokens:,} of "
        f"{found.pooled.num_draft_tokens:,} draft tokens accepted, {percent(found.pooled.draft_acceptance_rate)}. "
        f"Each run: {', '.join(own)}."
    )


def caution(runs: Sequence[Run]) -> str | None:
    """Why the speeds of these runs cannot be compared fairly, or None when only who drafts differs."""
    fixed: list[tuple[str, Callable[[Run], Any]]] = [
        ("target", lambda r: r.target),
        ("target weights", lambda r: r.fingerprint),
        ("dtype", lambda r: r.dtype),
        ("device", lambda r: r.device),
        ("prompt", lambda r: r.prompt_ids),
        ("sampling", lambda r: r.request.get("sampling")),
        ("max new tokens", lambda r: r.request.get("max_new_tokens")),
    ]
    different = [name for name, read in fixed if any(read(run) != read(runs[0]) for run in runs[1:])]
    if not different:
        return None
    return (
        f"These runs differ in {', '.join(different)}: a difference in speed is not due to the drafting alone, "
        "so no speed-up may be read from it"
    )


def divergence(runs: Sequence[Run]) -> str | None:
    """Why greedy runs of one prompt may differ in text, or None when they do not differ or were sampled."""
    sampling = runs[0].request.get("sampling")
    greedy = isinstance(sampling, Mapping) and sampling.get("temperature") == 0
    complete = [run for run in runs if run.finish_reason in COMPLETE]
    if not greedy or len({run.output_ids for run in complete}) < 2:
        return None
    if runs[0].dtype == "float32":
        return (
            "These greedy runs differ in text although they ran in float32: check them with `python -m decoder audit`"
        )
    return (
        f"Greedy runs that differ in text: in {runs[0].dtype}, two tokens with almost equal logits can change places "
        "when the pass has another shape. From there on the texts part; number format float32 keeps them together"
    )
