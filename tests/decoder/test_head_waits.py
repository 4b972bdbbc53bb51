"""Drafting a chain with a head, on a pretended device: the host waits once in a round, when it reads the verdicts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from decoder.fused import FusedRunner, Weights
from decoder.heads.models import Borrowed, MedusaHeads
from decoder.heads.runner import HeadRunner
from decoder.proposers import Proposer
from decoder.proposers.heads import HeadProposer, MedusaProposer
from tests import heads
from tests.decoder.test_waits import PENALISED, SAMPLED, steps_waits
from tests.fake_device import DEVICE, DeviceTensor, fake_device, on_device
from tests.tiny import CONTEXT


def moved(value: Tensor | None) -> Tensor | None:
    return None if value is None else DeviceTensor(value.clone())


def head_on_device(name: str) -> Proposer:
    head: Any = copy.deepcopy(heads.load_tiny(name))
    with torch.inference_mode():
        on_device(head)
        for attribute in ("ids", "embedding"):
            if isinstance(getattr(head, attribute, None), Tensor):
                setattr(head, attribute, moved(getattr(head, attribute)))
        b = head.borrowed
        head.borrowed = Borrowed(DeviceTensor(b.embedding.clone()), DeviceTensor(b.head.clone()), None, b.layers)
        if isinstance(head, MedusaHeads):
            return MedusaProposer(head, device=DEVICE)
        on_device(head.rope._rotary)
        head.rope._like, head.rope._size = moved(head.rope._like), 0
    return HeadProposer(name, HeadRunner(head, vocab_size=heads.V, device=DEVICE))


@pytest.mark.parametrize("sampling", [{}, SAMPLED, PENALISED])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "medusa"])
def test_a_round_waits_once(name: str, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(copy.deepcopy(heads.predictable()))
    on_device(weights)
    target = FusedRunner(weights, context=CONTEXT, device=DEVICE)
    with fake_device(monkeypatch) as device:
        found = steps_waits(device, monkeypatch, head_on_device(name), target, **sampling)
    assert len(found) > 4
    for waits in found:
        assert len(waits) == 1, waits
        assert "judge.py" in waits[0]
