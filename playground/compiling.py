"""Steps are compiled behind the runs: while nothing is decoded, and taken up between two plans.

Nothing of torch is imported here: until the first model is there, nothing is missing either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decoder.builder import Builder


class Compiling:
    """What the service knows of compiled steps. ``done`` is called when something was built, and waits for its turn."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.builder = Builder(self, done)

    @property
    def words(self) -> str:
        """How far it is, or what went wrong, for the header; "" when there is nothing more to compile."""
        module = _compiled()
        return module.words() if module else ""

    def take_up(self) -> bool:
        """Use what was built (on the model thread, between plans); True when a path changed."""
        module = _compiled()
        return bool(module and module.take_up())

    def missing(self) -> Sequence[Any]:
        """See ``decoder.builder.Work``."""
        module = _compiled()
        return module.missing() if module else ()

    def command(self, job: Any) -> tuple[list[str], Path]:
        """See ``decoder.builder.Work``."""
        from decoder import packages

        return [*job.command(), "modest"], packages.HOME

    def failed(self, job: Any, code: int, errors: str) -> None:
        """See ``decoder.builder.Work``."""
        module = _compiled()
        if module:
            module.failed(job, code, errors)


def _compiled() -> Any:
    """``decoder.compiled``, once a model has been loaded (and its import is over)."""
    module = sys.modules.get("decoder.compiled")
    return module if hasattr(module, "CompiledRunner") else None
