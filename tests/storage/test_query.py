"""Lists: filters, order, pages. And they stay quick, which is: few statements, and no step is touched."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql, postgresql

from storage import RunFilter, State, StorageError, Store, open_store
from storage.codec import columns_of, encode_body, searchable
from storage.models import RunRow, TagRow, TraceRow
from storage.query import SORTS, _conditions, _order, _state
from tests.storage.factories import keep, make_run, make_start


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """The SQL that is run meanwhile."""
    seen: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    event.listen(store.database.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(store.database.engine, "before_cursor_execute", note)


def found(store: Store, **wanted: Any) -> set[str]:
    page = store.summaries(RunFilter(**wanted))
    assert page.total == len(page.rows)
    assert sorted(store.ids(RunFilter(**wanted))) == sorted(row.id for row in page.rows)
    return {row.id for row in page.rows}


def set_columns(store: Store, run_id: str, **values: Any) -> None:
    with store.database.write() as session:
        session.execute(sa.update(RunRow).where(RunRow.id == run_id).values(**values))


def test_text_is_found_in_name_note_prompt_and_output_whatever_its_case(store: Store) -> None:
    a = keep(store, make_run(2, prompt="Grüße aus KÖLN", text="Straße"), name="Äpfel", note="a Note")
    b = keep(store, make_run(2, prompt="nothing", text="here"))
    for text in ("grüße", "GRÜSSE AUS", "köln", "STRASSE", "äpfel", "NOTE", "gru\u0308\u00dfe", "  köln  "):
        assert found(store, text=text) == {a.id}, text
    assert found(store, text="") == found(store, text="   ") == {a.id, b.id}
    assert found(store, text="äpfela note") == set()  # not across the seam of two fields


@pytest.mark.parametrize("sign", ["%", "_", "/", "\\", "'", '"', "[a]", "*", "?", "%%", "a_c", "\0", "\0tail"])
def test_signs_of_like_are_plain_text(store: Store, sign: str) -> None:
    a = keep(store, make_run(2, prompt=f"x{sign}y"))
    b = keep(store, make_run(2, prompt="xabcy"), name=f"n{sign}")
    keep(store, make_run(2, prompt="xabcy"), note="other")
    assert found(store, text=sign) == {a.id, b.id}
    assert found(store, text=f"X{sign}Y") == {a.id}


def test_a_new_name_or_note_is_found_and_the_old_one_is_not(store: Store) -> None:
    run = keep(store, make_run(2), name="old", note="remark")
    store.rename(run.id, "New")
    assert found(store, text="old") == set()
    assert found(store, text="new") == found(store, text="remark") == {run.id}
    store.set_note(run.id, "")
    assert found(store, text="remark") == set()
    assert found(store, text="new") == {run.id}


def test_output_is_found_only_when_it_is_there(store: Store) -> None:
    run = make_run(4, text="needle", prompt="hay")
    writer = store.start_run(make_start(run_id=run.id, prompt="hay"))
    assert found(store, text="hay") == {run.id}
    assert found(store, text="needle") == set()
    writer.finish(run)
    assert found(store, text="needle") == {run.id}


def test_each_field_filters_and_fields_combine(store: Store) -> None:
    a = keep(store, make_run(2, target="big", k=2), author="ann", tags=["x", "y"])
    b = keep(store, make_run(2, target="big", k=4, proposer="ngram"), author="bob", tags=["y"])
    c = keep(store, make_run(2, proposer="none"), author="ann")
    assert found(store, target="big") == {a.id, b.id}
    assert found(store, proposer="ngram") == {b.id}
    assert found(store, draft="smollm2-135m-draft") == {a.id}
    assert found(store, k=2) == {a.id}
    assert found(store, tag="y") == {a.id, b.id}
    assert found(store, tag="Y") == set()
    assert found(store, author="ann") == {a.id, c.id}
    assert found(store, author="ann", tag="y", k=2) == {a.id}
    assert found(store, ids=[c.id, a.id, "gone", a.id]) == {a.id, c.id}
    assert found(store, ids=[]) == set()
    assert found(store, state="done") == {a.id, b.id, c.id}
    assert found(store, state=State.FAILED) == set()
    assert found(store, target="", proposer="", tag="", author="", state="") == {a.id, b.id, c.id}


def test_archived_runs_are_put_away_and_brought_back(store: Store) -> None:
    a, b = keep(store, make_run(2)), keep(store, make_run(2))
    assert store.archive([a.id, "gone"], True) == 1
    assert found(store) == {b.id}
    assert found(store, archived=True) == {a.id}
    assert found(store, archived=None) == {a.id, b.id}
    assert store.get_run(a.id).meta.archived
    assert store.archive([a.id, b.id], False) == 2
    assert found(store) == {a.id, b.id}


def test_dates_are_moments_whatever_their_zone(store: Store) -> None:
    run = keep(store, make_run(2))
    moment = datetime(2026, 1, 31, 23, 30, tzinfo=UTC)
    set_columns(store, run.id, created_at=moment)
    tokyo = moment.astimezone(timezone(timedelta(hours=9)))
    assert found(store, since=tokyo) == {run.id}  # included
    assert found(store, until=tokyo) == set()  # excluded
    assert found(store, since=moment + timedelta(microseconds=1)) == set()
    assert found(store, until=moment + timedelta(microseconds=1)) == {run.id}
    assert store.get_run(run.id).meta.created_at == moment
    assert store.get_run(run.id).meta.created_at.utcoffset() == timedelta(0)
    assert store.summaries().rows[0].created_at.tzinfo is UTC


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"since": datetime(2026, 1, 1)}, "since must say its time zone"),
        ({"until": datetime(2026, 1, 1)}, "until must say its time zone"),
        ({"state": "asleep"}, "unknown state 'asleep'"),
        ({"text": "x" * 10_001}, "10,001 characters long"),
        ({"text": "\ud800"}, "surrogate"),
        ({"tag": "\ud800"}, "surrogate"),
        ({"k": 2**70}, "k must be"),
        ({"ids": [str(i) for i in range(30_001)]}, "30,001 runs"),
    ],
)
def test_filters_that_make_no_sense_are_refused(store: Store, wanted: dict[str, Any], problem: str) -> None:
    with pytest.raises(StorageError, match=problem):
        store.summaries(RunFilter(**wanted))


@pytest.mark.parametrize(
    "options", [{"limit": -1}, {"limit": 1001}, {"offset": -1}, {"offset": 2**63}, {"limit": True}, {"sort": "steps"}]
)
def test_pages_that_make_no_sense_are_refused(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match=r"must be a whole number|cannot be sorted by"):
        store.summaries(**options)


@pytest.fixture(scope="module")
def mixed() -> Iterator[Store]:
    """Nine runs, some of which have no value in some columns; not to be changed."""
    with open_store("sqlite://") as store:
        for i in range(3):
            base = keep(store, make_run(3, proposer="none", seed=i), name="B")
            keep(store, make_run(4, seed=i, baseline_id=base.id, target="Zeta" if i else "alpha"), name="a")
            keep(store, make_run(1, seed=i))  # nothing was decoded: no speed, no acceptance
        yield store


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("descending", [True, False])
def test_every_sort_is_total_with_missing_values_last(mixed: Store, sort: str, descending: bool) -> None:
    store = mixed
    whole = store.summaries(sort=sort, descending=descending).rows
    pages = [store.summaries(sort=sort, descending=descending, limit=2, offset=n).rows for n in range(0, 9, 2)]
    assert [row.id for page in pages for row in page] == [row.id for row in whole]
    values = [getattr(row, sort) for row in whole]
    present = [v for v in values if v is not None]
    assert values == present + [None] * (len(values) - len(present))
    if sort in ("name", "author", "target", "draft", "prompt_preview", "text_preview"):
        present = [v.lower() for v in present]
    assert present == sorted(present, reverse=descending)
    for first, second in itertools.pairwise(whole):
        if getattr(first, sort) == getattr(second, sort):
            assert (first.id > second.id) == descending


def test_the_newest_comes_first_without_being_asked(store: Store) -> None:
    ids = [keep(store, make_run(1)).id for _ in range(3)]
    assert [row.id for row in store.summaries().rows] == ids[::-1]


def test_a_page_beyond_the_end_is_empty_and_still_knows_the_total(store: Store) -> None:
    keep(store, make_run(1))
    page = store.summaries(offset=10)
    assert (page.rows, page.total) == ([], 1)
    assert store.summaries(limit=0).total == 1


def test_facets_are_the_values_that_occur(store: Store) -> None:
    assert store.facets().targets == []
    keep(store, make_run(1, target="b", k=8), tags=["z", "a"], author="ann")
    keep(store, make_run(1, target="a", k=2, proposer="none"), author="bob")
    keep(store, make_run(1, target="a", k=2), tags=["a"])
    facets = store.facets()
    assert facets.targets == ["a", "b"]
    assert facets.proposers == ["draft-model", "none"]
    assert facets.drafts == ["smollm2-135m-draft"]
    assert facets.ks == [2, 8]
    assert facets.tags == ["a", "z"]
    assert facets.authors == ["ann", "anonymous", "bob"]


def test_summaries_become_json(store: Store) -> None:
    run = keep(store, make_run(2), tags=["b", "a"])
    raw = store.summaries().rows[0].to_json()
    assert (raw["id"], raw["tags"], raw["state"]) == (run.id, ["b", "a"], "done")
    assert datetime.fromisoformat(raw["created_at"]).tzinfo is not None


def test_ten_thousand_runs_take_as_many_statements_as_ten(store: Store) -> None:
    fill(store, 10_000)
    plain: dict[str, Any] = {"limit": 50, "offset": 4_950}
    with statements(store) as seen:
        page = store.summaries(**plain)
    assert (page.total, len(page.rows)) == (10_000, 50)
    assert page.rows[0].tags == ("t1", "all")
    selects = [s for s in seen if s.startswith("SELECT")]
    assert len(selects) == 4  # running runs, the total, the rows, their tags
    assert not any("steps" in s.split("FROM")[1] or "traces" in s for s in selects)
    assert not any("body" in s or "payload" in s for s in selects)

    with statements(store) as seen:
        page = store.summaries(RunFilter(text="needle 77", target="smollm2-135m", tag="all"), sort="speedup")
    assert page.total == 111  # 77, 770 to 779, 7700 to 7799
    assert len([s for s in seen if s.startswith("SELECT")]) == 4
    assert not any("steps" in s.split("FROM")[1] for s in seen if s.startswith("SELECT"))


@pytest.mark.parametrize("archived", [False, True])
def test_the_first_page_reads_along_an_index(store: Store, archived: bool) -> None:
    fill(store, 200)
    state = _state(())
    query = (
        sa.select(RunRow.id)
        .where(*_conditions(RunFilter(archived=archived), state))
        .order_by(*_order("created_at", True, state))
        .limit(50)
    )
    with store.database.read() as session:
        sql = str(query.compile(store.database.engine, compile_kwargs={"literal_binds": True}))
        plan = " ".join(row[3] for row in session.execute(sa.text(f"EXPLAIN QUERY PLAN {sql}")))
    assert "ix_runs_archived_created_at_id" in plan
    assert "TEMP B-TREE" not in plan  # nothing is sorted


def fill(store: Store, count: int) -> None:
    """Many runs in four statements, as far as lists are concerned."""
    run = make_run(2)
    columns, body = columns_of(run), encode_body(run)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    ids = [f"r{i:05}" for i in range(count)]
    with store.database.write() as session:
        session.execute(
            sa.insert(RunRow),
            [
                {
                    "id": run_id,
                    "created_at": start + timedelta(minutes=i),
                    "author": f"a{i % 7}",
                    "state": "done",
                    "archived": False,
                    **columns,
                }
                for i, run_id in enumerate(ids)
            ],
        )
        session.execute(
            sa.insert(TraceRow),
            [
                {"run_id": run_id, "body": body, "final": True, "search": searchable([f"needle {i}", ""])}
                for i, run_id in enumerate(ids)
            ],
        )
        session.execute(
            sa.insert(TagRow),
            [{"run_id": run_id, "tag": f"t{i % 2}", "position": 0} for i, run_id in enumerate(ids)]
            + [{"run_id": run_id, "tag": "all", "position": 1} for run_id in ids],
        )


@pytest.mark.parametrize("dialect", [postgresql.dialect(), mysql.dialect()], ids=["postgresql", "mysql"])
def test_queries_are_not_bound_to_sqlite(dialect: Any) -> None:
    wanted = RunFilter(text="50%", tag="t", k=2, since=datetime(2026, 1, 1, tzinfo=UTC), ids=["a"], state="done")
    state = _state({"dead"})
    for sort in SORTS:
        query = sa.select(RunRow).where(*_conditions(wanted, state)).order_by(*_order(sort, True, state)).limit(5)
        sql = str(query.compile(dialect=dialect))
        assert "NULLS LAST" not in sql  # MySQL does not know it
        assert "ESCAPE" in sql


def test_every_column_of_a_summary_is_a_column_of_the_table() -> None:
    from storage.records import RunSummary

    names = {f.name for f in dataclasses.fields(RunSummary)} - {"tags"}
    assert names <= set(RunRow.__table__.columns.keys())


def test_recent_outputs_are_the_newest_ended_runs_of_one_target(store: Store) -> None:
    a, b, c, other = (keep(store, make_run(3, target=t)) for t in ("x", "x", "x", "y"))
    store.start_run(make_start(target="x"))  # still going on
    archived = keep(store, make_run(3, target="x"))
    store.archive([archived.id])
    assert store.recent_outputs("x") == [list(run.output_ids) for run in (c, b, a)]
    assert store.recent_outputs("x", leave_out=[c.id], runs=1) == [list(b.output_ids)]
    assert store.recent_outputs("y") == [list(other.output_ids)]
    assert store.recent_outputs("nobody") == []
    cut = store.recent_outputs("x", tokens=len(c.output_ids) + 1)
    assert [len(ids) for ids in cut] == [len(c.output_ids), 1]
    with statements(store) as seen:
        store.recent_outputs("x")
    assert not any("steps" in statement for statement in seen)
