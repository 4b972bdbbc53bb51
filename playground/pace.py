"""How often a run that goes on is shown, and what the engine leaves to those who draw it.

Where the model decodes on all cores of the CPU, whatever draws at the same moment makes every one of them wait for the
one that it took: a step beside a drawing browser takes half as long again. So fewer frames are shown, and the engine
rests while a browser on this machine draws one. A step's time is then the engine's own; rests lie between steps.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pace:
    """``frame_s``: seconds between frames, at least. ``rest_s``: seconds without decoding behind each.
    ``first_rest_s``: the same behind a run's first frame, at which the page also puts away the run before."""

    frame_s: float = 1 / 15
    rest_s: float = 0.0
    first_rest_s: float = 0.0


def pace_of(device: str, beside: bool) -> Pace:
    """For a model on ``device``; ``beside``: the browser that shows the run is on this machine."""
    if device != "cpu":
        return Pace()
    return Pace(0.15, 0.05, 0.2) if beside else Pace(0.15)


def is_beside(request: Any) -> bool:
    """True when the address that a request came from is this machine's own."""
    host = getattr(getattr(request, "client", None), "host", None)
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
