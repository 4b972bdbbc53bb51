"""Charts below a run or a comparison: drawn once, when all is known, because a plot that changes loses its zoom.

Plotly and pandas are imported at the first chart, so that the page opens without them.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import gradio as gr

from decoder.trace import Run

if TYPE_CHECKING:
    from playground.charts import Chart

Draw = Callable[[Mapping[str, Run]], "Chart"]


def _per_position(runs: Mapping[str, Run]) -> Chart:
    from playground import charts

    return charts.per_position(runs)


def _accepted_per_step(runs: Mapping[str, Run]) -> Chart:
    from playground import charts

    return charts.accepted_per_step(runs)


def _time_split(runs: Mapping[str, Run]) -> Chart:
    from playground import charts

    return charts.time_split(next(iter(runs.values())))


def _step_times(runs: Mapping[str, Run]) -> Chart:
    from playground import charts

    return charts.step_times(runs)


ONE_RUN: tuple[tuple[str, Draw], ...] = (
    ("Accepted by position in the draft", _per_position),
    ("Draft tokens accepted per step", _accepted_per_step),
    ("Where the time of each step went", _time_split),
)
SEVERAL_RUNS: tuple[tuple[str, Draw], ...] = (
    ("Accepted by position in the draft", _per_position),
    ("Time of each step", _step_times),
)


class RunCharts:
    """A card with one plot and one sentence for each of ``kinds``. Built where it is called."""

    def __init__(self, kinds: tuple[tuple[str, Draw], ...], elem_id: str) -> None:
        self.kinds = kinds
        self.plots: list[Any] = []
        self.words: list[Any] = []
        with gr.Row(visible=False, elem_id=elem_id, elem_classes="rl-charts") as self.box:
            for number, (title, _) in enumerate(kinds):
                with gr.Column(min_width=260, elem_classes="rl-card rl-chart"):
                    gr.HTML(f"<h3 class='rl-chart-title'>{html.escape(title)}</h3>")
                    self.plots.append(
                        gr.Plot(
                            show_label=False, elem_id=f"{elem_id}-{number}", elem_classes="rl-plot", container=False
                        )
                    )
                    self.words.append(gr.HTML("", elem_classes="rl-help"))

    @property
    def outputs(self) -> list[Any]:
        """The outputs of ``draw`` and ``clear``."""
        return [self.box, *self.plots, *self.words]

    def draw(self, runs: Mapping[str, Run]) -> list[Any]:
        """Values for ``outputs``; runs without a decoded step have nothing to draw."""
        if not any(len(run.steps) > 1 for run in runs.values()):
            return self.clear()
        found = [draw(runs) for _, draw in self.kinds]
        # The plot's own description is its sentence: a reader who does not see the plot hears the same.
        sentences = [
            html.escape(chart.text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")) for chart in found
        ]
        return [gr.update(visible=True), *(chart.figure for chart in found), *sentences]

    def clear(self) -> list[Any]:
        """Values for ``outputs`` while there is nothing to draw."""
        return [gr.update(visible=False), *[None] * len(self.plots), *[""] * len(self.words)]
