"""The page with a database that refuses runs while a file ``refuse`` lies beside it: ``PORT DB``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from decoder.catalog import DEFAULT_TARGET
from playground import saving
from playground.command_line import run_server
from storage import StorageError, Store
from tests.browser.fake_app import load

_start_run = Store.start_run


def start_run(self: Store, *args: Any, **kwargs: Any) -> Any:
    """As ``Store.start_run``, unless it shall refuse."""
    if Path("refuse").exists():
        raise StorageError("the database is locked")
    return _start_run(self, *args, **kwargs)


if __name__ == "__main__":
    port, db = sys.argv[1:]
    os.chdir(Path(db).parent)
    saving.FINAL_TRIES_S = (0.0, 0.1)
    Store.start_run = start_run  # type: ignore[method-assign]
    run_server("127.0.0.1", int(port), f"sqlite:///{db}", DEFAULT_TARGET, None, load=load)
