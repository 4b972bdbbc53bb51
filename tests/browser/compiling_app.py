"""The page with an engine that becomes compiled: ``python -m tests.browser.compiling_app PORT DB FILE``.

The step that is missing can be built once a prompt held "compile"; FILE stands for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decoder.catalog import DEFAULT_TARGET
from decoder.request import GenerationRequest
from playground.command_line import run_server
from playground.compiling import Compiling
from tests.playground.fake_engine import FakeEngine, FakeStream, fake_load

FLOOR = {"target_bytes_per_token": "269000000", "read_bytes_per_second": "28000000000"}
WORDS = "compiling in the background, 4 of 5 steps ready"


class Missing:
    """A step that is a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def built(self) -> bool:
        return self.path.exists()


class OneMissing(Compiling):
    """One step is missing, and asked for when ``wanted`` is set."""

    step = Missing(Path("nowhere"))
    wanted = False
    used = False

    def __init__(self, done: Callable[[], None]) -> None:
        super().__init__(done)

    @property
    def words(self) -> str:
        return "" if self.used else WORDS

    def missing(self) -> list[Any]:
        return [] if self.step.built or not self.wanted else [self.step]

    def command(self, job: Any) -> tuple[list[str], Path]:
        return [sys.executable, "-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", str(job.path)], Path()

    def take_up(self) -> bool:
        OneMissing.used = True
        return True


class PathEngine(FakeEngine):
    """Runs record path and floor as the real engine does."""

    def stream(self, request: GenerationRequest) -> FakeStream:
        stream = super().stream(request)
        OneMissing.wanted = OneMissing.wanted or "compile" in request.prompt
        path = {"target_path": "compiled", "target_compiled_width": "9", "target_compiled_context": "1024"}
        if not OneMissing.used:
            path = {"target_path": "eager, fused", "target_path_note": WORDS}
        if "kernel" in request.prompt:
            path = {"target_path": "compiled kernel", "target_compiled_width": "66", "target_compiled_context": "8192"}
            path |= {"draft_path": "compiled kernel", "draft_compiled_width": "66", "draft_compiled_context": "8192"}
        stream._whole = stream._whole.replace(versions={"redline": "0.1.0", **FLOOR, **path})
        return stream


if __name__ == "__main__":
    port, db, file = sys.argv[1:]
    OneMissing.step = Missing(Path(file))
    run_server("127.0.0.1", int(port), db, DEFAULT_TARGET, None, load=fake_load(PathEngine()), compiling=OneMissing)
