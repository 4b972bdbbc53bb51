"""A fresh database for each test, and who to be when the test has to be somebody without rights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import Store, open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/redline.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url, busy_timeout=5) as opened:
        yield opened
