"""Does the page slow the engine down? The same run in the browser and on the command line, in turns. Needs Chromium.

.venv/bin/python docs/measure_page.py [--repeats 5] [--tokens 128] [--proposer none]

Both decode greedily with the same model and settings; tokens per second are what the engine measured of decoding. The
command line is one process that decodes several times, as the page's server is. Prints the median of the ratios with
its spread, and frames per second while the run is scrubbed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import httpx
import typer

from docs.take_screenshots import FLAGS

PROMPT = "Explain in a few paragraphs how bread is made, from the grain to the loaf."
PORT = 7898
WORKER = """
import json, sys
from decoder.engine import SpeculativeDecoder
from decoder.request import GenerationRequest
request = GenerationRequest(**json.loads(sys.argv[1]))
decoder = SpeculativeDecoder.load(request)
decoder.warm_up(request)
for line in sys.stdin:
    run = decoder.run(request)
    found = {"tokens": run.metrics["num_decode_tokens"], "ms": run.decode_ms, "path": run.versions.get("target_path")}
    print(json.dumps(found), flush=True)
"""


class CommandLine:
    """A process that decodes once for every line it reads."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(request)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class BrowserPage:
    """The page in Chromium; every run is read back from the database."""

    def __init__(self, browser: Any, db: Path, proposer: str, tokens: int) -> None:
        self.db = db
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.goto(f"http://127.0.0.1:{PORT}")
        self.page.wait_for_function("window.RedlineShell && window.RedlineShell.isOpen()", timeout=60_000)
        self.page.wait_for_function(
            "document.querySelector('#rl-status') && document.querySelector('#rl-status').innerText.includes('bf16')",
            timeout=300_000,
        )
        self.page.fill("#rl-prompt textarea", PROMPT)
        self.page.fill("#rl-max-tokens input", str(tokens))
        self.page.locator("#rl-max-tokens input").blur()
        self.page.uncheck("#rl-baseline input")
        from decoder import catalog

        title = next(entry.title for entry in catalog.proposers() if entry.name == proposer)
        self.page.click("#rl-proposer .rl-pick-button")
        self.page.locator("#rl-proposer").get_by_role("option", name=title).first.click()

    def run(self) -> dict[str, Any]:
        from storage import open_store

        with open_store(f"sqlite:///{self.db}") as store:
            before = store.summaries().total
        self.page.click("#rl-run")
        self.page.wait_for_function("!document.querySelector('#rl-stop').disabled", timeout=60_000)
        self.page.wait_for_function("!document.querySelector('#rl-run').disabled", timeout=600_000)
        for _ in range(100):
            with open_store(f"sqlite:///{self.db}") as store:
                if store.summaries().total > before:
                    run = store.get_run(store.summaries().rows[0].id).run
                    if run.finish_reason is not None:
                        break
            time.sleep(0.1)
        return {
            "tokens": run.metrics["num_decode_tokens"], "ms": run.decode_ms, "path": run.versions.get("target_path"),
            "steps": len(run.steps),
        }  # fmt: skip

    def scrub(self) -> float:
        """Frames per second while the replay is dragged from end to end by keys."""
        self.page.locator("#rl-ladder .rl-sel, #rl-answer .rl-sel, #rl-answer .rl-chip").first.focus()
        self.page.evaluate(
            "() => { window.frames_ = []; const tick = t => { window.frames_.push(t); requestAnimationFrame(tick); };"
            " requestAnimationFrame(tick); }"
        )
        for _ in range(120):
            self.page.keyboard.press("ArrowRight")
        marks = self.page.evaluate("() => window.frames_")
        gaps = [b - a for a, b in itertools.pairwise(marks)]
        return 1000 / statistics.median(gaps) if gaps else 0.0


def main(repeats: int = 5, tokens: int = 128, proposer: str = "none", k: int = 4) -> None:
    """Measure and print."""
    from playwright.sync_api import sync_playwright

    request = {"prompt": PROMPT, "proposer": proposer, "k": k, "max_new_tokens": tokens}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    url = f"http://127.0.0.1:{PORT}"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        db = Path(folder) / "runs.db"
        server = subprocess.Popen([sys.executable, "app.py", "--port", str(PORT), "--db", f"sqlite:///{db}"], cwd=ROOT)
        line = CommandLine(request)
        try:
            for _ in range(600):
                try:
                    if httpx.get(url, trust_env=False, timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.3)
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = BrowserPage(browser, db, proposer, tokens)
            page.run()
            line.run()
            ours: dict[str, list[float]] = {"browser": [], "command line": []}
            paths = set()
            for turn in range(repeats):
                sides = [("browser", page), ("command line", line)]
                for name, side in sides if turn % 2 == 0 else reversed(sides):
                    found = side.run()
                    paths.add((name, found["path"]))
                    ours[name].append(1000 * found["tokens"] / found["ms"])
            for name, rates in ours.items():
                print(f"{name}: median {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})")
            ratios = [a / b for a, b in zip(ours["browser"], ours["command line"], strict=True)]
            print(f"browser / command line: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
            print("paths:", ", ".join(f"{name} {path}" for name, path in sorted(paths)))
            print(f"scrubbing: {page.scrub():.0f} frames per second")
            browser.close()
        finally:
            line.close()
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)


if __name__ == "__main__":
    typer.run(main)
