"""Examples, stored runs and list rows as they are shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoder.trace import FinishReason
from playground import example_runs, stored_view
from playground.history_view import row
from storage import RunFilter, Store, open_store
from tests.playground.visual_runs import baseline_of, make_run

RUN = make_run(run_id="r1", proposer="ngram", temperature=0)
BASE = baseline_of(RUN, "r2")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}") as opened:
        yield opened


def keep(store: Store, run: object, **label: object) -> None:
    assert dataclasses.is_dataclass(run)
    bare = run.replace(steps=(), output_ids=(), text="", finish_reason=None, decode_ms=0.0)  # type: ignore[attr-defined]
    writer = store.start_run(bare, **label)  # type: ignore[arg-type]
    writer.append(run.steps)  # type: ignore[attr-defined]
    writer.finish(run)  # type: ignore[arg-type]


def test_examples_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    assert example_runs.first(tmp_path / "nowhere") is None
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "a.json").write_text("not json")
    (folder / "b.json").write_text('{"schema": 99}')
    assert example_runs.first(folder) is None
    other = tmp_path / "more"
    other.mkdir()
    (other / "a.json").write_text("[]")
    (other / "b.json").write_text(
        json.dumps({"run": RUN.replace(baseline_id="r2").to_json(), "baseline": BASE.to_json()})
    )
    assert example_runs.first(other) == (RUN.replace(baseline_id="r2"), BASE)


def test_an_export_of_storage_is_an_example_too(store: Store, tmp_path: Path) -> None:
    keep(store, BASE)
    keep(store, RUN)
    store.link_baseline("r1", "r2")
    (tmp_path / "x.json").write_text(store.export_json(["r1", "r2"]))
    found = example_runs.first(tmp_path)
    assert found is not None
    assert (found[0].id, found[1] and found[1].id) == ("r1", "r2")


def test_a_stored_run_brings_its_baseline(store: Store) -> None:
    keep(store, BASE)
    keep(store, RUN, name="<b>mine</b>", author="Ada")
    store.link_baseline("r1", "r2")
    found = stored_view.find_stored(store, "r1")
    assert not isinstance(found, str)
    feed, caption, note = stored_view.stored_view(store, found)
    assert json.loads(feed.splitlines()[-1])["baseline"]["id"] == "r2"
    assert "&lt;b&gt;mine&lt;/b&gt;" in caption
    assert "Ada" in caption
    assert note == ""
    store.delete(["r2"])
    found = stored_view.find_stored(store, "r1")
    assert not isinstance(found, str)
    feed, _, _ = stored_view.stored_view(store, found)
    assert "baseline" in json.loads(feed.splitlines()[-1])["no_baseline_reason"]


def test_unknown_ids_are_a_sentence(store: Store) -> None:
    assert "there is no run" in str(stored_view.find_stored(store, "rnobody"))
    assert "is not a run's id" in str(stored_view.find_stored(store, "<script>"))
    assert "is not a run's id" in str(stored_view.find_stored(store, None))


def test_a_run_that_goes_on_is_not_called_interrupted(store: Store) -> None:
    bare = RUN.replace(steps=(), output_ids=(), text="", finish_reason=None, decode_ms=0.0)
    writer = store.start_run(bare)
    writer.append(RUN.steps[:3])
    found = stored_view.find_stored(store, "r1")
    assert not isinstance(found, str)
    assert "still going on" in stored_view.stored_view(store, found)[2]
    writer.abandon()
    found = stored_view.find_stored(store, "r1")
    assert not isinstance(found, str)
    assert "interrupted" in stored_view.stored_view(store, found)[2]


def test_rows_never_show_a_bare_gap(store: Store) -> None:
    keep(store, BASE)
    keep(store, RUN.replace(finish_reason=FinishReason.CANCELLED), tags=("a", "b"), note="x\ny")
    rows = {summary.id: row(summary) for summary in store.summaries(RunFilter()).rows}
    assert rows["r2"]["speedup"] is None
    assert rows["r2"]["speedup_why"] == "it is a baseline"
    assert rows["r2"]["accepted_why"] == "nothing drafted"
    assert rows["r1"]["speedup_why"] == "no baseline"
    assert rows["r1"]["state"] == "stopped"
    assert rows["r1"]["tags"] == ["a", "b"]
    assert rows["r1"]["note"] == "x y"
    json.dumps(rows)


def test_the_caption_quotes_the_prompt_as_text(store: Store) -> None:
    run = RUN.replace(request={**RUN.request, "prompt": "<script>alert(1)</script>\n\u202e" + "x" * 500})
    keep(store, run)
    _, caption, _ = stored_view.stored_view(store, store.get_run("r1"))
    assert "Prompt: “&lt;script&gt;alert(1)&lt;/script&gt;" in caption
    assert "<script>" not in caption
    assert "\u202e" not in caption
    assert len(caption) < 500
    assert stored_view.asked(RUN.replace(request={"prompt": 5})) == ""
