"""The page says which path a run took, why it was not the fastest, and how far it was from the floor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Server, Visitor, free_port, start, stop, visit
from tests.browser.test_pages import run, run_id

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A page whose last compiled step is built behind its first runs."""
    folder = tmp_path_factory.mktemp("compiling")
    port, db = free_port(), folder / "runs.db"
    before = os.environ.pop("REDLINE_COMPILE", None)
    try:
        command = ["-m", "tests.browser.compiling_app", str(port), f"sqlite:///{db}", str(folder / "step")]
        made = start(folder, command, port, db)
    finally:
        if before is not None:
            os.environ["REDLINE_COMPILE"] = before
    yield made
    stop(made)
    assert "Traceback" not in made.log.read_text()


@pytest.fixture
def guest(chromium: Browser, compiling: Server) -> Iterator[Visitor]:
    yield from visit(chromium, compiling.url)


@pytest.fixture(params=["light", "dark"])
def narrow(chromium: Browser, compiling: Server, request: pytest.FixtureRequest) -> Iterator[Visitor]:
    yield from visit(chromium, compiling.url, viewport={"width": 400, "height": 800}, color_scheme=str(request.param))


def test_the_path_is_said_and_changes_between_runs(guest: Visitor, tmp_path: Path) -> None:
    page = guest.open()
    status = page.locator("#rl-status")
    expect(status).to_contain_text("eager, fused", timeout=30_000)
    expect(status).to_contain_text("4 of 5 steps ready")
    run(page, "Why is the sky blue?")
    machine = page.locator("#rl-numbers .rl-machine")
    expect(machine).to_contain_text("This run was eager, fused: compiling in the background, 4 of 5 steps ready.")
    # What the sentence says is what was measured: milliseconds per token over the time of one reading.
    found = re.search(r"([\d.]+)\sms per token, ([\d.]+) times .*once \(([\d.]+)\sms\)", machine.inner_text())
    assert found
    each, times, floor = (float(group) for group in found.groups())
    assert floor == 9.6
    assert times == pytest.approx(each / floor, abs=0.06)
    measured = page.evaluate("Redline.store.state.end.metrics.ms_per_token")
    assert each == pytest.approx(measured, abs=0.06)
    steps = page.evaluate(
        "Redline.store.state.rows.filter((r) => r.index > 0)"
        ".map((r) => [r.step.draft_ms + r.step.verify_ms + r.step.overhead_ms, r.step.emitted.length])"
    )
    assert measured == pytest.approx(sum(ms for ms, _ in steps) / sum(n for _, n in steps))
    run(page, "Now compile it")
    expect(machine).to_contain_text("This run was eager, fused")
    expect(status).to_contain_text("compiled", timeout=60_000)
    expect(status).not_to_contain_text("4 of 5")
    run(page, "Why is the sky blue?")
    expect(machine).to_contain_text("This run was compiled.")
    # A stored run still says it.
    run_id(page)
    other = page.context.new_page()
    other.goto(page.url)
    machine = other.locator("#rl-numbers .rl-machine")
    expect(machine).to_contain_text("This run was compiled.", timeout=60_000)
    expect(machine).to_contain_text("the time it takes to read the weights once")


def test_the_kernel_is_named(guest: Visitor) -> None:
    page = guest.open()
    run(page, "What is a kernel?")
    machine = page.locator("#rl-numbers .rl-machine")
    expect(machine).to_contain_text("This run used the compiled kernel. Its draft used the compiled kernel.")


def test_a_run_without_these_records_says_nothing_of_them(visitor: Visitor) -> None:
    page = visitor.open()
    run(page, "Why is the sky blue?")
    expect(page.locator("#rl-numbers .rl-machine")).to_be_hidden()


def test_it_fits_on_a_narrow_page(narrow: Visitor) -> None:
    page = narrow.open()
    run(page, "Why is the sky blue?")
    expect(page.locator("#rl-numbers .rl-machine")).to_contain_text("This run was")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
