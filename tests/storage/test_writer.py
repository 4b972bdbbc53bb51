"""A run is in the database from its first moment, step by step, and ends in exactly one state."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from decoder.metrics import acceptance, timing
from decoder.trace import FinishReason, Run, violations
from storage import RunNotFound, State, StorageError, Store, open_store
from tests.storage.factories import bare, keep, make_run, make_start, make_step


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Another process that writes for long."""
    other = sqlite3.connect(store.database.url.database or "", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def test_a_run_is_running_from_its_start_and_shows_the_steps_it_has(store: Store) -> None:
    run = make_run(5)
    writer = store.start_run(bare(run), author="ann", name="first", tags=["b", "a", "b"], note="why not")
    seen = store.get_run(run.id)
    assert seen.run == bare(run).replace(metrics=seen.run.metrics)
    assert (seen.meta.state, seen.meta.author, seen.meta.name) == (State.RUNNING, "ann", "first")
    assert (seen.meta.tags, seen.meta.note) == (("b", "a"), "why not")

    writer.append(run.steps[:2])
    writer.append(run.steps[2:4])
    seen = store.get_run(run.id)
    assert seen.run.steps == run.steps[:4]
    assert violations(seen.run) == []
    assert seen.run.text == "".join(e.text for s in run.steps[:4] for e in s.emitted)
    assert seen.run.finish_reason is None
    row = store.summaries().rows[0]
    assert (row.state, row.num_output_tokens) == (State.RUNNING, len(seen.run.output_ids))
    assert row.text_preview == seen.run.text[:200]


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (FinishReason.EOS, State.DONE),
        (FinishReason.STOP, State.DONE),
        (FinishReason.LENGTH, State.DONE),
        (FinishReason.CANCELLED, State.STOPPED),
        (FinishReason.ERROR, State.FAILED),
        (None, State.INTERRUPTED),
    ],
)
def test_the_state_is_what_the_finish_reason_says(store: Store, reason: FinishReason | None, state: State) -> None:
    run = keep(store, make_run(reason=reason))
    assert store.get_run(run.id).meta.state is state
    assert store.get_run(run.id).run == run
    assert store.summaries().rows[0].state is state


def test_the_numbers_in_a_list_are_those_of_the_steps_not_of_the_run(store: Store) -> None:
    run = make_run(8)
    run = run.replace(metrics={**run.metrics, "tokens_per_second": 1e9, "draft_acceptance_rate": 1.0})
    keep(store, run)
    row = store.summaries().rows[0]
    accepted, times = acceptance(run.steps), timing(run.steps)
    for name in (
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "draft_acceptance_rate",
        "mean_acceptance_length",
    ):
        assert getattr(row, name) == getattr(accepted, name), name
    for name in ("tokens_per_second", "ms_per_token", "tokens_per_step"):
        assert getattr(row, name) == getattr(times, name), name
    assert (row.decode_ms, row.prefill_ms, row.ttft_ms) == (run.decode_ms, run.prefill_ms, run.ttft_ms)
    assert (row.num_output_tokens, row.num_prompt_tokens) == (len(run.output_ids), 4)
    assert (row.temperature, row.max_new_tokens, row.seed) == (0.0, 128, 0)


def test_a_run_that_drafted_nothing_has_no_acceptance_and_says_why(store: Store) -> None:
    run = make_run(3, proposer="none")
    keep(store, run.replace(metrics={**run.metrics, "not_speculating": "nothing matched"}))
    row = store.summaries().rows[0]
    assert row.draft_acceptance_rate is None
    assert row.not_speculating == "nothing matched"


def test_finish_stores_steps_that_were_never_appended_and_may_be_called_twice(store: Store) -> None:
    run = make_run(6)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:2])
    writer.finish(run)
    writer.finish(run)
    assert store.get_run(run.id).run == run
    with pytest.raises(StorageError, match="has ended"):
        writer.append([make_step(6)])


def test_the_final_run_has_the_last_word_about_its_steps(store: Store) -> None:
    """A stop may cut the last step after it was shown."""
    long, short = make_run(6), make_run(4)
    final = short.replace(id=long.id, steps=(*short.steps[:3], make_step(3, seed=9, accepted=0)))
    final = final.replace(
        output_ids=tuple(e.id for s in final.steps for e in s.emitted),
        decode_ms=sum(s.draft_ms + s.verify_ms + s.overhead_ms for s in final.steps),
    )
    writer = store.start_run(bare(long))
    writer.append(long.steps)
    writer.finish(final)
    assert store.get_run(long.id).run == final


def test_steps_out_of_turn_are_refused_and_the_run_goes_on(store: Store) -> None:
    run = make_run(4)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:2])
    with pytest.raises(StorageError, match=r"step 3 .* came where step 2 was due"):
        writer.append(run.steps[3:])
    with pytest.raises(StorageError, match=r"steps\[2\].draft_ms: is not a finite number"):
        writer.append([type(run.steps[2])(2, 4, (), (), (), float("nan"), 0.0, 0.0)])
    writer.append(run.steps[2:])
    writer.finish(run)
    assert store.get_run(run.id).run == run


def test_prefill_times_are_known_although_the_run_never_ends(store: Store) -> None:
    run = make_run(3)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:1], run=run.replace(steps=run.steps[:1]))
    writer.append(run.steps[1:2])
    writer.abandon()
    back = store.get_run(run.id)
    assert back.meta.state is State.INTERRUPTED
    assert (back.run.prefill_ms, back.run.ttft_ms) == (run.prefill_ms, run.ttft_ms)
    assert store.summaries().rows[0].ttft_ms == run.ttft_ms
    assert back.run.steps == run.steps[:2]


def test_a_block_that_is_left_without_an_end_leaves_an_interrupted_run(store: Store) -> None:
    run = make_run(3)
    with pytest.raises(ZeroDivisionError), store.start_run(bare(run)) as writer:  # noqa: PT012
        writer.append(run.steps[:2])
        raise ZeroDivisionError
    back = store.get_run(run.id)
    assert back.meta.state is State.INTERRUPTED
    assert back.run.steps == run.steps[:2]
    assert violations(back.run) == []


def test_a_finished_block_stays_finished(store: Store) -> None:
    run = make_run(3)
    with store.start_run(bare(run)) as writer:
        writer.finish(run)
    assert store.get_run(run.id).meta.state is State.DONE


def test_a_writer_that_was_dropped_leaves_an_interrupted_run(store: Store) -> None:
    """In this very process, where the process table says nothing: a page was closed, its generator collected."""
    run = make_run(3)
    writer = store.start_run(bare(run))
    writer.append(run.steps[:2])
    assert store.get_run(run.id).meta.state is State.RUNNING
    del writer
    gc.collect()
    assert store.summaries().rows[0].state is State.INTERRUPTED
    assert store.get_run(run.id).run.steps == run.steps[:2]


def test_an_id_is_taken_once(store: Store) -> None:
    run = keep(store, make_run(3))
    with pytest.raises(StorageError, match=f"there is a run '{run.id}' in this database already"):
        store.start_run(bare(run))
    assert store.get_run(run.id).run == run


def test_another_run_is_not_taken_for_the_end_of_this_one(store: Store) -> None:
    writer = store.start_run(make_start())
    with pytest.raises(StorageError, match="is not run"):
        writer.finish(make_run())


def test_a_run_is_not_deleted_while_it_is_written(store: Store) -> None:
    done, run = keep(store, make_run()), make_run(4)
    writer = store.start_run(bare(run))
    with pytest.raises(StorageError, match="still running: stop it first"):
        store.delete([done.id, run.id])
    assert store.summaries().total == 2  # all or nothing
    writer.finish(run)
    assert store.delete([done.id, run.id, "never-was"]) == 2
    assert store.summaries().total == 0


def test_a_writer_whose_row_is_gone_says_so(store: Store) -> None:
    run = make_run(4)
    writer = store.start_run(bare(run))
    with sqlite3.connect(store.database.url.database or "") as other:
        other.execute("DELETE FROM runs")
    with pytest.raises(RunNotFound, match="deleted while it was being written"):
        writer.append(run.steps[:1])
    with pytest.raises(RunNotFound, match="deleted while it was being written"):
        writer.finish(run)


def test_steps_wait_while_the_database_is_locked_and_none_is_lost(url: str) -> None:
    run = make_run(5)
    with open_store(url, busy_timeout=0.05) as store:
        writer = store.start_run(bare(run))
        with locked(store):
            writer.append(run.steps[:2])
            writer.append(run.steps[2:3])
            assert store.get_run(run.id).run.steps == ()  # reading goes on
            with pytest.raises(StorageError, match="locked by another process"):
                writer.finish(run)
            with pytest.raises(StorageError, match="locked by another process"):
                store.rename(run.id, "x")
        writer.append(run.steps[3:4])
        assert store.get_run(run.id).run.steps == run.steps[:4]
        writer.finish(run)
        assert store.get_run(run.id).run == run


def test_a_step_is_one_short_transaction(store: Store, tmp_path: Path) -> None:
    """Between two steps nothing is held: another connection may write at once, without waiting."""
    run = make_run(4)
    writer = store.start_run(bare(run))
    for step in run.steps:
        writer.append([step])
        other = sqlite3.connect(store.database.url.database or "", timeout=0)
        other.execute("UPDATE runs SET note = note || 'x'")
        assert other.execute("SELECT count(*) FROM steps").fetchone() == (step.index + 1,)
        other.commit()
        other.close()
    writer.finish(run)
    assert store.get_run(run.id).meta.note == "xxxx"


def test_an_unsound_run_is_kept_as_it_is(store: Store) -> None:
    """The engine's own mistake must not cost the run: it is stored and read back, to be looked at."""
    run: Run = make_run(3)
    wrong = run.replace(decode_ms=run.decode_ms + 5, output_ids=run.output_ids[:-1])
    keep(store, wrong)
    assert violations(wrong) != []
    assert store.get_run(run.id).run == wrong
