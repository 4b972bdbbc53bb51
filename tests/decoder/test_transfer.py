"""What goes to a device: the right numbers, by a copy that is only queued where that is safe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoder.transfer import staged, upload, upload_tensor


class Copies:
    """Stands in for ``Tensor.to`` and ``Tensor.pin_memory`` of devices that are not here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, bool, bool]] = []
        self.pinned: list[Tensor] = []
        """Held, so that the id of none is given to another."""
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        monkeypatch.setattr(Tensor, "to", lambda tensor, device, non_blocking: self._to(tensor, device, non_blocking))

    def _pin(self, tensor: Tensor) -> Tensor:
        assert tensor.numel(), "an empty tensor has no memory to pin"
        self.pinned.append(tensor)
        return tensor

    def _to(self, tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        self.calls.append((str(device), any(tensor is one for one in self.pinned), non_blocking))
        return tensor


def test_numbers_lists_and_flags_arrive() -> None:
    assert upload([[3, 4], [5, 6]], "cpu").tolist() == [[3, 4], [5, 6]]
    assert upload([], "cpu").dtype == torch.long
    assert upload([True, False], "cpu", torch.bool).tolist() == [True, False]
    assert staged([1, 2], "cpu").tolist() == [1, 2]
    u = torch.rand(3, dtype=torch.float64)
    assert torch.equal(upload_tensor(u, torch.device("cpu")), u)


@pytest.mark.parametrize(
    ("device", "pinned", "queued"), [("cuda", True, True), ("cuda:1", True, True), ("mps", False, False)]
)
def test_a_copy_is_queued_from_pinned_memory(
    device: str, pinned: bool, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch)
    upload([1, 2], device)
    upload_tensor(torch.zeros(2), device)
    assert copies.calls == [(device, pinned, queued)] * 2
    upload([], device)
    assert copies.calls[-1] == (device, False, queued)
