"""Does the page slow the engine down? The same run in the browser and on the command line, in turns. Needs Chromium.

.venv/bin/python docs/measure_page.py [--repeats 5] [--tokens 128] [--proposer none]

Both decode greedily with the same model and settings; tokens per second are what the engine measured of decoding. The
command line is one process that decodes several times, as the page's server is. Prints the median of the ratios with
its spread, how long a stored run of 2,000 tokens takes to appear, and the time between two pictures while it is
scrubbed.
"""

from __future__ import annotations

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
        self.page.wait_for_function("!document.querySelector('#rl-stop').disabled", timeout=60_000, polling=200)
        self.page.wait_for_function("!document.querySelector('#rl-run').disabled", timeout=600_000, polling=200)
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

    def scrub(self, moves: int = 120) -> tuple[float, float]:
        """The slider of the run is dragged from end to end in so many moves, one for each picture that is drawn.

        Returns (median, 95th percentile) milliseconds between two pictures.
        """
        gaps: list[float] = self.page.evaluate(
            """(moves) => new Promise((done) => {
                const slider = document.querySelector("input[aria-label='Step of the run']");
                const gaps = []; let last = 0, made = 0;
                const frame = (now) => {
                    if (last) gaps.push(now - last);
                    last = now;
                    if (made++ >= moves) return done(gaps);
                    slider.value = String(Math.round((slider.max * (moves - made)) / moves));
                    slider.dispatchEvent(new Event("input", { bubbles: true }));
                    requestAnimationFrame(frame);
                };
                requestAnimationFrame(frame);
            })""",
            moves,
        )
        gaps.sort()
        return statistics.median(gaps), gaps[int(0.95 * (len(gaps) - 1))]

    def show(self, run: str, steps: int) -> float:
        """Seconds until a stored run is drawn: from asking for its address to the last step in the ladder."""
        begin = time.monotonic()
        self.page.goto(f"http://127.0.0.1:{PORT}/?run={run}")
        self.page.wait_for_function(
            f"Number(document.querySelector(\"input[aria-label='Step of the run']\")?.max) >= {steps}", timeout=120_000
        )
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - begin


def store_long(db: Path, tokens: int) -> tuple[str, int]:
    """Decode a run of so many tokens into the database; (its id, its steps)."""
    from decoder.engine import SpeculativeDecoder
    from decoder.request import GenerationRequest
    from storage import open_store

    request = GenerationRequest(
        PROMPT, proposer="draft-model", draft="smollm2-draft", k=4, max_new_tokens=tokens, ignore_eos=True
    )
    run = SpeculativeDecoder.load(request).run(request)
    with open_store(f"sqlite:///{db}") as store:
        begun = run.replace(steps=(), output_ids=(), text="", finish_reason=None, decode_ms=0.0, metrics={})
        store.start_run(begun, author="bench", name="a long run", tags=()).finish(run)
    return run.id, len(run.steps) - 1


def main(repeats: int = 5, tokens: int = 128, proposer: str = "none", k: int = 4, long: int = 2000) -> None:
    """Measure and print."""
    from playwright.sync_api import sync_playwright

    request = {"prompt": PROMPT, "proposer": proposer, "k": k, "max_new_tokens": tokens}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    url = f"http://127.0.0.1:{PORT}"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        db = Path(folder) / "runs.db"
        long_run, steps = store_long(db, long)
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
            for words, shown in (("the run on the page", None), (f"a run of {long} tokens", long_run)):
                drawn = f"drawn after {page.show(shown, steps):.1f} s, " if shown else ""
                middle, most = page.scrub()
                print(f"{words}: {drawn}scrubbed with {middle:.0f} ms between pictures (95 % below {most:.0f} ms)")
            browser.close()
        finally:
            line.close()
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)


if __name__ == "__main__":
    typer.run(main)
