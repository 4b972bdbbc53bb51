"""Where the host would wait for a GPU: nowhere in a pass of the target, and once in a round."""

from __future__ import annotations

import copy

import pytest
import torch

from decoder.capture import RerunCapture
from decoder.fused import FusedRunner, Weights
from decoder.graphs import GraphRunner, Recordings
from tests.fake_device import DEVICE, DeviceTensor, fake_device, on_device
from tests.tiny import CONTEXT, tiny_llama


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
