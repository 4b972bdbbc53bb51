"""CSV: safe to open in a spreadsheet, and readable by anything that reads CSV."""

from __future__ import annotations

import csv
import io

import pandas as pd
import pytest

from storage import Store
from storage.spreadsheet import COLUMNS, guard
from tests.storage.factories import bare, keep, make_run


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_one_row_per_run_in_the_order_asked_for(store: Store) -> None:
    a = keep(store, make_run(4, seed=3, temperature=0.7), name="first", tags=["x", "y"], author="ann")
    b = keep(store, make_run(4, proposer="none"))
    rows = rows_of(store.export_csv([b.id, a.id, b.id]))
    assert [row["id"] for row in rows] == [b.id, a.id]
    assert tuple(rows[0]) == COLUMNS
    row, summary = rows[1], next(r for r in store.summaries().rows if r.id == a.id)
    assert (row["name"], row["author"], row["tags"], row["state"]) == ("first", "ann", "x; y", "done")
    assert (row["seed"], row["temperature"], row["top_p"], row["chat"]) == ("3", "0.7", "1.0", "true")
    assert float(row["tokens_per_second"]) == summary.tokens_per_second
    assert float(row["draft_acceptance_rate"]) == summary.draft_acceptance_rate
    assert rows[0]["draft_acceptance_rate"] == ""  # nothing was drafted: no number, not 0
    assert (row["prompt"], row["text"]) == ("Why is the sky blue?", a.text)


def test_no_runs_are_a_header(store: Store) -> None:
    assert store.export_csv([]).splitlines() == [",".join(COLUMNS)]


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "=cmd|'/c calc'!A1", "-"]
)
def test_formulas_become_text(store: Store, text: str) -> None:
    run = keep(store, make_run(2, prompt=text, text=text), name=text, note=text, author=text, tags=[text.strip()])
    row = rows_of(store.export_csv([run.id]))[0]
    assert row["name"] == row["note"] == row["prompt"] == "'" + text
    assert row["author"] == "'" + text.strip() or not text.strip().startswith(tuple("=+-@＝"))
    assert row["text"] == "'" + run.text
    for cell in row.values():
        assert not cell.startswith(tuple("=+-@\t\r\n＝"))


def test_numbers_stay_numbers() -> None:
    assert guard(-1.5) == -1.5
    assert guard(-1) == -1
    assert guard(None) is None
    assert guard("plain = text") == "plain = text"


def test_quotes_newlines_and_nul_do_not_break_rows(store: Store) -> None:
    nasty = 'a "quoted", comma\nnewline\r\nboth\rreturn\0nul; semi\u2028'
    first = keep(store, make_run(2, prompt=nasty), note=nasty)
    second = keep(store, make_run(2), name="after")
    text = store.export_csv([first.id, second.id])
    rows = rows_of(text)
    assert [row["name"] for row in rows] == ["", "after"]
    assert rows[0]["note"] == rows[0]["prompt"] == nasty.replace("\0", "\u2400")
    frame = pd.read_csv(io.StringIO(text, newline=""))
    assert list(frame["id"]) == [first.id, second.id]
    assert frame["num_output_tokens"].tolist() == [len(first.output_ids), len(second.output_ids)]


def test_a_running_run_is_a_row_as_well(store: Store) -> None:
    run = make_run(3)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:2])
    assert rows_of(store.export_csv([run.id]))[0]["state"] == "running"
    writer.finish(run)
