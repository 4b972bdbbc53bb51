"""The real page with an engine that needs no model, for browser tests: ``python -m tests.browser.fake_app PORT DB``.

A prompt that holds "slow" is decoded slowly, so that a test can stop it. Further arguments name a password file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from decoder.catalog import DEFAULT_TARGET
from decoder.request import GenerationRequest
from playground.auth import read_password_file
from playground.command_line import run_server
from tests.playground.fake_engine import FakeEngine, FakeStream, fake_load


class PacedEngine(FakeEngine):
    """Slow where the prompt asks for it."""

    def stream(self, request: GenerationRequest) -> FakeStream:
        self.delay = 0.25 if "slow" in request.prompt else 0.004
        return super().stream(request)


load = fake_load(PacedEngine())


if __name__ == "__main__":
    port, db, *rest = sys.argv[1:]
    users = read_password_file(Path(rest[0])) if rest else None
    run_server("127.0.0.1", int(port), db, DEFAULT_TARGET, users, load=load)
