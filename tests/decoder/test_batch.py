"""Requests that decode together: each gives what it gives alone, rows leave when done, faults stay in their row."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoder.errors import RequestError
from decoder.fused import FusedRunner, Weights
from decoder.metrics import baseline_fits, batch_size, batch_timing
from decoder.proposers.base import Context, Proposal, Proposer
from decoder.proposers.draft_model import DraftModelProposer
from decoder.proposers.ngram import NgramProposer
from decoder.request import GenerationRequest
from decoder.target import ModelRunner, RowRunner
from decoder.trace import Run, violations
from tests.decoder.every_proposer import EVERY, every_decoder, request_for
from tests.tiny import CONTEXT, PATHS, runner, tiny_decoder, tiny_llama
from tests.toys import Recite, TableRunner, ask, log, toy_decoder

PROMPTS = (
    "The quick brown fox",
    "def f(x): return x + 1\n" * 12,
    "🦊🐻 灯塔",
    "The lazy dog jumps over the quick brown fox. " * 30,
    "x",
)


def essence(run: Run) -> Any:
    """Everything of a run that is not a time or a rounded number."""
    steps = [
        (s.k, [(d.id, d.parent, d.verdict, d.u) for d in s.drafts], [(e.id, e.text, e.source) for e in s.emitted])
        for s in run.steps
    ]
    return run.output_ids, run.text, run.finish_reason, run.error, steps


def assert_same(together: Run, alone: Run) -> None:
    assert violations(together) == []
    assert essence(together) == essence(alone)
    for ours, theirs in zip(together.steps, alone.steps, strict=True):
        for a, b in zip(ours.drafts, theirs.drafts, strict=True):
            assert a.q == pytest.approx(b.q, abs=1e-4)
            assert a.p is b.p is None or a.p == pytest.approx(b.p, abs=1e-4)


def mixed(key: str) -> list[GenerationRequest]:
    """Prompts of 1 to some 700 tokens; every row has its own length, draft length, sampling and end."""
    guess = "The quick brown fox jumps over the lazy dog."
    return [
        request_for(key, PROMPTS[0], k=4, max_new_tokens=40, prediction=guess),
        request_for(key, PROMPTS[1], k=1, max_new_tokens=25, temperature=0.8, top_p=0.9, seed=5),
        request_for(key, PROMPTS[2], k=8, max_new_tokens=60, ignore_eos=True, repetition_penalty=1.3),
        request_for(key, PROMPTS[3], k=3, max_new_tokens=33, temperature=1.2, seed=6, stop=("e", "fox")),
        request_for(key, PROMPTS[4], k=5, max_new_tokens=1),
        request_for(key, PROMPTS[0], k=6, max_new_tokens=50, temperature=1.0, seed=7, ignore_eos=True),
        request_for(key, PROMPTS[1], k=2, max_new_tokens=2, temperature=0.5, top_k=20, seed=8),
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", EVERY)
def test_every_row_is_what_it_is_alone(key: str, path: str) -> None:
    decoder = every_decoder(key, path)
    requests = mixed(key)
    alone = [decoder.run(request) for request in requests]
    for together, expected in zip(decoder.generate(requests), alone, strict=True):
        assert_same(together, expected)
    # Neighbours change nothing either: another order, and only some of them.
    for picked in ([5, 3, 1], [2, 6, 0, 5]):
        for at, run in zip(picked, decoder.generate([requests[i] for i in picked]), strict=True):
            assert_same(run, alone[at])
    if key != "none":
        assert sum(run.metrics["num_draft_tokens"] for run in alone) > 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch_of_toys_is_exactly_its_rows(data: Any) -> None:
    """Vocabulary of 6, a draft that is wrong about everything; here the numbers must agree to the last bit."""
    target_row, draft_row = [0.05, 0.30, 0.10, 0.25, 0.20, 0.10], [0.30, 0.05, 0.25, 0.10, 0.10, 0.20]

    def table(row: list[float], by: int) -> Any:
        return lambda prefix: log(row[by * prefix[-1] % 6 :] + row[: by * prefix[-1] % 6])

    def fresh() -> Any:
        return toy_decoder(
            table(target_row, 1), 6, DraftModelProposer(TableRunner(table(draft_row, 2), 6)), eos=[5], context=40
        )

    requests = [
        ask(
            data.draw(st.text("abcdef", min_size=1, max_size=30)),
            k=data.draw(st.integers(1, 6)),
            max_new_tokens=data.draw(st.integers(1, 25)),
            temperature=data.draw(st.sampled_from([0.0, 0.6, 1.0])),
            top_p=data.draw(st.sampled_from([1.0, 0.7])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            seed=data.draw(st.integers(0, 5)),
            stop=tuple(data.draw(st.lists(st.sampled_from(["ab", "ccc"]), max_size=1))),
            ignore_eos=data.draw(st.booleans()),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    alone = [fresh().run(request) for request in requests]
    together = fresh().generate(requests)
    assert [essence(run) for run in together] == [essence(run) for run in alone]
    for run, other in zip(together, alone, strict=True):
        assert [s.drafts for s in run.steps] == [s.drafts for s in other.steps]


class Forced(Proposer):
    """Knows each row's answer: drafts its next tokens, right for as long as ``accept[seed][round]`` says."""

    name = "ngram"

    def __init__(self, answers: dict[int, Sequence[int]], accept: dict[int, Sequence[int]]) -> None:
        self.answers, self.accept = answers, accept

    def begin(self, context: Context) -> None:
        self._context = context
        self._round = 0

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts = []
        for row, k in zip(self._context.rows, ks, strict=True):
            seed = row.request.sampling.seed
            right = list(self.answers[seed][row.emitted : row.emitted + k])
            forced = self.accept[seed][self._round]
            drafts.append([t if i < forced else (t + 1) % 384 for i, t in enumerate(right)])
        self._round += 1
        return Proposal.of_lists(drafts, self._context.device, [None] * len(drafts))


@pytest.mark.parametrize("path", PATHS)
def test_forced_accept_lengths_leave_every_row_as_it_is_alone(path: str) -> None:
    """Each row accepts 0..k tokens, another number in every round, with neighbours that do otherwise."""
    plain = every_decoder("none", path)
    rng = random.Random(3)
    ks = [4, 8, 1, 32, 6]
    requests = [
        request_for("ngram", prompt, k=k, max_new_tokens=90, ignore_eos=True, seed=seed)
        for seed, (prompt, k) in enumerate(zip(PROMPTS, ks, strict=True))
    ]
    answers = {seed: plain.run(r.baseline()).output_ids for seed, r in enumerate(requests)}
    accept = {seed: [rng.randint(0, k) for _ in range(90)] for seed, k in enumerate(ks)}
    decoder = tiny_decoder(Forced(answers, accept), plain.target.runner)
    for seed, run in enumerate(decoder.generate(requests)):
        assert violations(run) == []
        assert run.output_ids == answers[seed]
        for at, step in enumerate(run.steps[1:-1]):
            assert step.num_accepted == min(accept[seed][at], len(step.drafts))
        seen = {step.num_accepted for step in run.steps[1:-1]}
        assert {0, min(ks[seed], 4)} <= seen or seed == 3


def test_rows_leave_the_batch_when_they_are_done() -> None:
    rows = lambda prefix: [float(i == (prefix[-1] + 1) % 26) for i in range(26)]  # noqa: E731
    draft = TableRunner(rows, 26)
    decoder = toy_decoder(rows, 26, DraftModelProposer(draft))
    requests = [ask("abc"[b], k=2, max_new_tokens=n) for b, n in enumerate((7, 1, 13))]
    seen: list[tuple[int, int]] = []
    runs = decoder.generate(requests, on_step=lambda index, step: seen.append((index, step.index)))
    assert [len(run.output_ids) for run in runs] == [7, 1, 13]
    assert [n for n, _ in decoder.target.runner.passes] == [3, 2, 2, 1, 1]
    assert {n for n, _ in draft.passes} == {2, 1}
    assert seen == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (2, 2), (2, 3), (2, 4)]


def poisoned(path: str, token: int) -> RowRunner:
    """The tiny target, but what token ``token`` stands for is not numbers."""
    model = copy.deepcopy(tiny_llama())
    model.get_input_embeddings().weight.data[token] = float("nan")
    if path == "generic":
        return ModelRunner(model, context=CONTEXT, device="cpu")
    return FusedRunner(Weights(model), context=CONTEXT, device="cpu")


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_breaks_down_disturbs_nobody(path: str) -> None:
    """One row breaks down in its second pass, one on its prompt; later batches in the same buffers are sound."""
    decoder = tiny_decoder(NgramProposer(), poisoned(path, 383))
    good = [
        request_for("ngram", p, max_new_tokens=50, ignore_eos=True, logit_bias=((383, -100.0),)) for p in PROMPTS[:3]
    ]
    broken = request_for("ngram", "fox " * 14, max_new_tokens=30, logit_bias=((383, 1000.0),))
    alone = [decoder.run(request) for request in good]
    for _ in range(2):
        runs = decoder.generate([good[0], broken, good[1], good[2]])
        for run, expected in zip([runs[0], *runs[2:]], alone, strict=True):
            assert_same(run, expected)
        assert runs[1].finish_reason == "error"
        assert runs[1].output_ids == (383,)
        assert "output token 2 are not numbers" in (runs[1].error or "")
        assert violations(runs[1]) == []
    # Two rows in buffers where two rows have broken down: the shorter one reads, masked, what it has not yet written.
    plain = tiny_decoder(None, decoder.target.runner)
    assert plain.generate([broken.baseline(), broken.baseline()])[0].finish_reason == "error"
    pair = [good[0].baseline(), good[2].baseline()]
    for run, expected in zip(plain.generate(pair), [alone[0], alone[2]], strict=True):
        assert run.output_ids == expected.output_ids


def test_all_rows_may_break_down_and_the_stream_ends() -> None:
    decoder = toy_decoder(lambda prefix: [float("nan")] * 6, 6)
    stream = decoder.batch([ask("a", proposer="none"), ask("b", proposer="none")])
    assert list(stream) == []
    assert [run.finish_reason for run in stream.runs] == ["error", "error"]


def test_one_request_can_be_stopped_and_the_others_go_on() -> None:
    decoder = every_decoder("ngram", "fused")
    requests = [request_for("ngram", p, max_new_tokens=20, ignore_eos=True) for p in PROMPTS[:3]]
    alone = decoder.run(requests[2])
    stream = decoder.batch(requests)
    next(stream)
    stream.close(0)
    assert set(next(stream)) == {1, 2}
    stream.close(1)
    for steps in stream:
        assert set(steps) == {2}
    runs = stream.runs
    assert [run.finish_reason for run in runs] == ["cancelled", "cancelled", "length"]
    assert [len(run.steps) for run in runs[:2]] == [1, 2]
    assert_same(runs[2], alone)


def test_closing_a_batch_stops_all_within_a_step() -> None:
    stream = every_decoder("none", "fused").batch([request_for("none", p, ignore_eos=True) for p in PROMPTS[:3]])
    next(stream)
    next(stream)
    stream.close()
    assert next(stream, None) is None
    assert {(run.finish_reason, len(run.steps)) for run in stream.runs} == {("cancelled", 2)}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
@pytest.mark.parametrize("where", ["target", "commit"])
def test_out_of_memory_ends_all_rows_with_a_sentence(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = every_decoder("ngram", "fused")
    stream = decoder.batch([request_for("ngram", p, max_new_tokens=20, ignore_eos=True) for p in PROMPTS[:3]])
    next(stream)
    next(stream)

    def full(*_: object, **__: object) -> None:
        raise error

    owner, name = (decoder.target.runner, "forward") if where == "target" else (decoder.proposer, "commit")
    monkeypatch.setattr(owner, name, full)
    assert next(stream, None) is None
    for run in stream.runs:
        assert run.finish_reason == "error"
        assert (run.error or "").startswith("out of memory: use fewer requests at once")
        assert len(run.steps) == 2
        assert violations(run) == []
    monkeypatch.undo()
    assert decoder.run(request_for("ngram", "x", max_new_tokens=3, ignore_eos=True)).finish_reason == "length"


def test_another_error_ends_all_rows_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = toy_decoder(lambda prefix: [0.0] * 6, 6, Recite(lambda tokens, k: 1 // 0))
    stream = decoder.batch([ask("a"), ask("b")])
    next(stream)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert [run.error for run in stream.runs] == ["ZeroDivisionError: integer division or modulo by zero"] * 2
    assert next(stream, None) is None


def test_what_cannot_decode_together_is_refused() -> None:
    decoder = every_decoder("ngram", "fused")
    good = request_for("ngram", "x")
    for requests, message in [
        ([], "1 to 32 requests"),
        ([good] * 33, "1 to 32 requests"),
        ([good, good.replace(k=0)], "request 2: k"),
        ([good, good.replace(proposer="none")], "one proposer: request 1 asks for ngram, request 2 for none"),
        ([good, good.replace(dtype="bfloat16")], "one dtype"),
        ([good, good, good.replace(exit_layer=3)], "one exit layer: .*request 3"),
    ]:
        with pytest.raises(RequestError, match=message):
            decoder.batch(requests)


def test_a_batched_run_does_not_pretend_to_have_had_the_machine_alone() -> None:
    decoder = every_decoder("none", "fused")
    requests = [
        request_for("none", p, max_new_tokens=n, ignore_eos=True) for p, n in zip(PROMPTS, (5, 9, 1), strict=False)
    ]
    runs = decoder.generate(requests)
    alone = decoder.run(requests[0])
    assert [batch_size(run) for run in [*runs, alone]] == [3, 3, 3, 1]
    assert "together" in (baseline_fits(runs[0], alone) or "")
    assert "together" in (baseline_fits(alone, runs[0]) or "")
    t = batch_timing(runs)
    assert (t.rounds, t.tokens) == (8, 4 + 8)
    assert t.decode_ms == pytest.approx(runs[1].decode_ms)
    assert t.rows_alive == pytest.approx((4 * 2 + 4) / 8)
    assert t.tokens_per_second == pytest.approx(1000 * 12 / t.decode_ms)
    # Every row of a round has that round's time.
    assert [s.verify_ms for s in runs[0].steps] == [s.verify_ms for s in runs[1].steps[:5]]


def test_the_widest_batch_runs() -> None:
    decoder = every_decoder("draft-model, copy", "fused")
    requests = [request_for("draft-model", f"fox {b}", k=1 + b % 5, max_new_tokens=6 + b % 7) for b in range(32)]
    for run, request in zip(decoder.generate(requests), requests, strict=True):
        assert run.output_ids == decoder.run(request).output_ids


@pytest.mark.parametrize("path", PATHS)
def test_a_row_may_outgrow_the_drafts_context_while_others_go_on_drafting(path: str) -> None:
    draft = runner(path=path, context=60)
    decoder = tiny_decoder(DraftModelProposer(draft), runner(path=path))
    requests = [
        request_for("draft-model", p, k=4, max_new_tokens=70, ignore_eos=True) for p in (PROMPTS[1], "x", PROMPTS[0])
    ]
    runs = decoder.generate(requests)
    for run, request in zip(runs, requests, strict=True):
        assert_same(run, decoder.run(request))
    assert runs[0].metrics["num_spec_steps"] == 0
    assert "longer than the draft's context of 60" in runs[0].metrics["not_speculating"]
    assert runs[1].metrics["num_spec_steps"] > 0
    assert max(draft.lengths) <= 60
