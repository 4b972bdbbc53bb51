"""Small tables from the host to the device without making the host wait.

``torch.tensor(values, device="cuda")`` copies from pageable memory, and the host waits for everything that was asked of
the device before. From pinned memory the copy is queued like a kernel; torch keeps the memory until it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def staged(values: Sequence[Any], device: str | torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """``values`` (numbers, or equally long lists of them) on the host, where ``device`` can fetch them by itself."""
    return _pinned(torch.tensor(values, dtype=dtype), torch.device(device))


def upload(values: Sequence[Any], device: str | torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """``values`` as a tensor on ``device``; the copy is only queued."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A host tensor on ``device``; the copy is only queued. The caller must not write to ``tensor`` any more."""
    device = torch.device(device)
    # On mps nothing keeps the host's memory until a queued copy has read it.
    return _pinned(tensor, device).to(device, non_blocking=device.type != "mps")


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor
