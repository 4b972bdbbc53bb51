"""``python -m decoder bench``: the flags, and what goes to stdout. Nothing heavy is imported before they are sound."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from decoder.bench.plan import BenchPlan, parse_numbers, parse_peer
from decoder.bench.suites import SUITES
from decoder.catalog import DEFAULT_TARGET
from decoder.errors import RequestError
from decoder.request import PROPOSERS


def bench(
    target: Annotated[str, typer.Option(help="A catalog name, Hugging Face id, folder or .gguf.")] = DEFAULT_TARGET,
    draft: Annotated[str | None, typer.Option(help="Draft model (default: one that is here and fits).")] = None,
    suite: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SUITES)}; may be repeated.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts per suite.")] = 3,
    tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Times that everything is measured.")] = 2,
    k: Annotated[str, typer.Option("-k", "--k", help="Draft lengths, with commas.")] = "1,2,4,8",
    proposer: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PROPOSERS)}; may be repeated.")] = None,
    exit_layer: Annotated[int, typer.Option(help="Layers of early exit, ours and transformers' (0: 8).")] = 0,
    transformers: Annotated[bool, typer.Option(help="Measure transformers' generate as well.")] = True,
    peer: Annotated[list[str] | None, typer.Option(help="vllm=PYTHON or llamacpp=SERVER; may be repeated.")] = None,
    batch: Annotated[str, typer.Option(help="Requests that decode together, with commas; 0: no such table.")] = (
        "1,2,4,8,16,32"
    ),
    memory: Annotated[int, typer.Option(help="Compare memory after 5 runs and after this many (0: do not).")] = 0,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Time nothing: compare acceptance per position with the peer vllm.")
    ] = False,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Random models built in memory: needs none.")] = False,
    shapes: Annotated[str, typer.Option(help="Shapes of --synthetic, with commas: 1b, 8b, tiny.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="The shortest bench that shows every part.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Keep the JSON here (default: the user's cache, by date).")] = None,
    show: Annotated[Path | None, typer.Option(help="Measure nothing: print a bench that was kept.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, nothing else.")] = False,
) -> None:
    """Measure proposers and draft lengths against plain decoding, transformers and other engines."""
    plan = BenchPlan(
        target=target,
        draft=draft,
        suites=tuple(dict.fromkeys(suite or SUITES)),
        prompts=prompts,
        tokens=tokens,
        repeats=repeats,
        ks=tuple(sorted(parse_numbers("-k", k))),
        proposers=tuple(dict.fromkeys(proposer or PROPOSERS)),
        exit_layer=exit_layer,
        transformers=transformers,
        peers=tuple(parse_peer(text) for text in peer or ()),
        batch=parse_numbers("--batch", batch),
        memory=memory,
        dtype=dtype,
        device=device,
        synthetic=synthetic,
        shapes=tuple(dict.fromkeys(name.strip() for name in shapes.split(",") if name.strip())),
    )
    plan.validate()
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise RequestError(f"unknown dtype {dtype!r}: auto, float32, bfloat16 or float16")
    if out is not None and out.is_dir():
        raise RequestError(f"--out {out} is a folder: give a file")

    if acceptance:
        _acceptance(plan, as_json)
        return
    from decoder.bench import result as results
    from decoder.bench import tables

    if show is not None:
        found = results.read(show)
    else:
        from decoder.bench.run import run_bench
        from decoder.cli import err

        # A peer's server is stopped on the way out, whichever way that is.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        bar, report = still_bar(err)
        try:
            with bar:
                found = run_bench(plan.quick() if quick else plan, report)
        finally:
            signal.signal(signal.SIGTERM, before)
        path = results.save(found, out)
        err.print(f"kept in {path}", soft_wrap=True)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False, allow_nan=False))
    elif markdown:
        print(tables.markdown(found), end="")
    else:
        tables.print_bench(found)


def _acceptance(plan: BenchPlan, as_json: bool) -> None:
    """Our counts beside a real vLLM's, for every method that both have."""
    from decoder import loading
    from decoder.bench.acceptance import compare_acceptance, markdown
    from decoder.bench.run import cases_of
    from decoder.cli import err

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bar, report = still_bar(err)
    try:
        with bar:
            loaded = loading.load(plan.target, plan.dtype, plan.device, report)
            found = compare_acceptance(plan, cases_of(plan, loaded), report)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps([c.to_json() for c in found], allow_nan=False) if as_json else markdown(found), end="\n"[:as_json])


def still_bar(console: Console) -> tuple[Progress, Callable[[float, str], None]]:
    """A progress bar that is drawn only when something is reported, which is never while something is measured."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True, auto_refresh=False)
    task = bar.add_task("starting", total=1.0)
    return bar, lambda fraction, message: bar.update(task, completed=fraction, description=message, refresh=True)
