"""Runs that the database refused: saved again with their baseline, downloaded, or written to a file; never dropped."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder.errors import RedlineError
from decoder.request import GenerationRequest
from playground import saving, unsaved
from playground.comparing import by_length, progress
from playground.events import Done
from playground.plans import plan_comparison, plan_run
from playground.playing import Frame, Ticket, frames
from playground.saving import Label, RunSaver
from playground.service import ModelService
from playground.unsaved_view import UnsavedRow
from storage import DatabaseReadOnly, RunFilter, State, StorageError, Store, open_store
from tests.playground.fake_engine import FakeEngine, fake_load

REQUEST = GenerationRequest(prompt="Why is the sky blue?", proposer="ngram", k=3)


class Choosy:
    """A store that refuses some runs while ``refuses`` is set."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.refuses: str | None = None
        """"all", "none" (baselines), "ends" or "links"."""

    def start_run(self, run: Any, **label: Any) -> Any:
        if self.refuses in ("all", run.proposer):
            raise DatabaseReadOnly("the database may only be read")
        return FlakyEnd(self, self._store.start_run(run, **label))

    def link_baseline(self, run_id: str, baseline_id: str) -> Any:
        if self.refuses == "links":
            raise StorageError("the database is locked")
        return self._store.link_baseline(run_id, baseline_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class FlakyEnd:
    """A writer whose end can be refused after its beginning was stored."""

    def __init__(self, store: Choosy, writer: Any) -> None:
        self._store, self._writer = store, writer

    def append(self, *args: Any, **kwargs: Any) -> None:
        self._writer.append(*args, **kwargs)

    def finish(self, run: Any) -> None:
        if self._store.refuses == "ends":
            raise StorageError("the disk is full")
        self._writer.finish(run)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(saving, "FINAL_TRIES_S", (0.0,))
    monkeypatch.chdir(tmp_path)
    with open_store(f"sqlite:///{tmp_path / 'runs.db'}", busy_timeout=0.2) as opened:
        yield opened


@pytest.fixture
def choosy(store: Store) -> Choosy:
    return Choosy(store)


@pytest.fixture
def service(choosy: Choosy) -> Iterator[ModelService]:
    made = ModelService(choosy, fake_load(FakeEngine()))  # type: ignore[arg-type]
    yield made
    made.close()


def last_frame(service: ModelService) -> Frame:
    ticket = Ticket(tuple(plan_run(REQUEST, baseline=True)), Label(author="Ada"))
    return list(frames(ticket, service.execute(ticket.plan, ticket.label, threading.Event())))[-1]


def leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob("redline-unsaved-*.json"))


@pytest.mark.parametrize("refused", ["all", "none", "ngram", "ends"])
def test_whatever_was_refused_is_saved_again_and_linked(
    service: ModelService, choosy: Choosy, store: Store, refused: str
) -> None:
    choosy.refuses = refused
    last = last_frame(service)
    assert last.unsaved
    assert last.run is not None
    assert last.baseline is not None
    if refused == "none":
        assert last.text.startswith("the baseline of this run could not be saved")
    assert service.save_again(last.run.id), "it is not called saved while the database refuses"
    choosy.refuses = None
    assert service.save_again(last.run.id) is None
    assert store.get_run(last.run.id).run.baseline_id == last.baseline.id
    assert store.get_run(last.baseline.id).run.steps == last.baseline.steps
    assert store.summaries(RunFilter(ids=[last.run.id])).rows[0].speedup is not None
    assert not service.unsaved.concerns(last.run.id)


def test_a_link_that_was_refused_is_made_later(service: ModelService, choosy: Choosy, store: Store) -> None:
    choosy.refuses = "links"
    last = last_frame(service)
    assert last.unsaved
    assert last.run is not None
    assert "could not be linked" in last.text
    assert "could not be linked" in (service.save_again(last.run.id) or "")
    choosy.refuses = None
    assert service.save_again(last.run.id) is None
    assert store.get_run(last.run.id).run.baseline_id


def test_a_run_that_is_nowhere_is_not_called_saved(service: ModelService) -> None:
    assert "no run" in (service.save_again("rnobody") or "")


def test_a_comparison_can_be_saved_again_and_downloaded(service: ModelService, choosy: Choosy, store: Store) -> None:
    choosy.refuses = "all"
    plan = plan_comparison(by_length(REQUEST, (1, 4)))
    end = list(progress(plan, service.execute(plan, Label(tags=("comparison",)), threading.Event())))[-1]
    assert end.runs is not None
    assert "not every run could be saved" in end.text
    row = UnsavedRow.__new__(UnsavedRow)
    row.service = service
    shown = ",".join(run.id for run in end.runs)
    assert row.look(shown)["visible"]
    assert "still not saved" in row.try_saving(shown)[0].lower()
    name, text = row.file(shown)
    assert name.startswith("redline-3-runs-")
    with open_store("sqlite:///other.db") as other:
        assert len(other.import_json(text)) == 3
        rows = other.summaries(RunFilter(ids=[end.runs[1].id])).rows
        assert rows[0].speedup is not None
        assert rows[0].tags == ("comparison",)
    choosy.refuses = None
    assert "saved" in row.try_saving(shown)[0].lower()
    assert not row.look(shown)["visible"]
    assert {store.get_run(run.id).run.baseline_id for run in end.runs[1:]} == {end.runs[0].id}
    with pytest.raises(RedlineError, match="is saved"):
        row.file(shown)


def test_the_end_of_the_process_writes_what_is_left(
    choosy: Choosy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ModelService(choosy, fake_load(FakeEngine()))  # type: ignore[arg-type]
    choosy.refuses = "all"
    last = last_frame(service)
    service.close()
    (file,) = leftovers(tmp_path)
    assert str(file) in capsys.readouterr().err
    assert file.stat().st_mode & 0o077 == 0
    with open_store("sqlite:///other.db") as other:
        assert len(other.import_json(file.read_bytes())) == 2
        assert last.run is not None
        stored = other.get_run(last.run.id)
        assert stored.run == last.run
        assert stored.meta.author == "Ada"
        assert stored.meta.state is State.DONE


def test_the_end_of_the_process_tries_to_save_first(choosy: Choosy, store: Store, tmp_path: Path) -> None:
    service = ModelService(choosy, fake_load(FakeEngine()))  # type: ignore[arg-type]
    choosy.refuses = "all"
    last = last_frame(service)
    choosy.refuses = None
    service.close()
    assert leftovers(tmp_path) == []
    assert last.run is not None
    assert store.get_run(last.run.id).run.baseline_id


def test_what_memory_does_not_hold_goes_to_a_file(
    service: ModelService, choosy: Choosy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsaved, "UNSAVED_KEPT", 4)
    choosy.refuses = "all"
    first = last_frame(service).run
    for _ in range(3):
        last_frame(service)
    assert len(service.unsaved) <= 4
    in_files = [entry["run"]["id"] for file in leftovers(tmp_path) for entry in json.loads(file.read_text())["runs"]]
    assert len(in_files) + len(service.unsaved) == 8
    assert first is not None
    assert first.id in in_files
    assert "was written to" in (service.save_again(first.id) or "")


def test_a_folder_that_takes_no_file_is_passed_over(
    service: ModelService, choosy: Choosy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosy.refuses = "all"
    last_frame(service)
    kept = [service.unsaved.of_plan(run_id)[0] for run_id in list(service.unsaved._kept)]
    monkeypatch.setattr(unsaved.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(unsaved.Path, "cwd", lambda: tmp_path / "gone")
    assert service.unsaved.write_out(kept) is None
    assert len(service.unsaved) == 2, "what no folder took stays"
    (tmp_path / "temporary").mkdir()
    path = service.unsaved.write_out(kept)
    assert path is not None
    assert path.parent.name == "temporary"


def test_two_files_of_one_second_do_not_replace_each_other(tmp_path: Path) -> None:
    names = {unsaved._write_new(tmp_path, str(number)) for number in range(5)}
    assert sorted(path.read_text() for path in names) == list("01234")


def test_an_interrupted_run_keeps_its_first_times(store: Store) -> None:
    stream = FakeEngine().stream(REQUEST)
    assert stream.run.ttft_ms == 0
    saver = RunSaver(store, stream.run)
    saver.add([])
    saver.add([next(stream)], (61.0, 71.0))
    stored = store.get_run(stream.run.id).run
    assert (stored.prefill_ms, stored.ttft_ms) == (61.0, 71.0)
    saver.add(list(itertools.islice(stream, 2)))
    assert store.get_run(stream.run.id).run.ttft_ms == 71.0


def test_done_says_when_nothing_is_left(service: ModelService) -> None:
    events = list(service.execute(plan_run(REQUEST, baseline=True), Label(), threading.Event()))
    assert isinstance(events[-1], Done)
    assert events[-1].unlinked is None
    assert len(service.unsaved) == 0
