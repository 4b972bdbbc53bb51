"""Runs carried from one database to another lose nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from decoder.trace import FinishReason
from storage import RunNotFound, State, Store, open_store
from tests.storage.factories import bare, keep, make_run


def runs_of(export: str) -> object:
    return json.loads(export)["runs"]


def test_export_import_export_is_the_same(store: Store) -> None:
    for i, reason in enumerate([*FinishReason, None]):
        keep(store, make_run(i, reason=reason, seed=i), name=f"n {i}", tags=["b", "a"], note="\0\u202e=1", author="ann")
    store.archive(store.ids()[:2], True)
    ids = sorted(store.ids(), reverse=True)
    export = store.export_json([*ids, ids[0]])  # an id that is given twice comes once
    with open_store("sqlite://") as other:
        taken = other.import_json(export, author="bob", source="team.json")
        assert taken == taken.new == ids
        assert taken.known == []
        assert runs_of(other.export_json(ids)) == runs_of(export)
        for run_id in ids:
            ours, theirs = store.get_run(run_id), other.get_run(run_id)
            assert theirs.run == ours.run
            assert theirs.meta.imported_from == "team.json"
            assert (theirs.meta.author, theirs.meta.created_at) == ("ann", ours.meta.created_at)
            assert (theirs.meta.archived, theirs.meta.state) == (ours.meta.archived, ours.meta.state)


def test_the_envelope_says_what_it_is(store: Store) -> None:
    run = keep(store, make_run())
    envelope = json.loads(store.export_json([run.id]))
    assert (envelope["redline"], envelope["schema"]) == ("runs", 1)
    assert datetime.fromisoformat(envelope["exported_at"]).tzinfo is not None
    assert envelope["runs"][0]["run"] == run.to_json()
    assert envelope["runs"][0]["meta"].keys() == {
        "name",
        "tags",
        "note",
        "author",
        "created_at",
        "state",
        "archived",
    }


def test_an_export_from_before_steps_gave_reasons_is_read(store: Store) -> None:
    run = keep(store, make_run(6))
    assert any(step.k_reason for step in run.steps)
    old = json.loads(store.export_json([run.id]))
    for step in old["runs"][0]["run"]["steps"]:
        del step["k_reason"]
    with open_store("sqlite://") as other:
        other.import_json(json.dumps(old))
        assert [step.k_reason for step in other.get_run(run.id).run.steps] == [None] * len(run.steps)
        assert other.get_run(run.id).run.output_ids == run.output_ids


def test_an_export_of_nothing_is_an_export(store: Store) -> None:
    assert runs_of(store.export_json([])) == []
    assert store.import_json(store.export_json([])) == []


def test_an_unknown_id_stops_an_export_before_it_begins(store: Store) -> None:
    run = keep(store, make_run())
    for export in (store.export_json, store.export_csv, store.iter_json):
        with pytest.raises(RunNotFound, match="no run 'gone'"):
            export([run.id, "gone"])


def test_a_running_run_travels_as_an_interrupted_one(store: Store) -> None:
    run = make_run(4)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:2])
    export = store.export_json([run.id])
    with open_store("sqlite://") as other:
        other.import_json(export)
        assert other.get_run(run.id).meta.state is State.INTERRUPTED
        assert other.get_run(run.id).run.steps == run.steps[:2]
        assert runs_of(other.export_json([run.id])) == runs_of(export)
    writer.finish(run)


@pytest.mark.parametrize("form", ["one", "list", "bytes", "with BOM", "envelope without meta"])
def test_bare_runs_are_taken_in_and_signed(store: Store, form: str) -> None:
    run = make_run()
    text = json.dumps(run.to_json())
    data: str | bytes = {
        "one": text,
        "list": f"[{text}]",
        "bytes": text.encode(),
        "with BOM": b"\xef\xbb\xbf" + text.encode(),
        "envelope without meta": f'{{"redline": "runs", "schema": 1, "runs": [{{"run": {text}}}]}}',
    }[form]
    before = datetime.now(UTC)
    assert store.import_json(data, author="ann", source="a\nb.json") == [run.id]
    stored = store.get_run(run.id)
    assert stored.run == run
    assert (stored.meta.author, stored.meta.imported_from) == ("ann", "a\\nb.json")
    assert before <= stored.meta.created_at <= datetime.now(UTC)


def test_runs_without_a_date_keep_the_order_of_the_file(store: Store) -> None:
    runs = [make_run(1) for _ in range(5)][::-1]
    store.import_json(json.dumps([run.to_json() for run in runs]))
    assert [row.id for row in store.summaries(descending=False).rows] == [run.id for run in runs]


def test_what_is_here_already_is_left_alone_and_reported(store: Store) -> None:
    old, new = keep(store, make_run(), name="mine"), make_run()
    taken = store.import_json(json.dumps([old.to_json(), new.to_json()]))
    assert list(taken) == [old.id, new.id]
    assert (taken.known, taken.new) == ([old.id], [new.id])
    assert store.get_run(old.id).meta.name == "mine"
    assert store.get_run(old.id).meta.imported_from is None
    again = store.import_json(json.dumps([old.to_json(), new.to_json()]))
    assert (again.known, again.new) == ([old.id, new.id], [])


def test_numbers_in_a_file_are_not_believed(store: Store) -> None:
    honest = make_run(6)
    boast = honest.replace(
        id="rboast", metrics={"tokens_per_second": 1e6, "draft_acceptance_rate": 1, "not_speculating": 7}
    )
    store.import_json(json.dumps([honest.to_json(), boast.to_json()]))
    rows = {row.id: row for row in store.summaries().rows}
    for name in ("tokens_per_second", "draft_acceptance_rate", "mean_acceptance_length", "ms_per_token"):
        assert getattr(rows["rboast"], name) == getattr(rows[honest.id], name), name
    assert rows["rboast"].not_speculating is None
    assert store.get_run("rboast").run == boast  # the run itself is what the file says


def test_an_export_is_made_piece_by_piece(store: Store) -> None:
    runs = [keep(store, make_run()) for _ in range(3)]
    pieces = list(store.iter_json([run.id for run in runs]))
    assert len(pieces) == 5
    assert "".join(pieces).count("\n") == 5  # one run a line
