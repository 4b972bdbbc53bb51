"""Stored runs as text for a terminal. What a run holds is escaped: it cannot move the cursor or colour the screen."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoder.metrics import acceptance, timing
from decoder.trace import Step, Verdict
from storage.codec import prompt_of
from storage.errors import one_line
from storage.records import Page, RunSummary, StoredRun

_WIDTH = 160
_MARKS = {Verdict.ACCEPTED: "+", Verdict.REJECTED: "x", Verdict.UNTESTED: "."}


def table(page: Page, offset: int) -> str:
    """The page as a table, and which part of the whole it is."""
    if not page.rows:
        return "no runs\n" if not page.total else f"no rows at {offset}: there are {page.total} runs\n"
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "made", "state", "author", "target", "proposer"):
        made.add_column(name, no_wrap=True, min_width=15 if name == "id" else None)
    for name in ("k", "tokens", "tok/s", "accepted", "speed-up"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("name or prompt", no_wrap=True, overflow="ellipsis")
    for row in page.rows:
        made.add_row(*[Text(cell) for cell in _cells(row)])
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, emoji=False, markup=False, highlight=False).print(made)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    first = offset + 1
    return "\n".join([*lines, f"{first} to {offset + len(page.rows)} of {page.total}"]) + "\n"


def _cells(row: RunSummary) -> list[str]:
    return [
        row.id,
        f"{row.created_at.astimezone():%Y-%m-%d %H:%M}",
        row.state.value,
        one_line(row.author, 16),
        one_line(row.target, 28),
        one_line(row.proposer, 16),
        str(row.k) if row.proposer != "none" else "",
        str(row.num_output_tokens),
        _number(row.tokens_per_second, ".1f"),
        _number(row.draft_acceptance_rate, ".0%"),
        _number(row.speedup, ".2f", "x"),
        one_line(row.name or row.prompt_preview, 60),
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def run(stored: StoredRun, *, steps: bool) -> str:
    """One run in a few lines; with ``steps`` a line for each step."""
    this, meta = stored.run, stored.meta
    accepted, times = acceptance(this.steps), timing(this.steps)
    facts = [
        ("run", this.id),
        ("name", meta.name),
        ("state", f"{meta.state.value} ({this.finish_reason})" if this.finish_reason else meta.state.value),
        ("error", this.error or ""),
        ("made", f"{meta.created_at.astimezone():%Y-%m-%d %H:%M:%S %z} by {meta.author}"),
        ("imported from", meta.imported_from or ""),
        ("tags", ", ".join(meta.tags)),
        ("note", meta.note),
        ("target", f"{this.target} ({this.dtype}, {this.device})"),
        ("proposer", this.proposer + (f", draft {this.draft}" if this.draft else "")),
        ("k", str(this.k)),
        ("tokens", f"{len(this.prompt_ids)} in, {len(this.output_ids)} out, {len(this.steps)} steps"),
        ("accepted", _accepted(accepted.num_accepted_draft_tokens, accepted.num_draft_tokens)),
        ("mean length", _number(accepted.mean_acceptance_length, ".2f")),
        ("speed", _number(times.tokens_per_second, ".1f", " tokens/s")),
        ("first token", f"{this.ttft_ms:.1f} ms (prefill {this.prefill_ms:.1f} ms)"),
        ("decode", f"{times.draft_ms:.1f} draft + {times.verify_ms:.1f} verify + {times.overhead_ms:.1f} other ms"),
        ("baseline", this.baseline_id or "none"),
        ("prompt", prompt_of(this)),
        ("text", this.text),
    ]
    lines = [f"{name:14}{one_line(value, 2000)}" for name, value in facts if value]
    if steps:
        lines += [_step(step) for step in this.steps]
    return "\n".join(lines) + "\n"


def _accepted(accepted: int, drafted: int) -> str:
    return f"{accepted} of {drafted} draft tokens ({accepted / drafted:.1%})" if drafted else "nothing was drafted"


def _step(step: Step) -> str:
    drafts = " ".join(f"{_MARKS[d.verdict]}{one_line(d.text, 40)!r}" for d in step.drafts)
    own = " ".join(f"{token.source.value} {one_line(token.text, 40)!r}" for token in step.emitted[step.num_accepted :])
    total = step.draft_ms + step.verify_ms + step.overhead_ms
    return f"step {step.index:<5}{step.num_accepted} of {len(step.drafts)}  {total:8.1f} ms  {drafts}  {own}".rstrip()
