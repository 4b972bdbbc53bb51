"""A bench as tables: for a terminal, or as Markdown for a document; both from the same lists of strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decoder.bench.goals import goals
from decoder.bench.result import BenchResult
from decoder.bench.round_times import RoundTimes
from decoder.bench.summary import ALL, Ratio, RowSummary, rows
from decoder.bench.synthetic import Synthetic
from decoder.bench.widths import Width


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table. The first column is text, the others are numbers. ``rows`` may end early (a sentence)."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def number(value: float | None, digits: int = 2) -> str:
    """A number, or "-" where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share in percent, or "-"."""
    return "-" if value is None else f"{value:.{digits}%}"


def ratio_text(value: Ratio | None) -> str:
    """Pooled, then median and quartiles over prompts."""
    if value is None:
        return "-"
    return f"{value.pooled:.2f} ({value.median:.2f}; {value.low:.2f}-{value.high:.2f})"


ROW_HEADS = (
    "engine / proposer / k",
    "tokens/s",
    "with trace",
    "vs our plain",
    "vs transformers",
    "accepted",
    "length",
    "tokens/step",
    "draft",
    "verify",
    "overhead",
    "x floor",
)


def row_sheet(title: str, found: list[RowSummary], note: str = "") -> Sheet:
    """The main table of one suite."""
    lines: list[tuple[str, ...]] = []
    for row in found:
        if row.error and not row.tokens:
            lines.append((row.variant, row.error))
            continue
        lines.append(
            (
                row.variant + (f" (stopped: {row.error})" if row.error else ""),
                number(row.tokens_per_second, 1),
                number(row.wall_tokens_per_second, 1),
                ratio_text(row.vs_plain),
                ratio_text(row.vs_transformers),
                percent(row.draft_acceptance_rate),
                number(row.mean_acceptance_length),
                number(row.tokens_per_step),
                number(row.draft_ms, 1),
                number(row.verify_ms, 1),
                number(row.overhead_ms),
                number(row.floor_times),
            )
        )
    return Sheet(title, ROW_HEADS, tuple(lines), note)


def sheets(result: BenchResult) -> list[Sheet]:
    """Every table of a bench, in order."""
    found = []
    by_suite: dict[str, list[RowSummary]] = {}
    for row in result.rows():
        by_suite.setdefault(row.suite, []).append(row)
    for suite, of_suite in by_suite.items():
        title = "every suite" if suite == ALL else suite
        prompts = max(row.prompts for row in of_suite)
        found.append(row_sheet(f"{title}, {prompts} prompts x {result.plan.repeats}", of_suite))
    if result.widths:
        found.append(_widths("one pass of several tokens, behind 256", result.widths))
    if result.batches or result.batch_errors:
        found.append(_batches(result))
    if result.memory:
        m = result.memory
        line = (f"{m.runs} runs", number(m.first_mb, 0), number(m.last_mb, 0), number(m.ratio, 3))
        found.append(Sheet("resident memory", ("", "MB after 5", "MB at the end", "ratio"), (line,)))
    for synthetic in result.synthetic:
        found.extend(_synthetic(synthetic))
    reached = goals(result)
    if reached:
        found.append(
            Sheet(
                "goals",
                ("what", "measured", "goal", "at least", ""),
                tuple((g.what, number(g.measured, 3), f"{g.goal:g}", f"{g.least:g}", g.verdict) for g in reached),
            )
        )
    return found


def _widths(title: str, widths: tuple[Width, ...]) -> Sheet:
    return Sheet(
        title,
        ("tokens", "ms", "quartiles", "device ms", "over one token"),
        tuple(
            (
                str(w.width),
                number(w.ms.median),
                f"{w.ms.low:.2f}-{w.ms.high:.2f}",
                number(w.device_ms.median if w.device_ms else None),
                number(w.ratio),
            )
            for w in widths
        ),
    )


def _batches(result: BenchResult) -> Sheet:
    lines: list[tuple[str, ...]] = []
    for row in result.batch_rows():
        if row.error:
            lines.append((f"{row.batch} x {row.variant}", row.error))
            continue
        s = row.spread
        lines.append(
            (
                f"{row.batch} x {row.variant}",
                number(row.tokens_per_second, 1),
                number(row.wall_tokens_per_second, 1),
                number(row.speedup),
                f"{s.low:.2f}-{s.high:.2f}" if s else "-",
                number(row.rows_alive, 1),
            )
        )
    heads = ("rows x proposer", "tokens/s in all", "with traces", "vs plain", "quartiles", "rows alive")
    return Sheet("many requests at once", heads, tuple(lines))


def _synthetic(found: Synthetic) -> list[Sheet]:
    title = f"random Llama {found.shape}, {found.dtype} on {found.device}, {found.parameters / 1e9:.2f} B parameters"
    sheets_: list[Sheet] = []
    floor_ms = found.floor.ms if found.floor else None
    if found.rounds:
        sheets_.append(_rounds(f"{title}: medians of a round", found.rounds, floor_ms))
    if found.samples or found.errors:
        variants = list(dict.fromkeys([s.variant for s in found.samples] + list(found.errors)))
        table = rows(found.samples, variants, found.errors, ["synthetic"], floor_ms)
        note, f = "", found.floor
        if f:
            note = f"floor {f.ms:.2f} ms per token ({f.bandwidth / 1e9:,.0f} GB/s by {f.method})"
        sheets_.append(row_sheet(f"{title}, {found.path}" if found.path else title, table, note))
    for widths, context in ((found.widths, found.context), (found.long_widths, found.long_context)):
        if widths:
            sheets_.append(_widths(f"{title}: one pass of several tokens, behind {context:,}", widths))
    if found.exact:
        lines = tuple((name, exact.words()) for name, exact in found.exact.items())
        sheets_.append(Sheet(f"{title}, {found.path}: greedy against plain decoding", ("proposer", "tokens"), lines))
    return sheets_


def _rounds(title: str, found: tuple[RoundTimes, ...], floor_ms: float | None) -> Sheet:
    heads = ("engine / proposer / k", "rounds", "ms", "quartiles", "draft", "verify", "overhead", "tokens", "x floor")
    lines = tuple(
        (
            r.variant,
            str(r.rounds),
            number(r.ms.median),
            f"{r.ms.low:.2f}-{r.ms.high:.2f}",
            number(r.draft_ms),
            number(r.verify_ms),
            number(r.overhead_ms, 3),
            number(r.tokens),
            number(r.ms_per_token / floor_ms if floor_ms else None),
        )
        for r in found
    )
    return Sheet(title, heads, lines, "ms per decode step; tokens is the mean of a step, x floor that of a token")


def summary_lines(result: BenchResult) -> list[str]:
    """What the numbers belong to, and the floor."""
    m = result.machine
    lines = [
        f"{m['device_name']}, {m['cores']} cores, {m['threads']} threads, {m['dtype']} on {m['device']}, "
        f"torch {m['torch']}, transformers {m['transformers']}, {result.created}"
    ]
    load = m.get("load_before")
    if load is not None and load > 0.5:
        lines.append(f"not a quiet machine: its load average was {load:g} before the bench began")
    if not result.synthetic:
        p = result.plan
        lines.append(f"{p.target}, greedy, up to {p.tokens} tokens, {p.repeats} repeats; decode only, prefill left out")
        paths = sorted({s.path for s in result.samples if s.path and s.variant.startswith("redline")})
        lines.extend(f"path: {path}" for path in paths)
    if result.floor:
        f = result.floor
        lines.append(
            f"floor: {f.bytes_per_token / 1e6:,.0f} MB of weights at {f.bandwidth / 1e9:.1f} GB/s ({f.method}, "
            f"{f.threads} threads) = {f.ms:.2f} ms per token"
        )
    return lines


def print_bench(result: BenchResult, *, width: int | None = None) -> None:
    """The tables on stdout. Without a terminal they are as wide as they need to be."""
    console = Console(highlight=False)
    if width or not console.is_terminal:
        console = Console(highlight=False, width=width or 200)
    for text in summary_lines(result):
        console.print(escape(text))
    for sheet in sheets(result):
        table = Table(box=None, pad_edge=False)
        for index, head in enumerate(sheet.heads):
            table.add_column(escape(head), justify="right" if index else "left", no_wrap=index == 0)
        sentences = []
        for line in sheet.rows:
            if len(line) < len(sheet.heads):
                table.add_row(escape(line[0]), *(["-"] if len(sheet.heads) > 1 else []))
                sentences.append(f"{line[0]}: {line[1]}")
            else:
                table.add_row(*(escape(cell) for cell in line))
        console.print()
        console.print(escape(sheet.title), style="bold")
        console.print(table)
        for text in [*sentences, *([sheet.note] if sheet.note else [])]:
            console.print(escape(text))


def markdown(result: BenchResult) -> str:
    """The same tables for a document."""
    parts = ["\n".join(f"- {line}" for line in summary_lines(result))]
    for sheet in sheets(result):
        rule = ["---" if index == 0 else "---:" for index in range(len(sheet.heads))]
        lines: list[Sequence[str]] = [sheet.heads, rule, *(_filled(row, len(sheet.heads)) for row in sheet.rows)]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts.append(f"### {sheet.title}\n\n{table}" + (f"\n\n{sheet.note}" if sheet.note else ""))
    return "\n\n".join(parts) + "\n"


def _filled(row: tuple[str, ...], width: int) -> list[str]:
    return [*row, *[""] * (width - len(row))]
