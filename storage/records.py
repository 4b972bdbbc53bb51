"""What storage takes and gives: plain frozen dataclasses, no database behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from decoder.trace import FinishReason, Run


class State(StrEnum):
    """Where a run stands. ``interrupted``: its writer is gone and never wrote an end."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


def state_of(reason: FinishReason | None) -> State:
    """The state of a run that nobody writes to any more."""
    if reason is None:
        return State.INTERRUPTED
    return {FinishReason.CANCELLED: State.STOPPED, FinishReason.ERROR: State.FAILED}.get(reason, State.DONE)


@dataclass(frozen=True, slots=True)
class RunMeta:
    """What people say about a run. ``created_at`` is aware, in UTC.

    ``imported_from`` names the file that a run came from (None for a run that was recorded here).
    """

    id: str
    name: str
    tags: tuple[str, ...]
    note: str
    author: str
    created_at: datetime
    state: State
    archived: bool
    imported_from: str | None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and what people say about it."""

    run: Run
    meta: RunMeta


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One row of a list: everything in columns, so that no step is loaded. Times are milliseconds, rates in [0, 1].

    ``speedup`` is measured against ``baseline_id``; None where that run is not here, not finished or does not fit.
    ``not_speculating`` is the reason why a proposer drafted nothing. Previews are the first 200 characters.
    """

    id: str
    name: str
    tags: tuple[str, ...]
    note: str
    author: str
    created_at: datetime
    state: State
    archived: bool
    imported_from: str | None
    target: str
    proposer: str
    draft: str | None
    k: int
    seed: int
    temperature: float | None
    max_new_tokens: int | None
    dtype: str
    device: str
    prompt_preview: str
    text_preview: str
    finish_reason: str | None
    not_speculating: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_second: float | None
    ms_per_token: float | None
    tokens_per_step: float | None
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    baseline_id: str | None
    speedup: float | None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict; ``created_at`` in ISO 8601."""
        raw = dataclasses.asdict(self)
        raw["tags"] = list(self.tags)
        raw["state"] = self.state.value
        raw["created_at"] = self.created_at.isoformat()
        return raw


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs. Every field that is given must match; None or "" does not restrict.

    ``text`` is looked for, whatever its case, in name, note, prompt and output. ``since`` (inclusive) and ``until``
    (exclusive) are aware datetimes. ``archived`` None means both kinds.
    """

    text: str = ""
    target: str | None = None
    proposer: str | None = None
    draft: str | None = None
    k: int | None = None
    tag: str | None = None
    author: str | None = None
    state: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    archived: bool | None = False
    ids: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of a longer list; ``total`` counts the whole of it."""

    rows: list[RunSummary]
    total: int


@dataclass(frozen=True, slots=True)
class Facets:
    """The values that occur, sorted: what a filter can offer."""

    targets: list[str]
    proposers: list[str]
    drafts: list[str]
    ks: list[int]
    tags: list[str]
    authors: list[str]


class ImportedIds(list[str]):
    """The ids of an import in the order of the file; ``new`` were stored, ``known`` were here already, identical."""

    def __init__(self, ids: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(ids)
        self.known = list(known)
        skipped = set(known)
        self.new = [run_id for run_id in ids if run_id not in skipped]
