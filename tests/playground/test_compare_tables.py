"""Numbers side by side: hand-worked differences, reasons instead of gaps, and escaped text."""

from __future__ import annotations

from decoder.trace import FinishReason
from playground import compare_tables as tables
from tests.playground.visual_runs import baseline_of, make_run

RUN = make_run(run_id="r1", proposer="ngram", k=3, temperature=0)
BASE = baseline_of(RUN, "r2")


def metric(title: str) -> tables.Metric:
    return next(m for m in tables.METRICS if m.title == title)


def test_differences_are_signed_and_named() -> None:
    speed, time = metric("Tokens per second"), metric("Time per token")
    assert tables.signed(12.0, 10.0, speed) == "+2.0 (+20 %) better"
    assert tables.signed(8.0, 10.0, speed) == "−2.0 (−20 %) worse"
    assert tables.signed(8.0, 10.0, time) == "−2.0 ms (−20 %) better"
    assert tables.signed(10.01, 10.0, time) == "the same"
    assert tables.signed(5.0, 0.0, metric("Drafted tokens")) == "+5"


def test_acceptance_is_never_called_better() -> None:
    words = tables.signed(80.0, 40.0, metric("Acceptance rate"))
    assert words == "+40 %"
    assert metric("Acceptance rate").better is None
    assert metric("Mean acceptance length").better is None


def test_a_table_gives_reasons_where_there_is_no_number() -> None:
    html = tables.metrics_table([BASE, RUN], ["", ""], 0, [None, 1.25])
    assert "it is a baseline" in html
    assert "1.25×" in html
    assert "nothing drafted" in html
    assert "differences are to this one" in html


def test_only_differences() -> None:
    some = tables.configuration_table([BASE, RUN], ["", ""], only_differences=True)
    assert "proposer" in some
    assert "temperature" not in some
    everything = tables.configuration_table([BASE, RUN], ["", ""], only_differences=False)
    assert "temperature" in everything
    assert "differs" in everything
    same = tables.configuration_table([RUN, RUN], ["", ""], only_differences=True)
    assert "exactly the same" in same


def test_foreign_text_is_escaped() -> None:
    evil = RUN.replace(target="<script>", request={**RUN.request, "prompt": "<img src=x>", "<b>": "`${1}`"})
    html = tables.configuration_table([evil, RUN], ["<i>", ""], only_differences=True)
    html += tables.metrics_table([evil, RUN], ["<i>", ""], 0, [None, None])
    for tag in ("<script>", "<img", "<i>", "<b>:"):
        assert tag not in html
    assert "&lt;script&gt;" in html


def test_cautions() -> None:
    assert tables.caution([RUN, BASE]) is None
    other = RUN.replace(target="other", dtype="float32")
    assert "target, dtype" in (tables.caution([RUN, other]) or "")


def test_rates_are_pooled_by_tokens() -> None:
    line = tables.pooled_line([BASE, RUN, RUN.replace(id="r3")])
    assert line.startswith("Pooled over 2 drafting runs:")
    assert "B " in line
    assert "C " in line
    assert tables.pooled_line([BASE]) == "None of these runs drafted anything."


def test_greedy_texts_that_differ_are_explained() -> None:
    assert tables.divergence([RUN, BASE]) is None
    other = make_run(["Other", " text"], run_id="r4", proposer="ngram", k=3, temperature=0)
    assert "bfloat16" in (tables.divergence([RUN, other]) or "")
    assert "audit" in (tables.divergence([r.replace(dtype="float32") for r in (RUN, other)]) or "")
    sampled = make_run(["Other"], run_id="r5", temperature=0.7)
    assert tables.divergence([sampled, RUN]) is None


def test_a_text_that_was_cut_off_is_not_called_different() -> None:
    cut = RUN.replace(id="r6", output_ids=RUN.output_ids[:3], steps=RUN.steps[:2])
    for reason in (None, FinishReason.CANCELLED, FinishReason.ERROR):
        assert tables.divergence([RUN, cut.replace(finish_reason=reason)]) is None
    assert tables.divergence([RUN, cut.replace(finish_reason=FinishReason.LENGTH)]) is not None
