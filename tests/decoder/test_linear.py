"""Packed weights: what they compute, and where they are kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from decoder import linear
from decoder.fused import Weights
from decoder.linear import Linear, pack_all
from tests.tiny import tiny_llama

needs_packing = pytest.mark.skipif(
    linear.packed(torch.zeros(64, 64, dtype=torch.bfloat16)) is None, reason="no bfloat16 in oneDNN here"
)


def weight(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@needs_packing
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_the_plain_one(tokens: int, biased: bool) -> None:
    w, bias = weight(torch.bfloat16), torch.linspace(-1, 1, 96).bfloat16() if biased else None
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    module = Linear(w, bias)
    module.pack()
    assert module._copy is not None
    with torch.inference_mode():
        # Strided inputs, as slices of a wider product are.
        for given in (x, torch.cat([x, x], -1)[..., 64:]):
            exact = F.linear(given.double(), w.double(), None if bias is None else bias.double())
            # Once rounded to eight bits, whichever kernel did it.
            assert torch.allclose(module(given).double(), exact, rtol=2**-7, atol=1e-2)


def test_other_weights_are_not_copied() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        module = Linear(weight(dtype))
        module.pack()
        assert module._copy is None
        assert torch.equal(module(weight(dtype)[:3]), F.linear(weight(dtype)[:3], weight(dtype)))


@needs_packing
def test_a_model_is_packed_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(weights: Any) -> list[bool]:
        return [part._copy is not None for part in weights.modules() if isinstance(part, Linear)]

    model = copy.deepcopy(tiny_llama()).bfloat16()
    monkeypatch.setattr(linear, "affordable", lambda size: False)
    weights = Weights(model)
    pack_all(weights)
    assert not any(copies(weights))
    monkeypatch.undo()
    pack_all(weights)
    assert all(copies(weights))
    assert len(copies(weights)) == 4 * len(weights.stack) + 1


def test_a_large_model_is_not_copied() -> None:
    assert linear.affordable(10**6)
    assert not linear.affordable(10**15)
