"""A real server in a process of its own, with a database of its own, and a page that reports every problem."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
expect.set_options(timeout=20_000)  # a busy machine takes long; nothing here is timed

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KNOWN_NOISE = ("[svelte-i18n]", "AbortError")
"""What Gradio's own scripts print: a warning on every page, and a note when a page is left while it still listens."""


@dataclass
class Server:
    """A running Redline. ``db`` is the path of its database."""

    url: str
    db: Path
    process: subprocess.Popen[str]
    log: Path


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, command: list[str], port: int, db: Path) -> Server:
    """Start a server and wait until its page answers."""
    log = folder / "server.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT, text=True
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at once:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(url, trust_env=False, timeout=5).status_code in (200, 401):
                return Server(url, db, process, log)
        except httpx.HTTPError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"the server did not answer:\n{log.read_text()[-4000:]}")


def stop(server: Server) -> None:
    """End the server as a person would."""
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait(timeout=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The page with the engine that needs no model."""
    folder = tmp_path_factory.mktemp("redline")
    port, db = free_port(), folder / "runs.db"
    made = start(folder, ["-m", "tests.browser.fake_app", str(port), f"sqlite:///{db}"], port, db)
    yield made
    stop(made)
    text = made.log.read_text()
    # One test asks for a file that nobody uploaded; Gradio prints its refusal.
    assert text.count("Traceback") == text.count("exceptions.InvalidPathError"), text[-4000:]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser a module: other modules start Playwright too, and it cannot run twice at a time."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Visitor:
    """One browser page, and everything that went wrong on it."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> Page:
        """Go to ``path`` and wait until the page has read its address."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector("#rl-tabs", timeout=60_000)
        self.page.wait_for_function("window.RedlineShell && window.RedlineShell.isOpen()", timeout=60_000)
        return self.page

    def tab(self, name: str) -> None:
        """Choose a tab by its title."""
        self.page.get_by_role("tab", name=name).click()


def visit(browser: Browser, url: str, **context: Any) -> Iterator[Visitor]:
    """A visitor whose console errors and foreign requests fail the test at its end."""
    options = {"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **context}
    session = browser.new_context(**options)
    visitor = Visitor(session.new_page(), url)
    page = visitor.page
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: visitor.problems.append(str(error)))
    page.on(
        "console",
        lambda m: (
            visitor.problems.append(f"{m.type}: {m.text}")
            if m.type in ("error", "warning") and not m.text.startswith(KNOWN_NOISE)
            else None
        ),
    )
    page.on(
        "request",
        lambda r: None if r.url.startswith((url, "data:", "blob:")) else visitor.foreign.append(r.url),
    )
    yield visitor
    session.close()
    assert visitor.problems == []
    assert visitor.foreign == []


@pytest.fixture
def visitor(chromium: Browser, server: Server) -> Iterator[Visitor]:
    """A visitor of the page with the fake engine."""
    yield from visit(chromium, server.url)
