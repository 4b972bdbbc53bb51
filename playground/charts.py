"""Charts of one or several runs: a figure, the table behind it, and one sentence that says what it shows.

Figures are transparent and name no text colour that fails on paper or on dark: assets/css/tokens.css recolours text,
axes and bars of ``.rl-plot`` by class, so that one figure serves light and dark. Draw them once, when a run is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from decoder.metrics import acceptance
from decoder.trace import Run

GREY = "#7c7f87"
SERIES = ("#2f9e78", "#e59c3f", "#3b78d8", "#b0567f", "#8a8d96", "#8b6fc6", "#4aa3b5", "#a6761d")
"""Colours of overlaid runs: readable on paper and on dark, told apart by symbol and dash as well."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
PARTS = {"draft": "#e59c3f", "verify": "#6d717c", "overhead": "#a9a59c"}
ACCEPTED = "#2f9e78"
MAX_LABEL = 60


@dataclass(frozen=True, slots=True)
class Chart:
    """``figure`` for ``gr.Plot``, ``table`` for those who want the numbers, ``text`` for those who cannot see it."""

    figure: go.Figure
    table: pd.DataFrame
    text: str


def _figure(title_x: str, title_y: str, *, height: int = 260) -> go.Figure:
    figure = go.Figure()
    axis = {"gridcolor": "rgba(128,128,128,0.22)", "zerolinecolor": "rgba(128,128,128,0.35)", "automargin": True}
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 46, "r": 12, "t": 12, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": GREY},
        xaxis={"title": {"text": title_x, "font": {"size": 12}}, "showgrid": False, **axis},
        yaxis={"title": {"text": title_y, "font": {"size": 12}}, "rangemode": "tozero", **axis},
        legend={"orientation": "h", "y": 1.12, "x": 0},
        bargap=0.35,
        hovermode="closest",
    )
    return figure


def _safe(label: str) -> str:
    """Labels are a visitor's text; Plotly reads tags and ``%{...}`` in them. Cut first: entities stay whole."""
    short = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"
    visible = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in short)
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        visible = visible.replace(sign, entity)
    # Plotly knows no escape for its braces: an invisible joiner between the two signs keeps them text.
    return visible.replace("%{", "%\N{WORD JOINER}{")


def _named(runs: Mapping[str, Run]) -> list[tuple[str, Run]]:
    return [(_safe(label), run) for label, run in runs.items()]


def _no_drafts(runs: Sequence[tuple[str, Run]]) -> str | None:
    return None if any(acceptance(run.steps).num_spec_steps for _, run in runs) else "Nothing was drafted."


def per_position(runs: Mapping[str, Run]) -> Chart:
    """Share of drafting steps whose draft at position 1, 2, ... was accepted. One run: bars; several: lines."""
    named = _named(runs)
    figure = _figure("position in the draft", "accepted")
    rows: list[dict[str, object]] = []
    for number, (label, run) in enumerate(named):
        shares = acceptance(run.steps).acceptance_per_position
        places = list(range(1, len(shares) + 1))
        hover = "position %{x}: %{y:.0%} accepted<extra>" + label + "</extra>"
        if len(named) == 1:
            figure.add_bar(x=places, y=shares, marker_color=ACCEPTED, name=label, hovertemplate=hover)
        else:
            figure.add_scatter(x=places, y=shares, name=label, hovertemplate=hover, **_line(number))
        rows += [{"run": label, "position": p, "accepted": s} for p, s in zip(places, shares, strict=True)]
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    figure.update_xaxes(dtick=1)
    table = pd.DataFrame(rows, columns=["run", "position", "accepted"])
    return Chart(figure, table, _no_drafts(named) or _say_positions(table))


def _say_positions(table: pd.DataFrame) -> str:
    said = []
    for label, part in table.groupby("run", sort=False):
        first, last = part["accepted"].iloc[0], part["accepted"].iloc[-1]
        said.append(f"{label}: {first:.0%} of first drafts accepted, {last:.0%} at position {len(part)}")
    return "Acceptance by position. " + "; ".join(said) + "."


def accepted_per_step(runs: Mapping[str, Run]) -> Chart:
    """Histogram: how many drafting steps accepted 0, 1, 2, ... draft tokens. Several runs: shares, side by side."""
    named = _named(runs)
    several = len(named) > 1
    figure = _figure("draft tokens accepted in a step", "share of steps" if several else "steps")
    rows: list[dict[str, object]] = []
    for number, (label, run) in enumerate(named):
        numbers = acceptance(run.steps)
        counts = numbers.acceptance_histogram
        shares = [count / numbers.num_spec_steps for count in counts]
        heights = shares if several else list(counts)
        figure.add_bar(
            x=list(range(len(counts))),
            y=heights,
            name=label,
            marker_color=SERIES[number % len(SERIES)] if several else ACCEPTED,
            customdata=list(counts),
            hovertemplate="%{x} accepted: %{customdata} steps<extra>" + label + "</extra>",
        )
        rows += [
            {"run": label, "accepted": n, "steps": count, "share": share}
            for n, (count, share) in enumerate(zip(counts, shares, strict=True))
        ]
    if several:
        figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(dtick=1)
    table = pd.DataFrame(rows, columns=["run", "accepted", "steps", "share"])
    return Chart(figure, table, _no_drafts(named) or _say_histogram(table))


def _say_histogram(table: pd.DataFrame) -> str:
    said = []
    for label, part in table.groupby("run", sort=False):
        top = part.sort_values("steps").iloc[-1]
        said.append(
            f"{label}: {int(top['accepted'])} is the most frequent, in {top['share']:.0%} of the drafting steps"
        )
    return "Draft tokens accepted per step. " + "; ".join(said) + "."


def time_split(run: Run) -> Chart:
    """Draft, verify and overhead milliseconds of each step, stacked."""
    steps = [s for s in run.steps if s.index > 0]
    table = pd.DataFrame(
        {
            "step": [s.index for s in steps],
            "draft": [s.draft_ms for s in steps],
            "verify": [s.verify_ms for s in steps],
            "overhead": [s.overhead_ms for s in steps],
        }
    )
    figure = _figure("step", "ms")
    for part, colour in PARTS.items():
        figure.add_bar(
            x=table["step"],
            y=table[part],
            name=part,
            marker_color=colour,
            hovertemplate="step %{x}: %{y:.1f} ms " + part + "<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.1 if len(steps) < 120 else 0)
    total = float(table[list(PARTS)].to_numpy().sum())
    if not total:
        return Chart(figure, table, "No step was timed.")
    shares = ", ".join(f"{part} {table[part].sum() / total:.0%}" for part in PARTS)
    return Chart(figure, table, f"Time of {len(steps)} steps: {shares}.")


def step_times(runs: Mapping[str, Run]) -> Chart:
    """Milliseconds per step of several runs, overlaid."""
    named = _named(runs)
    figure = _figure("step", "ms per step")
    rows: list[dict[str, object]] = []
    for number, (label, run) in enumerate(named):
        steps = [s for s in run.steps if s.index > 0]
        times = [s.draft_ms + s.verify_ms + s.overhead_ms for s in steps]
        line = _line(number)
        line["mode"] = "lines"
        figure.add_scatter(
            x=[s.index for s in steps],
            y=times,
            name=label,
            hovertemplate="step %{x}: %{y:.1f} ms<extra>" + label + "</extra>",
            **line,
        )
        rows += [{"run": label, "step": s.index, "ms": ms} for s, ms in zip(steps, times, strict=True)]
    table = pd.DataFrame(rows, columns=["run", "step", "ms"])
    medians = [f"{label}: median {part['ms'].median():.1f} ms" for label, part in table.groupby("run", sort=False)]
    return Chart(figure, table, f"Time per step. {'; '.join(medians)}." if medians else "No step was timed.")


def _line(number: int) -> dict[str, object]:
    colour = SERIES[number % len(SERIES)]
    return {
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
        "marker": {"color": colour, "size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
    }
