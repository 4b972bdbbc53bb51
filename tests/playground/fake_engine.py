"""An engine without a model: it streams made-up runs step by step, so that the page and its service can be tested."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from decoder import metrics
from decoder.errors import ModelError, RequestError
from decoder.request import GenerationRequest
from decoder.trace import FinishReason, Run, Step
from tests.playground.visual_runs import ANSWER, HOSTILE, make_run, pieces_of

_ids = itertools.count(int(time.time()) % 1_000_000 * 1000)


class FakeStream:
    """Reveals the steps of a made-up run one by one."""

    def __init__(self, run: Run, *, delay: float = 0.0, crash_at: int | None = None) -> None:
        self._whole = run
        self._shown = 0
        self._closed = False
        self._delay = delay
        self._crash_at = crash_at
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self.threads.add(threading.current_thread().name)
        if self._closed or self._shown == len(self._whole.steps):
            raise StopIteration
        if self._shown == self._crash_at:
            raise RuntimeError("the matrix is singular")
        time.sleep(self._delay)
        self._shown += 1
        return self._whole.steps[self._shown - 1]

    def close(self) -> None:
        self._closed = True

    @property
    def run(self) -> Run:
        if self._shown == len(self._whole.steps):
            return self._whole
        steps = self._whole.steps[: self._shown]
        emitted = [token for step in steps for token in step.emitted]
        return self._whole.replace(
            steps=steps,
            prefill_ms=self._whole.prefill_ms if steps else 0.0,
            ttft_ms=self._whole.ttft_ms if steps else 0.0,
            output_ids=tuple(token.id for token in emitted),
            text="".join(token.text for token in emitted),
            finish_reason=FinishReason.CANCELLED if self._closed else None,
            error=None,
            decode_ms=sum(s.draft_ms + s.verify_ms + s.overhead_ms for s in steps),
            metrics=metrics.derive(steps),
        )


@dataclass
class FakeEngine:
    """``stream`` makes a run for the request. ``delay`` seconds go into each step."""

    delay: float = 0.0
    crash_at: int | None = None
    error_at_end: str | None = None
    streams: list[FakeStream] = field(default_factory=list)
    remembered: list[list[list[int]]] = field(default_factory=list)

    def remember(self, runs: Sequence[Sequence[int]]) -> None:
        self.remembered.append([list(ids) for ids in runs])

    def stream(self, request: GenerationRequest) -> FakeStream:
        request.validate()
        if "too long" in request.prompt:
            raise RequestError("the prompt has 9,000 tokens and fake takes at most 8,191: shorten it by 809 tokens")
        pieces = list(HOSTILE) if "hostile" in request.prompt else pieces_of(ANSWER)
        if len(pieces) > request.max_new_tokens:
            pieces = pieces[: request.max_new_tokens]
        run = make_run(
            pieces,
            run_id=f"rfake{next(_ids):010d}",
            temperature=request.sampling.temperature,
            proposer=request.proposer,
            k=request.k,
            seed=request.sampling.seed,
            finish=FinishReason.ERROR if self.error_at_end else FinishReason.EOS,
            error=self.error_at_end,
            prompt=request.prompt,
        )
        run = run.replace(request=request.to_json(), target=request.target, draft=request.draft)
        if request.prompt.startswith("One, two"):  # the warm-up has no business with delays and crashes
            return FakeStream(run)
        stream = FakeStream(run, delay=self.delay, crash_at=self.crash_at)
        self.streams.append(stream)
        return stream


def fake_load(engine: FakeEngine, *, delay: float = 0.0) -> Callable[..., FakeEngine]:
    """A loader that reports progress and knows no target called ``missing``."""

    def load(request: GenerationRequest, report: Callable[[float, str], None]) -> FakeEngine:
        for share in (0.25, 0.5, 0.75):
            report(share, f"loading {request.target}")
            time.sleep(delay / 3)
        if "missing" in request.target:
            raise ModelError(f"{request.target} is neither a named target, nor a folder, nor a Hugging Face id")
        return engine

    return load
