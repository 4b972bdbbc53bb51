"""Runs and audits as text for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoder.metrics import acceptance, baseline_fits, break_even, floor_ms, timing
from decoder.trace import Run, Source, Verdict

if TYPE_CHECKING:
    from decoder.audit import AuditResult

_STYLE = {
    Source.ACCEPTED: "green underline",
    Source.CORRECTED: "bold blue underline",
    Source.BONUS: "yellow underline",
    Source.TARGET: "",
}


def printable(text: str) -> str:
    """Token text with control and bidirectional characters shown, not obeyed."""
    return "".join(
        c
        if c in "\n\t" or (c.isprintable() and not "\u202a" <= c <= "\u202e" and not "\u2066" <= c <= "\u2069")
        else f"\\u{ord(c):04x}"
        for c in text
    )


def marked_text(run: Run) -> Text:
    """The output with its marks: accepted, corrected, bonus; rejected drafts struck through in place."""
    text = Text()
    for step in run.steps:
        emitted = list(step.emitted)
        own = [e for e in emitted if e.source is not Source.ACCEPTED]
        for token in emitted:
            if token.source is Source.ACCEPTED:
                text.append(printable(token.text), _STYLE[token.source])
        for draft in step.drafts:
            if draft.verdict is Verdict.REJECTED:
                text.append(printable(draft.text), "red strike")
        for token in own:
            text.append(printable(token.text), _STYLE[token.source])
    return text


def print_run(run: Run, baseline: Run | None = None) -> None:
    """A run with its marks, numbers and the break-even line."""
    console = Console(highlight=False)
    console.print(marked_text(run))
    console.print()
    legend = Text("accepted ", "green underline")
    legend.append("corrected ", "bold blue underline")
    legend.append("rejected", "red strike")
    legend.append(" ")
    legend.append("bonus", "yellow underline")
    console.print(legend)
    table = Table(box=None, show_header=False, pad_edge=False)
    a, t = acceptance(run.steps), timing(run.steps)
    table.add_row("finish", f"{run.finish_reason or 'running'} after {len(run.output_ids)} tokens")
    if run.metrics.get("not_speculating"):
        table.add_row("not speculating", str(run.metrics["not_speculating"]))
    if a.draft_acceptance_rate is not None and a.mean_acceptance_length is not None:
        table.add_row(
            "acceptance",
            f"{a.draft_acceptance_rate:.1%} of {a.num_draft_tokens} draft tokens, "
            f"mean acceptance length {a.mean_acceptance_length:.2f}",
        )
    policy = run.request.get("draft_length", "fixed")
    if policy != "fixed":
        counts = Counter(step.k for step in run.steps[1:])
        table.add_row("draft length", f"{policy}: " + ", ".join(f"{k} in {n} steps" for k, n in sorted(counts.items())))
    if t.tokens_per_second is not None and t.ms_per_token is not None:
        table.add_row("decode", f"{t.tokens_per_second:.1f} tokens/s ({t.ms_per_token:.1f} ms per token)")
        floor = floor_ms(run)
        if floor:
            table.add_row("", f"{t.ms_per_token / floor:.1f} times the time it takes to read the weights once")
        table.add_row(
            "time split",
            f"draft {t.draft_ms:.0f} ms, verify {t.verify_ms:.0f} ms, overhead {t.overhead_ms:.0f} ms",
        )
    table.add_row("to first token", f"{run.ttft_ms:.0f} ms (prefill {run.prefill_ms:.0f} ms)")
    table.add_row("model", f"{run.target}, {run.dtype} on {run.device}, {run.versions.get('target_path', '')}")
    if vocabulary := run.versions.get("draft_vocabulary"):
        table.add_row("draft", f"{run.draft}, {vocabulary}")
    if scores := run.versions.get("draft_scores"):
        table.add_row("draft scores", scores)
    if earlier := run.versions.get("earlier_runs"):
        table.add_row("also drafted from", f"earlier runs: {earlier}")
    even = break_even(run, baseline)
    if even is not None:
        table.add_row("speed-up", f"{even.speedup:.2f} times the baseline. {even.sentence}")
    else:
        reason = baseline_fits(run, baseline) if baseline else None
        table.add_row("speed-up", f"no baseline{f' ({reason})' if reason else ''}")
    console.print(table)


def print_audit(result: AuditResult) -> None:
    """The verdicts of an audit as two tables."""
    console = Console(highlight=False)
    table = Table(title="greedy", box=None, pad_edge=False, title_justify="left")
    for name in ("proposer", "prompt", "verdict", "tokens", "drafted", "accepted", "first difference"):
        table.add_column(name)
    for g in result.greedy:
        table.add_row(
            g.proposer,
            g.prompt,
            g.verdict,
            str(g.tokens),
            str(g.drafted),
            str(g.accepted),
            "" if g.divergence is None else f"token {g.divergence}, top-2 gap {g.top2_gap:.3g}",
        )
    console.print(table)
    table = Table(title="sampled", box=None, pad_edge=False, title_justify="left")
    for name in ("proposer", "verdict", "samples", "tokens compared", "chi-square p", "total variation", "expected"):
        table.add_column(name)
    for s in result.sampled:
        table.add_row(
            s.proposer,
            s.verdict,
            str(s.samples),
            str(s.positions),
            f"{s.p_value:.3f}",
            f"{s.total_variation:.3f}",
            f"{s.expected_variation:.3f}",
        )
    console.print(table)
    if result.untested:
        console.print(f"not tested, because nothing was drafted: {', '.join(result.untested)}")
    console.print("lossless" if result.passed else "NOT shown to be lossless")
