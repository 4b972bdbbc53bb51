"""A device that is only pretended, to see where the host would wait for a GPU.

Its tensors hold real numbers on the CPU but say that they lie on ``DEVICE``. Reading one (``tolist``, ``item``,
``bool``, ``cpu``), choosing by a mask, and copying to it without ``non_blocking`` is what makes a host wait on CUDA;
each is written down in ``waits``. Mixing it with tensors of the host is an error, as it is there.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from decoder.linear import Linear

DEVICE = "meta"
_READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"}
_COUNTS = {"nonzero", "nonzero_numpy", "masked_select", "unique_consecutive", "_unique2", "bincount", "argwhere"}
"""The size of their result depends on numbers that only the device knows."""
_MOVES = {"to", "_to_copy"}


class DeviceTensor(Tensor):
    """A tensor of the pretended device around the real one."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )
        made.held = real
        return made

    def tolist(self) -> Any:  # torch refuses it for subclasses
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the pretended device outside of it")


class FakeDevice(TorchDispatchMode):
    """Active while anything runs on the device. ``waits`` tells operation and place of every wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.counting = True

    def wait(self, what: str) -> None:
        """The host waits."""
        if self.counting:
            ours = [f for f in traceback.extract_stack() if "/decoder/" in f.filename and "/tests/" not in f.filename]
            self.waits.append(f"{what} at " + (f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "?"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # By name, wherever it was given by position.
        kwargs = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        tensors = [t for t in tree_leaves(kwargs) if isinstance(t, Tensor)]
        ours = [t for t in tensors if isinstance(t, DeviceTensor)]
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == DEVICE
        if to_device:
            kwargs["device"] = "cpu"
        kwargs = tree_map(lambda t: t.held if isinstance(t, DeviceTensor) else t, kwargs)
        if name in _MOVES and asked is not None:
            return self._move(func, kwargs, bool(ours), to_device)
        if name == "copy_" and isinstance(tensors[0], DeviceTensor) != isinstance(tensors[1], DeviceTensor):
            if not isinstance(tensors[0], DeviceTensor) or (not kwargs.get("non_blocking") and tensors[1].dim() > 0):
                self.wait("copy_")
        elif ours:
            self._check(name, tensors)
        result = func(**kwargs)
        if func._schema.is_mutable:
            return tensors[0]
        if ours or to_device:
            return tree_map(lambda t: DeviceTensor(t) if isinstance(t, Tensor) else t, result)
        return result

    def _move(self, func: Any, kwargs: dict[str, Any], from_device: bool, to_device: bool) -> Tensor:
        if from_device and not to_device:
            self.wait("read")
        elif to_device and not from_device and not kwargs.get("non_blocking"):
            self.wait("upload")
        if from_device != to_device:
            kwargs["copy"] = True
        result: Tensor = func(**kwargs)
        return DeviceTensor(result) if to_device else result

    def _check(self, name: str, tensors: list[Tensor]) -> None:
        if name in _READS or name in _COUNTS:
            self.wait(name)
        host = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
        if name.startswith("index"):
            if host or any(t.dtype == torch.bool for t in tensors[1:]):
                self.wait(name)
        else:
            assert not host, f"{name} mixes tensors of the host and of the device"


@contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Run on the pretended device: ``with fake_device(monkeypatch) as device: ...``."""
    device, tensor = FakeDevice(), torch.tensor

    def made(data: Any, **options: Any) -> Tensor:
        # torch gives an empty one for the meta device; on CUDA this is a copy that the host waits for.
        if str(options.get("device", "")) != DEVICE:
            return tensor(data, **options)
        device.wait("torch.tensor(..., device=)")
        return DeviceTensor(tensor(data, **{**options, "device": "cpu"}))

    monkeypatch.setattr(torch, "tensor", made)
    with torch.inference_mode(), device:
        yield device


@torch.inference_mode()
def on_device(module: nn.Module) -> nn.Module:
    """``module`` with its parameters, buffers and borrowed weights moved there, in place."""
    for part in module.modules():
        if isinstance(part, Linear) and "weight" not in part._parameters and not isinstance(part.weight, DeviceTensor):
            part.weight = DeviceTensor(part.weight.clone())
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is not None and not isinstance(value, DeviceTensor):
                    table[name] = DeviceTensor(value.clone())  # type: ignore[assignment]
    return module
