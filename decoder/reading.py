"""How long it takes to read a model's weights once here: the floor that a run's time per token is set beside.

Measured once per process and device, with the bench's own kernels, before the first run: nothing decodes then.
"""

from __future__ import annotations

import logging
from functools import lru_cache

from decoder.bench.floor import bytes_per_token, read_bandwidth
from decoder.loading import LoadedModel

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 << 20
"""Several times a last-level cache; small enough to be measured in a fraction of a second."""
CUDA_BYTES = 1 << 30
PASSES = 4
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@lru_cache
def bandwidth(device: str) -> float | None:
    """Bytes per second that can be read here, or None where it could not be measured."""
    try:
        return read_bandwidth(device, CUDA_BYTES if device.startswith("cuda") else BUFFER_BYTES, PASSES)[0]
    except (RuntimeError, MemoryError) as error:
        log.warning("the read bandwidth of %s was not measured: %s", device, error)
        return None


def reading(loaded: LoadedModel) -> dict[str, str]:
    """The floor's two numbers for the record of a run (see ``metrics.floor_ms``); nothing where they are not known."""
    config = loaded.model.config.get_text_config()
    if any(getattr(config, name, None) for name in _EXPERTS):
        return {}  # a token reads some experts only
    speed = bandwidth(loaded.device)
    if not speed:
        return {}
    return {"target_bytes_per_token": str(bytes_per_token(loaded.model)), "read_bytes_per_second": str(round(speed))}
