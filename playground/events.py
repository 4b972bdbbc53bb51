"""What model work tells the page: small frozen events, one kind for each thing a person can see happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoder.request import GenerationRequest
from decoder.trace import Run, Step

Role = Literal["run", "baseline"]


@dataclass(frozen=True, slots=True)
class Planned:
    """One generation of a plan. ``title`` names it in progress lines ("k = 4")."""

    request: GenerationRequest
    role: Role = "run"
    title: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing is decoded yet. ``fraction`` in [0, 1], or None when nobody knows how long."""

    message: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """Generation ``index`` of the plan starts; ``run`` has no steps yet."""

    index: int
    run: Run


@dataclass(frozen=True, slots=True)
class Stepped:
    """New steps of generation ``index``, oldest first. ``prefill`` (prefill_ms, ttft_ms) comes with the first step."""

    index: int
    steps: tuple[Step, ...]
    prefill: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Generation ``index`` is over. ``unsaved`` is why it is not in the database, None when it is."""

    index: int
    run: Run
    unsaved: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Generation ``index`` could not start, or stopped on an internal error (then ``Ended`` follows)."""

    index: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Done:
    """The plan is over. ``runs`` are the finished generations with their baseline linked where it fits.

    ``unlinked`` is why a baseline that fits is not linked in the database, though both runs are there.
    """

    runs: tuple[Run, ...]
    baseline: Run | None
    no_baseline: str | None
    stopped: bool
    unlinked: str | None = None


ModelEvent = Waiting | Begun | Stepped | Ended | Failed | Done
"""Everything that ``ModelService.execute`` yields."""
