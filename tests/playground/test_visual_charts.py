"""Charts: the numbers behind them, and words for those who cannot see them."""

from __future__ import annotations

import pytest

from decoder.metrics import acceptance
from playground import charts
from tests.playground.visual_runs import baseline_of, make_run

RUN = make_run()
PLAIN = baseline_of(RUN)


def test_one_run_is_drawn_as_bars_with_the_shares_of_the_metrics() -> None:
    chart = charts.per_position({"k 4": RUN})
    assert [trace.type for trace in chart.figure.data] == ["bar"]
    assert chart.table["accepted"].tolist() == pytest.approx(list(acceptance(RUN.steps).acceptance_per_position))
    assert "first drafts accepted" in chart.text


def test_several_runs_are_told_apart_without_colour() -> None:
    chart = charts.per_position({"a": RUN, "b": make_run(k=8, seed=2)})
    assert len({trace.line.dash for trace in chart.figure.data}) == 2
    assert len({trace.marker.symbol for trace in chart.figure.data}) == 2
    assert set(chart.table["run"]) == {"a", "b"}


def test_the_histogram_counts_drafting_steps() -> None:
    chart = charts.accepted_per_step({"a": RUN})
    assert chart.table["steps"].tolist() == list(acceptance(RUN.steps).acceptance_histogram)
    both = charts.accepted_per_step({"a": RUN, "b": RUN})
    assert both.table.groupby("run")["share"].sum().tolist() == pytest.approx([1.0, 1.0])


def test_a_run_without_drafts_is_said_in_words() -> None:
    for chart in (charts.per_position({"plain": PLAIN}), charts.accepted_per_step({"plain": PLAIN})):
        assert chart.text == "Nothing was drafted."
        assert chart.table.empty


def test_time_split_sums_to_the_decode_time() -> None:
    chart = charts.time_split(RUN)
    assert chart.table[["draft", "verify", "overhead"]].to_numpy().sum() == pytest.approx(RUN.decode_ms)
    assert "verify" in chart.text
    assert charts.time_split(RUN.replace(steps=())).text == "No step was timed."


def test_step_times_are_overlaid() -> None:
    chart = charts.step_times({"a": RUN, "plain": PLAIN})
    assert [trace.name for trace in chart.figure.data] == ["a", "plain"]
    assert len(chart.table) == len(RUN.steps) + len(PLAIN.steps) - 2
    assert charts.step_times({}).text == "No step was timed."


def test_labels_are_text_and_figures_have_no_ground() -> None:
    chart = charts.step_times({"<b>x</b><script>": RUN})
    assert "<" not in chart.figure.data[0].name
    assert chart.figure.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_labels_are_cut_whole_and_never_evaluated() -> None:
    for draw in (charts.per_position, charts.accepted_per_step, charts.step_times):
        chart = draw({"%{customdata}\u202e\0": RUN, "a" * 59 + "<b>": RUN})
        hostile, long = chart.figure.data
        assert "%{customdata}<" not in hostile.hovertemplate
        assert not any(c in hostile.name for c in "\u202e\0")
        assert "%\u2060{customdata}" in hostile.hovertemplate
        assert long.name == "a" * 59 + "…"
    assert charts.step_times({"a" * 58 + "<b": RUN}).figure.data[0].name == "a" * 58 + "&lt;b"
