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
    return torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


def upload(values: Sequence[Any], device: str | torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """``values`` as a tensor on ``device``; the copy is only queued."""
    return staged(values, device, dtype).to(device, non_blocking=True)


def upload_tensor(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A host tensor on ``device``; the copy is only queued. The caller must not write to ``tensor`` any more."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
