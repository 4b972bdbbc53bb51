"""The one thread that models run on, and what the header says about it.

All loading, warming up and stepping happens on this thread: libraries keep per-thread pools and modes, and measured
times stay comparable. Whoever waits for it polls, so that progress can be shown and a stop is heard at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from decoder.errors import ModelError, RedlineError
from decoder.request import GenerationRequest, SamplingParams
from decoder.trace import Run, Step

log = logging.getLogger(__name__)
T = TypeVar("T")
Report = Callable[[float, str], None]
WARM_UP_TOKENS = 12


class Stream(Protocol):
    """A generation that is going on (decoder.engine.RunStream)."""

    @property
    def run(self) -> Run: ...

    def __iter__(self) -> Iterator[Step]: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A loaded target with its proposer (decoder.engine.SpeculativeDecoder)."""

    def stream(self, request: GenerationRequest) -> Stream: ...

    def remember(self, runs: Sequence[Sequence[int]]) -> None: ...


Load = Callable[[GenerationRequest, Report], Engine]


def load_engine(request: GenerationRequest, report: Report) -> Engine:
    """Load with the real decoder; imports torch only now, so that the page is open long before."""
    report(0.0, "starting the decoder")
    from decoder.engine import SpeculativeDecoder

    return SpeculativeDecoder.load(request, progress=report)


@dataclass(frozen=True, slots=True)
class Status:
    """One line for the header. ``fraction`` in [0, 1] while loading; ``detail`` is why a path is not the fastest."""

    state: Literal["idle", "loading", "ready", "failed"]
    text: str
    fraction: float | None = None
    detail: str = ""


class ModelThread:
    """Runs what it is given, one after the other, and remembers which engines are warm."""

    def __init__(self, load: Load = load_engine) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._warm: dict[tuple[Any, ...], Status] = {}
        self._last: GenerationRequest | None = None
        self._lock = threading.Lock()
        self._status = Status("idle", "no model loaded yet")

    @property
    def status(self) -> Status:
        """What the header shows now."""
        with self._lock:
            return self._status

    def submit(self, action: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``action`` on the model thread."""
        return self._pool.submit(action, *args)

    def call(self, action: Callable[..., T], *args: Any) -> T:
        """Run ``action`` on the model thread and wait for it."""
        return self._pool.submit(action, *args).result()

    def prepare(self, request: GenerationRequest) -> Engine:
        """Load and warm up what ``request`` needs (to be called on the model thread). Raises RedlineError."""
        self._say(Status("loading", f"loading {request.target}", 0.0))
        try:
            engine = self._load(request, self._reporter(request))
            self._warm_up(engine, request)
        except RedlineError as error:
            self._say(Status("failed", str(error)))
            raise
        except Exception as error:
            log.exception("loading %s failed", request.target)
            sentence = f"{request.target} could not be loaded: {type(error).__name__}: {first_line(error)}"
            self._say(Status("failed", sentence))
            raise ModelError(sentence) from error
        self._last = request
        return engine

    def renew(self, take_up: Callable[[], bool]) -> None:
        """Take up what was compiled, and warm up again what was used last (on the model thread, between plans)."""
        if not take_up():
            return
        self._warm.clear()
        if self._last:
            self.prepare(self._last)

    def close(self) -> None:
        """Take no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _reporter(self, request: GenerationRequest) -> Report:
        def report(fraction: float, message: str) -> None:
            share = min(1.0, max(0.0, fraction))
            self._say(Status("loading", f"{message or 'loading ' + request.target} · {share:.0%}", share))

        return report

    def _warm_up(self, engine: Engine, request: GenerationRequest) -> None:
        """A few tokens with the same parts, thrown away: the first pass pays for allocations that no run should."""
        key = (request.target, request.proposer, request.draft, request.exit_layer, request.dtype, request.device)
        if key not in self._warm:
            self._say(Status("loading", f"warming up {request.target}", 1.0))
            stream = engine.stream(
                request.replace(
                    prompt="One, two, three, four. One, two, three,",
                    system_prompt=None,
                    chat=False,
                    prediction="four. One, two, three, four." if request.proposer == "prediction" else None,
                    max_new_tokens=WARM_UP_TOKENS,
                    stop=(),
                    stop_ids=(),
                    sampling=SamplingParams(),
                )
            )
            for _ in stream:
                pass
            run = stream.run
            self._warm[key] = Status("ready", describe(run), detail=run.versions.get("target_path_note", ""))
        self._say(self._warm[key])

    def _say(self, status: Status) -> None:
        with self._lock:
            self._status = status


def describe(run: Run) -> str:
    """The model of a run in one line: ``smollm2-135m · bf16 · CPU · eager``."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    parts = [run.target, short.get(run.dtype, run.dtype), run.device.upper(), run.versions.get("target_path", "")]
    return " · ".join(part for part in parts if part)


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's text, shortened."""
    line = (str(error).splitlines() or [""])[0]
    return line if len(line) <= limit else line[:limit] + "…"
