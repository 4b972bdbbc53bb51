"""Speed-ups in lists: measured against the baseline, and kept true when that arrives, changes or goes."""

from __future__ import annotations

import json

import pytest

from decoder.metrics import speedup
from decoder.trace import Run
from storage import RunNotFound, StorageError, Store
from tests.storage.factories import bare, keep, make_run


def pair(**changes: object) -> tuple[Run, Run]:
    """A baseline and a run that names it."""
    baseline = make_run(9, proposer="none", prompt="p")
    run = make_run(5, prompt="p", baseline_id=baseline.id).replace(**changes)
    return baseline, run


def shown(store: Store, run: Run) -> float | None:
    return next(row for row in store.summaries().rows if row.id == run.id).speedup


def test_the_speed_up_is_that_of_the_metrics(store: Store) -> None:
    baseline, run = pair()
    keep(store, baseline)
    keep(store, run)
    assert shown(store, run) == speedup(run, baseline)
    assert shown(store, run) is not None
    assert shown(store, baseline) is None


def test_a_baseline_that_comes_later_counts_from_its_end_on(store: Store) -> None:
    baseline, run = pair()
    keep(store, run)
    assert shown(store, run) is None
    writer = store.start_run(bare(baseline))
    writer.append(baseline.steps[:5])
    assert shown(store, run) is None  # half a baseline is none
    writer.finish(baseline)
    assert shown(store, run) == speedup(run, baseline)


def test_a_run_that_ends_before_its_baseline_is_measured_when_that_ends(store: Store) -> None:
    baseline, run = pair()
    writer = store.start_run(bare(baseline))
    keep(store, run)
    assert shown(store, run) is None
    writer.finish(baseline)
    assert shown(store, run) == speedup(run, baseline)


def test_a_baseline_that_does_not_fit_gives_no_number(store: Store) -> None:
    baseline, run = pair(dtype="bfloat16")
    keep(store, baseline)
    keep(store, run)
    assert shown(store, run) is None
    assert store.link_baseline(run.id, baseline.id) == "dtype differs"


def test_deleting_a_baseline_keeps_its_runs(store: Store) -> None:
    baseline, run = pair()
    keep(store, baseline)
    keep(store, run)
    store.delete([baseline.id])
    row = store.summaries().rows[0]
    assert (row.id, row.baseline_id, row.speedup) == (run.id, baseline.id, None)
    assert store.get_run(run.id).run == run
    store.import_json(json.dumps(baseline.to_json()))  # and it may come back
    assert shown(store, run) == speedup(run, baseline)


def test_linking_and_unlinking(store: Store) -> None:
    baseline, named = pair()
    run = named.replace(baseline_id=None)
    keep(store, baseline)
    keep(store, run)
    assert store.link_baseline(run.id, baseline.id) is None
    assert store.get_run(run.id).run == named
    assert shown(store, run) == speedup(run, baseline)
    assert store.link_baseline(run.id, None) is None
    assert shown(store, run) is None
    assert store.get_run(run.id).run == run


def test_linking_what_is_not_there_changes_nothing(store: Store) -> None:
    baseline, run = pair()
    keep(store, baseline)
    keep(store, run)
    with pytest.raises(RunNotFound, match="no run 'nope'"):
        store.link_baseline("nope", baseline.id)
    with pytest.raises(RunNotFound, match="no run 'nope'"):
        store.link_baseline(run.id, "nope")
    with pytest.raises(StorageError, match="cannot be its own baseline"):
        store.link_baseline(run.id, run.id)
    assert store.get_run(run.id).run == run
    assert shown(store, run) == speedup(run, baseline)


def test_a_baseline_that_is_linked_while_the_run_goes_is_not_forgotten(store: Store) -> None:
    baseline, named = pair()
    run = named.replace(baseline_id=None)
    keep(store, baseline)
    writer = store.start_run(bare(run))
    store.link_baseline(run.id, baseline.id)
    assert shown(store, run) is None
    writer.finish(run)
    assert store.get_run(run.id).run == named
    assert shown(store, run) == speedup(run, baseline)


@pytest.mark.parametrize("order", ["baseline first", "run first"])
def test_a_file_may_hold_both_in_any_order(store: Store, order: str) -> None:
    baseline, run = pair()
    both = [baseline, run] if order == "baseline first" else [run, baseline]
    store.import_json(json.dumps([r.to_json() for r in both]))
    assert shown(store, run) == speedup(run, baseline)


def test_a_run_that_names_itself_or_nobody_here_is_kept(store: Store) -> None:
    odd = make_run(3, proposer="none")
    odd = odd.replace(baseline_id=odd.id)
    dangling = make_run(3, baseline_id="rnowhere")
    store.import_json(json.dumps([odd.to_json(), dangling.to_json()]))
    assert store.get_run(odd.id).run == odd
    assert store.get_run(dangling.id).run == dangling
    assert shown(store, odd) is None
    assert shown(store, dangling) is None
