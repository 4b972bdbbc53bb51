"""Takes the pictures of docs/screenshots and records the example run of the first page. Needs Chromium.

.venv/bin/python docs/take_screenshots.py             # pictures of every tab, light and dark, 1280 and 400 px wide
.venv/bin/python docs/take_screenshots.py --example   # decode assets/examples/01-first-run.json again
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import httpx
import typer

from decoder.metrics import speedup
from decoder.request import GenerationRequest, SamplingParams
from decoder.trace import Run

PORT = 7899
OUT = ROOT / "docs" / "screenshots"
EXAMPLE = ROOT / "assets" / "examples" / "01-first-run.json"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def decode(request: GenerationRequest, repeats: int = 1) -> tuple[Run, Run]:
    """A run and its baseline, both warmed up, in one process. Of ``repeats`` pairs, the one of median speed-up."""
    from decoder.engine import SpeculativeDecoder

    plain = request.baseline()
    base_decoder, decoder = SpeculativeDecoder.load(plain), SpeculativeDecoder.load(request)
    for _ in range(2):
        base_decoder.warm_up(plain)
        decoder.warm_up(request)
    pairs = [(decoder.run(request), base_decoder.run(plain)) for _ in range(repeats)]
    pairs.sort(key=lambda pair: speedup(*pair) or 0.0)
    run, base = pairs[len(pairs) // 2]
    return run.replace(baseline_id=base.id), base


def requests() -> list[tuple[str, GenerationRequest]]:
    """What fills the History of the pictures; the first is the example."""
    from playground.example_prompts import EXAMPLES

    chat, code, edit = EXAMPLES[0].prompt, EXAMPLES[1].prompt, EXAMPLES[2]
    warm = SamplingParams(temperature=0.7, seed=1)
    first = GenerationRequest(
        code, proposer="draft-model", draft="smollm2-draft", k=4, max_new_tokens=96, sampling=warm
    )
    return [
        ("Fibonacci, sampled", first),
        ("Fibonacci, k = 2", first.replace(k=2)),
        ("Why the sky is blue", first.replace(prompt=chat)),
        ("Rename a class", first.replace(
            prompt=edit.prompt, proposer="ngram", draft=None, sampling=SamplingParams(), max_new_tokens=120
        )),
        ("Rename a class, predicted", first.replace(
            prompt=edit.prompt, proposer="prediction", draft=None, sampling=SamplingParams(), max_new_tokens=120,
            prediction=edit.settings["prediction"], k=8,
        )),
        ("Early exit", first.replace(prompt=chat, proposer="early-exit", draft=None, max_new_tokens=48)),
        ("Fibonacci, EAGLE-3", first.replace(proposer="eagle3", draft="smollm2-eagle3", k=2)),
        ("Fibonacci, MTP", first.replace(proposer="mtp", draft="smollm2-mtp", k=2)),
        ("Fibonacci, Medusa", first.replace(proposer="medusa", draft="smollm2-medusa", k=2)),
    ]  # fmt: skip


def fill(db: Path) -> list[str]:
    """Decode everything into a database; returns run ids, the example's first, then its baseline's."""
    from storage import open_store

    ids = []
    with open_store(f"sqlite:///{db}") as store:
        for name, request in requests():
            run, base = decode(request)
            for kept, title, tags in ((base, f"{name}: baseline", ("baseline",)), (run, name, (request.proposer,))):
                store.start_run(kept.replace(steps=(), output_ids=(), text="", finish_reason=None, decode_ms=0.0,
                                             metrics={}), author="ada", name=title, tags=tags).finish(kept)  # fmt: skip
            store.link_baseline(run.id, base.id)
            ids += [run.id, base.id]
    return ids


def shoot(ids: list[str], db: Path) -> None:
    """Serve ``db`` and take the pictures."""
    from playwright.sync_api import sync_playwright

    url = f"http://127.0.0.1:{PORT}"
    server = subprocess.Popen([sys.executable, "app.py", "--port", str(PORT), "--db", f"sqlite:///{db}"], cwd=ROOT)
    try:
        for _ in range(300):
            try:
                if httpx.get(url, trust_env=False, timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.3)
        else:
            raise SystemExit("the server did not answer")
        pages = {
            "playground": f"/?run={ids[0]}&step=1&token=3",
            "compare": f"/?compare={','.join([ids[1], ids[2], *ids[12::2]])}",
            "history": "/?tab=history",
            "picker": "/",
        }
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            for theme in ("light", "dark"):
                for width, height in ((1280, 900), (400, 860)):
                    context = browser.new_context(
                        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
                    )
                    page = context.new_page()
                    for name, address in pages.items():
                        page.goto(url + address)
                        page.wait_for_timeout(5000)
                        if name == "picker":
                            page.click("#rl-proposer .rl-pick-button")
                            page.wait_for_timeout(1500)
                        suffix = "" if width == 1280 else f"-{width}"
                        page.screenshot(
                            path=OUT / f"{name}-{theme}{suffix}.png", full_page=name not in ("history", "picker")
                        )
                    context.close()
            browser.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def main(example: bool = False) -> None:
    """Take the pictures, or record the example."""
    if example:
        run, base = decode(requests()[0][1], repeats=5)
        EXAMPLE.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"run": run.to_json(), "baseline": base.to_json()}, ensure_ascii=False, allow_nan=False)
        EXAMPLE.write_text(text + "\n", encoding="utf-8")
        print(f"{EXAMPLE}: {len(run.steps)} steps, mean acceptance length {run.metrics['mean_acceptance_length']:.2f}")
        return
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "pictures.db"
        shoot(fill(db), db)


if __name__ == "__main__":
    typer.run(main)
