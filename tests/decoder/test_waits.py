"""Where the host would wait for a GPU: nowhere in a pass of the target, and once in a round."""

from __future__ import annotations

import copy

import pytest
import torch

from decoder.capture import RerunCapture
from decoder.clock import Clock
from decoder.fused import FusedRunner, Weights
from decoder.graphs import GraphRunner, Recordings
from decoder.proposers import Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.other_vocabulary import OtherVocabularyProposer
from tests.fake_device import DEVICE, DeviceTensor, FakeDevice, fake_device, on_device
from tests.spellings import shared, small_tokenizer
from tests.tiny import CONTEXT, tiny_decoder, tiny_llama, tiny_tokenizer
from tests.toys import Recite, ask


def device_weights(seed: int = 0, layers: int = 3) -> Weights:
    """A tiny model on the pretended device."""
    weights = Weights(copy.deepcopy(tiny_llama(seed, layers)))
    on_device(weights)
    return weights


def device_runner(path: str, seed: int = 0, layers: int = 3) -> FusedRunner:
    weights = device_weights(seed, layers)
    if path == "fused":
        return FusedRunner(weights, context=CONTEXT, device=DEVICE)
    return GraphRunner(weights, Recordings(RerunCapture(), DEVICE), context=CONTEXT, device=DEVICE)


def test_the_pretended_device_tells_waits_from_queued_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_device(monkeypatch) as device:
        x = torch.arange(6).to(DEVICE, non_blocking=True)
        y = torch.zeros(6, dtype=torch.long, device=DEVICE)
        y[1:3] = x[2:4] * 2
        y.copy_(torch.ones(6, dtype=torch.long), non_blocking=True)
        y.index_add_(0, x[:2], x[:2])
        assert isinstance((x < 3).long().cumprod(0).sum(), DeviceTensor)
        assert device.waits == []
        for work in (
            lambda: x.tolist(),
            lambda: x.cpu(),
            lambda: x[0].item(),
            lambda: float(x[1]),
            lambda: bool((x > 1).any()),
            lambda: x[x > 2],
            lambda: x[[0, 2]],
            lambda: x[x[1]],
            lambda: x.nonzero(),
            lambda: torch.tensor([1, 2], device=DEVICE),
            lambda: torch.arange(2).to(DEVICE),
            lambda: y.copy_(torch.arange(6)),
        ):
            work()
            assert len(device.waits) == 1
            device.waits.clear()
        with pytest.raises(AssertionError, match="mixes tensors"):
            _ = x + torch.arange(6)


@pytest.mark.parametrize("path", ["fused", "graphs"])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_pass_waits(path: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(path)
    with fake_device(monkeypatch) as device:
        runner.capture = (1, 3)
        runner.reset(batch)
        ids = torch.randint(1, 384, (batch, 40)).to(DEVICE, non_blocking=True)
        runner.forward(ids, [40 - b for b in range(batch)], last=True)
        for width in (1, 3, 5, 12):
            counts = [max(1, width - b) for b in range(batch)]
            assert isinstance(runner.forward(ids[:, :width], counts), DeviceTensor)
            runner.rollback([length - 1 for length in runner.lengths])
        runner.forward(ids[:, :2], [1 + b % 2 for b in range(batch)], last=True)
        if batch == 1:
            start = runner.lengths[0] + 1
            runner.forward(ids[:, :5], parents=[None, 0, None, 2])
            runner.keep_path(0, start, [2, 3])
        else:
            runner.select([0, 2])
            runner.forward(ids[:2, :1])
        assert device.waits == []


def steps_waits(
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    proposer: Proposer | None,
    target: FusedRunner,
    **changes: object,
) -> list[list[str]]:
    """The waits of every step's clock of a run."""
    found: list[list[str]] = []
    start, stop = Clock.start, Clock.stop

    def begin(clock: Clock) -> None:
        device.waits.clear()
        device.counting = True
        start(clock)

    def end(clock: Clock) -> tuple[float, float, float]:
        times = stop(clock)
        device.counting = False
        found.append(list(device.waits))
        return times

    monkeypatch.setattr(Clock, "start", begin)
    monkeypatch.setattr(Clock, "stop", end)
    device.counting = False
    decoder = tiny_decoder(proposer, target)
    asked = [
        ask(prompt, proposer="ngram", ignore_eos=True, max_new_tokens=n, k=3, **changes)
        for prompt, n in PROMPTS.items()
    ]
    runs = decoder.batch(asked)
    for _ in runs:
        pass
    assert [run.error for run in runs.runs] == [None] * len(asked)
    assert proposer is None or any(step.drafts for run in runs.runs for step in run.steps)
    return found


PROMPTS = {"The quick brown fox": 8, "def f(x): return x": 20, "The lazy dog jumps": 14}
"""With the length of the answer: rows leave at different times."""
GREEDY: dict[str, object] = {}
SAMPLED: dict[str, object] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
PENALISED: dict[str, object] = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": ((5, 1.0),)}


@pytest.mark.parametrize("path", ["fused", "graphs"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED, SAMPLED | PENALISED])
@pytest.mark.parametrize("name", ["none", "script", "draft-model", "early-exit"])
def test_a_round_waits_once(name: str, sampling: dict[str, object], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows together; whoever proposes chains, the host reads the verdicts and nothing else."""
    target = device_runner(path)
    proposers = {
        "none": lambda: None,
        "script": lambda: Recite(lambda tokens, k: list(range(9, 9 + k))),
        "draft-model": lambda: DraftModelProposer(device_runner(path, 1, 1)),
        "early-exit": lambda: EarlyExitProposer(target, 3, 2),
    }
    with fake_device(monkeypatch) as device:
        found = steps_waits(device, monkeypatch, proposers[name](), target, **sampling)
    assert len(found) > 4
    for waits in found:
        assert len(waits) == 1, waits
        assert "judge.py" in waits[0]


@pytest.mark.parametrize("path", ["fused", "graphs"])
def test_sampled_drafting_with_another_vocabulary_waits_once_too(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it fed to the draft is known from the text that was kept. (Greedy, it reads every token that it writes.)"""
    vocabulary = shared(tiny_tokenizer(), small_tokenizer())
    size = len(small_tokenizer())
    weights = Weights(copy.deepcopy(tiny_llama(1, 1, size)))
    on_device(weights)
    draft = FusedRunner(weights, context=CONTEXT, device=DEVICE)
    if path == "graphs":
        draft = GraphRunner(weights, Recordings(RerunCapture(), DEVICE), context=CONTEXT, device=DEVICE)
    with fake_device(monkeypatch) as device:
        proposer = OtherVocabularyProposer(draft, vocabulary)
        found = steps_waits(device, monkeypatch, proposer, device_runner(path), **SAMPLED)
    assert len(found) > 4
    for waits in found:
        assert len(waits) == 1, waits
        assert "judge.py" in waits[0]
