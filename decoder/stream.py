"""Runs in progress: one (``RunStream``) or many that decode together (``BatchStream``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from decoder.clock import Clock
from decoder.errors import RequestError
from decoder.request import GenerationRequest
from decoder.rounds import Decoding
from decoder.trace import FinishReason, Run, Step

if TYPE_CHECKING:
    from decoder.engine import SpeculativeDecoder

MAX_BATCH = 32
"""Requests that may decode together."""
_SHARED = ("target", "proposer", "draft", "exit_layer", "dtype", "device")
"""Fields of a request that decide which models run: the same for all requests of a batch."""


class BatchStream(Iterator[dict[int, Step]]):
    """Requests that decode together. Each round yields its steps by index of their request.

    Rows that finish leave the batch, and the others go on. A round takes the time that its widest row takes, and every
    step of the round carries this same time: it is what the row's reader waited, not what the row cost. Sums over rows
    mean nothing; ``metrics.batch_timing`` gives the batch's own numbers.
    """

    def __init__(self, decoder: SpeculativeDecoder, requests: Sequence[GenerationRequest]) -> None:
        self._clock = Clock(decoder.target.runner.device)
        begin = self._clock.now()
        _check(requests)
        self._decoding = Decoding(decoder, requests)
        # Checking and tokenising count for the first token; what the caller does before asking for it does not.
        self._prepared = self._clock.now() - begin
        self._begun = False

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> dict[int, Step]:
        if self._decoding.over:
            raise StopIteration
        try:
            if self._begun:
                steps = self._decoding.step()
            else:
                self._begun = True
                steps = self._decoding.prefill(self._clock.now() - self._prepared)
        except KeyboardInterrupt:
            self._end(FinishReason.CANCELLED)
            raise
        except BaseException as error:
            # Whatever happens, the runs keep their steps and say why they ended.
            if not _out_of_memory(error):
                self._end(FinishReason.ERROR, f"{type(error).__name__}: {error}")
                raise
            fewer = "fewer requests at once, " if len(self._decoding.states) > 1 else ""
            self._end(FinishReason.ERROR, f"out of memory: use {fewer}a shorter prompt or a smaller model")
            raise StopIteration from None
        if not steps:
            # Every row that was left has ended in an error.
            raise StopIteration
        return steps

    def close(self, index: int | None = None) -> None:
        """Stop the request ``index``, or all of them, within a step. A run keeps what it has and is marked cancelled,
        unless it had ended already."""
        states = self._decoding.states
        for state in states if index is None else [states[index]]:
            state.end(FinishReason.CANCELLED)

    def _end(self, finish: FinishReason, error: str | None = None) -> None:
        for state in self._decoding.states:
            state.end(finish, error)

    @property
    def runs(self) -> list[Run]:
        """Frozen snapshots of the runs so far, in the order of the requests."""
        return [state.snapshot() for state in self._decoding.states]


class RunStream(Iterator[Step]):
    """One run in progress. Iterate for its steps; ``run`` is the Run so far; ``close()`` stops within a step."""

    def __init__(self, decoder: SpeculativeDecoder, request: GenerationRequest) -> None:
        self._batch = BatchStream(decoder, [request])

    def __iter__(self) -> RunStream:
        return self

    def __next__(self) -> Step:
        return next(self._batch)[0]

    def close(self) -> None:
        """Stop. The run keeps what it has and is marked cancelled, unless it had ended already."""
        self._batch.close()

    @property
    def run(self) -> Run:
        """A frozen snapshot of the run so far."""
        return self._batch.runs[0]


def _check(requests: Sequence[GenerationRequest]) -> None:
    """Raise RequestError on the first thing that cannot be run, or not together."""
    if not 1 <= len(requests) <= MAX_BATCH:
        raise RequestError(f"1 to {MAX_BATCH} requests decode together, not {len(requests)}")
    for number, request in enumerate(requests, start=1):
        try:
            request.validate()
        except RequestError as error:
            if len(requests) == 1:
                raise
            raise RequestError(f"request {number}: {error}") from None
        for name in _SHARED:
            ours, first = getattr(request, name), getattr(requests[0], name)
            if ours != first:
                raise RequestError(
                    f"requests that decode together have one {name.replace('_', ' ')}: "
                    f"request 1 asks for {first}, request {number} for {ours}"
                )


def _out_of_memory(error: BaseException) -> bool:
    """The CPU's allocator says it with a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
