"""Recorded passes, replayed from a tape where a GPU would replay a graph: they compute what the eager path computes."""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoder import assemble, capture, graphs, loading
from decoder.capture import CudaCapture, RerunCapture
from decoder.fused import FusedRunner
from decoder.graphs import GraphRunner, Recordings, capacity_for, pad
from decoder.graphs import graph_runner as graph_runner_for
from decoder.proposers.draft_model import DraftModelProposer
from decoder.request import GenerationRequest
from tests.tape import TapeCapture
from tests.tiny import CONTEXT, fused_weights, save_tiny, tiny_decoder

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def graph_runner(*, limit: int = 48, tape: TapeCapture | None = None, seed: int = 0, layers: int = 3) -> GraphRunner:
    recordings = Recordings(tape or TapeCapture(), "cpu", limit)
    return GraphRunner(fused_weights(seed, layers, 384), recordings, context=CONTEXT, device="cpu")


def eager_runner() -> FusedRunner:
    return FusedRunner(fused_weights(0, 3, 384), context=CONTEXT, device="cpu")


def ids(batch: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 384, (batch, width), generator=torch.Generator().manual_seed(seed))


def recorded(runner: GraphRunner) -> int:
    tape = runner.recordings.capture
    assert isinstance(tape, TapeCapture)
    return tape.recorded


def test_sizes_are_padded_up() -> None:
    assert [pad(n, (1, 2, 3, 5, 9)) for n in (1, 2, 3, 4, 5, 6, 9, 10)] == [1, 2, 3, 5, 5, 9, 9, 0]
    asked = (1, 512, 513, 768, 769, 1025, 1537, 6000, 6145)
    assert [capacity_for(n) for n in asked] == [512, 512, 768, 768, 1024, 1536, 2048, 6144, 8192]


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_a_long_life_of_passes_and_rollbacks_equals_the_eager_path(batch: int) -> None:
    """Ragged rows, widths between the recorded ones, over two capacity borders, with captured states and trees."""
    graphs, eager = graph_runner(), eager_runner()
    rng = random.Random(batch)
    for runner in (graphs, eager):
        runner.capture = (1, 3)
        runner.reset(batch)
        runner.forward(ids(batch, 440), [440 - 7 * b for b in range(batch)], last=True)
    seen = set()
    for turn in range(70):
        width = rng.choice((1, 1, 2, 3, 4, 5, 6, 9, 12, 30, 40))
        counts = [rng.randint(1, width) for _ in range(batch)]
        last = rng.random() < 0.3
        parents = [None if i < 2 else i - 2 for i in range(width - 1)] if batch == 1 and turn % 10 == 9 else None
        if parents is not None:
            counts = [width]
        new = ids(batch, width, turn)
        found = graphs.forward(new, counts, last=last, parents=parents)
        expected = eager.forward(new, counts, last=last, parents=parents)
        assert graphs.captured is not None
        assert eager.captured is not None
        for b, count in enumerate(counts):
            real = slice(0, 1 if last else count)
            assert torch.allclose(found[b, real], expected[b, real], **CLOSE), (turn, b)
            assert torch.equal(found[b, real].argmax(-1), expected[b, real].argmax(-1))
            assert torch.allclose(graphs.captured[b, :count], eager.captured[b, :count], **CLOSE)
        if parents is not None:
            for runner in (graphs, eager):
                runner.keep_path(0, runner.lengths[0] - width + 1, [1, 3][: max(0, (width - 1) // 2)])
        back = [rng.randint(0, count // 2) for count in counts] if parents is None else [0]
        for runner in (graphs, eager):
            runner.rollback([length - n for length, n in zip(runner.lengths, back, strict=True)])
        assert graphs.lengths == eager.lengths
        seen.add(graphs.store.keys.shape[3])
    assert len(seen) >= 2
    assert graphs.path == "CUDA graph"
    assert 0 < len(graphs.recordings) < recorded(graphs)


def test_a_pass_is_recorded_once_and_a_layout_that_comes_back_needs_no_recording() -> None:
    runner = graph_runner()

    def life(prompt: int) -> None:
        runner.reset(1)
        runner.forward(ids(1, prompt), last=True)
        for width in (1, 4, 5, 1, 4):
            runner.forward(ids(1, width, width))
            runner.rollback([prompt])

    life(600)
    assert recorded(runner) == 2
    life(100)
    assert recorded(runner) == 4
    for prompt in (600, 100, 30):
        life(prompt)
    assert recorded(runner) == 4
    assert runner.store._memory is not None
    assert runner.store._memory[0].numel() == 3 * 2 * 768 * 16
    life(1500)
    assert runner.recordings.capture.forgotten == 1
    assert len(runner.recordings) == 2


def test_what_a_pass_gave_outlives_the_next_pass() -> None:
    runner = graph_runner()
    exit_runner = runner.short(1)
    runner.capture = (2,)
    runner.reset(1)
    runner.forward(ids(1, 20), last=True)
    logits = runner.forward(ids(1, 3))
    states, kept = runner.captured, logits.clone()
    assert states is not None
    kept_states = states.clone()
    exit_runner.lengths = list(runner.lengths)
    exit_runner.forward(ids(1, 1))
    runner.forward(ids(1, 3, 1))
    assert torch.equal(logits, kept)
    assert torch.equal(states, kept_states)


def test_an_early_exit_shares_memory_recordings_and_their_limit() -> None:
    runner = graph_runner(limit=3)
    exit_runner = runner.short(2)
    assert exit_runner.store is runner.store
    eager = eager_runner()
    for model in (runner, eager):
        model.reset(1)
        model.forward(ids(1, 30), last=True)
    for turn in range(12):
        exit_runner.lengths = list(runner.lengths)
        exit_runner.forward(ids(1, 1 + turn % 2, turn))
        new = ids(1, 1 + turn % 5, turn)
        assert torch.allclose(runner.forward(new), eager.forward(new), **CLOSE)
        assert len(runner.recordings) <= 3


def test_the_padding_of_a_pass_fits_its_layout() -> None:
    runner, eager = graph_runner(), eager_runner()
    for model in (runner, eager):
        model.reset(1)
        model.forward(ids(1, 508), last=True)
    assert torch.allclose(runner.forward(ids(1, 4)), eager.forward(ids(1, 4)), **CLOSE)
    assert runner.store.keys.shape[3] == 768
    assert runner.path == "CUDA graph"


def test_other_captured_states_are_another_recording() -> None:
    runner, eager = graph_runner(), eager_runner()
    for model in (runner, eager):
        model.reset(1)
        model.forward(ids(1, 9), last=True)
    for states in ((1,), (), (2, 3), (1,)):
        for model in (runner, eager):
            model.capture = states
            model.forward(ids(1, 2))
        assert (runner.captured is None) == (eager.captured is None) == (not states)
        if states:
            assert torch.allclose(runner.captured, eager.captured, **CLOSE)
    assert recorded(runner) == 3


def test_the_recording_that_was_not_used_for_longest_goes_first() -> None:
    runner = graph_runner(limit=2)
    runner.reset(1)
    runner.forward(ids(1, 9), last=True)
    for width, expected in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        runner.forward(ids(1, width))
        assert recorded(runner) == expected


def test_rows_that_leave_make_the_batch_smaller() -> None:
    runner = graph_runner()
    runner.reset(5)
    runner.forward(ids(5, 40), last=True)
    runner.forward(ids(5, 1))
    assert runner.store.layout[0].shape[1] == 8
    runner.select([0, 2, 4])
    assert runner.store.layout[0].shape[1] == 4
    runner.select([1])
    assert runner.store.layout[0].shape[1] == 1
    assert runner.lengths == [41]


def test_what_was_left_in_the_memory_poisons_no_later_run() -> None:
    runner = graph_runner()
    runner.reset(1)
    runner.forward(ids(1, 500))
    with torch.inference_mode():
        for memory in runner.store._memory:
            memory.fill_(torch.nan)
    eager = eager_runner()
    for model in (runner, eager):
        model.reset(1)
        model.forward(ids(1, 9))
    assert torch.allclose(runner.forward(ids(1, 2)), eager.forward(ids(1, 2)), **CLOSE)


@pytest.mark.parametrize("fail_at", [1, 2, 4])
def test_where_nothing_can_be_recorded_decoding_goes_on_eagerly_and_says_why(fail_at: int) -> None:
    expected = tiny_decoder(target=eager_runner())
    target = graph_runner(tape=TapeCapture(fail_at))
    draft = graph_runner(seed=1, layers=1)
    decoder = tiny_decoder(DraftModelProposer(draft), target)
    request = GenerationRequest("The quick", chat=False, max_new_tokens=40, ignore_eos=True)
    assert target.path == "CUDA graph"
    runs = [decoder.run(request.replace(proposer="draft-model", k=k)) for k in (1, 2, 4, 8)]
    tokens = [run.output_ids for run in runs]
    plain = expected.run(request).output_ids
    assert tokens == [plain] * 4
    assert target.path == "eager, fused"
    assert target.path_note() == "CUDA graphs are off: there was no memory left to record one"
    assert draft.path_note() is None
    broken = next(run for run in runs if "target_path" in run.versions)
    assert broken.versions["target_path"] == "eager, fused"
    assert broken.versions["target_path_note"] == target.path_note()
    assert broken.versions["draft_path"] == "CUDA graph"
    assert target.short(1).path == "eager, fused"
    assert draft.path == "CUDA graph"


def test_an_error_in_a_recording_is_one_line() -> None:
    runner = graph_runner()

    def broken(work: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nC++ trace:\n...")

    runner.recordings.capture.record = broken  # type: ignore[method-assign]
    runner.reset(1)
    runner.forward(ids(1, 5), last=True)
    runner.forward(ids(1, 1))
    assert runner.recordings.why_off == "operation not permitted when stream is capturing"


def test_a_loaded_model_runs_on_recorded_passes_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loading.load(str(save_tiny(tmp_path)), "float32", "cpu")
    monkeypatch.setenv("REDLINE_COMPILE", "0")
    monkeypatch.delenv("REDLINE_GRAPHS", raising=False)
    assert not isinstance(assemble.new_runner(loaded), GraphRunner)
    monkeypatch.setenv("REDLINE_GRAPHS", "rehearse")
    runner = assemble.new_runner(loaded)
    assert isinstance(runner, GraphRunner)
    assert runner.path == "CUDA graph, rehearsed"
    request = GenerationRequest("The quick", chat=False, max_new_tokens=20, ignore_eos=True)
    outputs = [tiny_decoder(target=r).run(request).output_ids for r in (runner, eager_runner())]
    assert outputs[0] == outputs[1]
    assert len(runner.recordings) == 1


def test_recording_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: TapeCapture())
    for setting, path in (("1", "CUDA graph"), ("0", "eager, fused")):
        monkeypatch.setenv("REDLINE_GRAPHS", setting)
        runner = graph_runner_for(fused_weights(0, 3, 384), context=CONTEXT, device="cuda")
        assert runner is not None
        assert runner.path == path
    assert runner.path_note() == "CUDA graphs are off: REDLINE_GRAPHS=0"


def test_a_rehearsal_gives_the_same_tensors_every_time() -> None:
    state = torch.zeros(2)
    replay = RerunCapture().record(lambda: (state + 1,))
    first = replay()[0]
    state.fill_(4)
    assert replay()[0] is first
    assert first.tolist() == [5, 5]


def test_a_graph_is_recorded_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up on the stream that records, all in one pool, errors of other threads left alone, nothing run twice."""
    calls: list[str] = []
    pools = iter(("pool 1", "pool 2"))

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "side" if isinstance(name, torch.device) else name

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(name: str):
        calls.append(f"on {name}")
        yield
        calls.append(f"off {name}")

    fake = SimpleNamespace(
        Stream=Stream,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
        graph_pool_handle=lambda: next(pools),
        current_stream=lambda: Stream("current"),
        device=lambda device: on(str(device)),
        stream=lambda stream: on(stream.name),
        graph=lambda graph, pool, stream, capture_error_mode: on(f"graph in {pool} by {stream.name}"),
    )
    monkeypatch.setattr(capture.torch, "cuda", fake)
    recorder = CudaCapture("cuda:1")
    out = (torch.zeros(1),)

    def work() -> tuple[torch.Tensor, ...]:
        calls.append("work")
        return out

    replay = recorder.record(work)
    assert calls == [
        "on cuda:1", "side waits for current", "on side", "work", "work", "off side", "current waits for side",
        "on graph in pool 1 by side", "work", "off graph in pool 1 by side", "off cuda:1",
    ]  # fmt: skip
    calls.clear()
    assert replay() is out
    assert calls == ["replay"]
    recorder.forget()
    recorder.record(work)
    assert "on graph in pool 2 by side" in calls
