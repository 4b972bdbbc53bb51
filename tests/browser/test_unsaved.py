"""Runs that the database refused, as a person meets them: try again, download, or find the file after the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from storage import open_store
from tests.browser.conftest import Server, Visitor, free_port, start, stop, visit

pytestmark = pytest.mark.browser


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Server]:
    port, db = free_port(), tmp_path / "runs.db"
    (tmp_path / "refuse").touch()
    made = start(tmp_path, ["-m", "tests.browser.refusing_app", str(port), str(db)], port, db)
    yield made
    if made.process.poll() is None:
        stop(made)


@pytest.fixture
def guest(chromium: Browser, refusing: Server) -> Iterator[Visitor]:
    yield from visit(chromium, refusing.url)


def downloaded(page: Page, row: str) -> int:
    """How many runs the row's download holds."""
    with page.expect_download() as waiting:
        page.locator(f"{row} button", has_text="Download").click()
    return len(json.loads(Path(waiting.value.path()).read_text())["runs"])


def test_save_again_and_the_file_after_the_end(guest: Visitor, refusing: Server) -> None:
    folder = refusing.db.parent
    page = guest.open()
    page.fill("#rl-prompt textarea", "Refused at first")
    page.click("#rl-run")
    note = page.locator("#rl-note")
    expect(note).to_contain_text("could not be saved", timeout=60_000)
    assert downloaded(page, "#rl-unsaved") == 2
    page.locator("#rl-unsaved button", has_text="save again").click()
    expect(note).to_contain_text("Still not saved")
    (folder / "refuse").unlink()
    page.locator("#rl-unsaved button", has_text="save again").click()
    expect(note).to_contain_text("Saved")
    expect(page.locator("#rl-unsaved")).to_be_hidden()
    with open_store(f"sqlite:///{refusing.db}") as store:
        rows = store.summaries().rows
    assert len(rows) == 2
    assert sum(row.speedup is not None for row in rows) == 1

    (folder / "refuse").touch()
    guest.tab("Compare")
    page.fill("#rl-lengths textarea, #rl-lengths input", "2")
    page.click("#rl-run-lengths")
    progress = page.locator("#rl-compare-progress")
    expect(progress).to_contain_text("not every run could be saved", ignore_case=True, timeout=60_000)
    expect(page.locator("#rl-compare-unsaved")).to_be_visible()
    assert downloaded(page, "#rl-compare-unsaved") == 2
    page.locator("#rl-compare-unsaved button", has_text="save again").click()
    expect(progress).to_contain_text("Still not saved")

    page.goto("about:blank")
    stop(refusing)
    (file,) = folder.glob("redline-unsaved-*.json")
    assert str(file) in refusing.log.read_text()
    with open_store(f"sqlite:///{refusing.db}") as store:
        assert len(store.import_json(file.read_bytes())) == 2
