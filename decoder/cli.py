"""The command line of the decoder. stdout carries results only; progress and errors go to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from decoder import cache, catalog
from decoder.bench.command import bench
from decoder.compile_command import cache_line, compile_now
from decoder.errors import RequestError
from decoder.request import DRAFT_LENGTHS, PROPOSERS, TREES, GenerationRequest, SamplingParams
from decoder.terminal import run_typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Speculative decoding on the command line: decode, list models, measure, check that nothing is lost.",
    pretty_exceptions_enable=False,
)
err = Console(stderr=True, highlight=False)
app.command()(bench)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def train(context: typer.Context) -> None:
    """Train drafts: write rows (data), train (eagle3, mtp, medusa, draft-model), export."""
    from decoder.training.command import app as training  # imports torch

    raise typer.Exit(run_typer(training, context.args, "python -m decoder train"))


def main(argv: list[str] | None = None) -> None:
    """Run the command line; errors that a person can mend exit with 2 and one line."""
    raise SystemExit(run_typer(app, argv, "python -m decoder"))


def read_prompt(text: str) -> str:
    """``@FILE`` reads a file, anything else is the prompt itself."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"the prompt file {path} is not UTF-8 text") from None
    except OSError as error:
        raise RequestError(f"cannot read the prompt file {path}: {error.strerror or error}") from None


def read_output(path: Path, request: GenerationRequest) -> list[int]:
    """The output ids of a run of the same target that ``--json`` wrote."""
    from decoder.trace import Run

    if request.proposer != "suffix":
        raise RequestError("--earlier-run is only for --proposer suffix")
    try:
        run = Run.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(f"cannot read the earlier run {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RequestError(f"{path} is not a run that --json wrote: {error}") from None
    if run.target != request.target:
        raise RequestError(f"{path} is a run of {run.target}, whose token ids may mean other words here")
    return list(run.output_ids)


def parse_bias(pairs: list[str]) -> tuple[tuple[int, float], ...]:
    """``ID:BIAS`` pairs."""
    found = []
    for pair in pairs:
        token, _, bias = pair.partition(":")
        try:
            found.append((int(token), float(bias)))
        except ValueError:
            raise RequestError(f"--logit-bias takes ID:BIAS, for example 42:-5, not {pair!r}") from None
    return tuple(found)


def progress_bar() -> tuple[Progress, Callable[[float, str], None]]:
    """A bar on stderr and the callback that moves it."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), console=err, transient=True)
    task = bar.add_task("starting", total=1.0)
    return bar, lambda fraction, message: bar.update(task, completed=fraction, description=message)


@app.command()
def run(
    prompt: Annotated[str, typer.Option(help="The prompt, or @FILE to read it from a file.")],
    target: Annotated[str, typer.Option(help="A catalog name, Hugging Face id, folder or .gguf.")] = "smollm2-135m",
    proposer: Annotated[str, typer.Option(help=f"Who drafts: {', '.join(PROPOSERS)}.")] = "none",
    draft: Annotated[str | None, typer.Option(help="Draft model or head (default: one that fits).")] = None,
    k: Annotated[int, typer.Option("-k", "--k", help="Draft length in tokens, or the most of them.")] = 4,
    draft_length: Annotated[
        str, typer.Option(help=f"Who decides how many of them to draft: {', '.join(DRAFT_LENGTHS)}.")
    ] = "fixed",
    confidence: Annotated[float, typer.Option(help="Stop drafting below this probability (confidence).")] = 0.4,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID:BIAS, may be repeated.")] = None,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, may be repeated.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="Stop token id, may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end token.")] = False,
    system: Annotated[str | None, typer.Option(help='System prompt ("" for an empty one).')] = None,
    tree: Annotated[str, typer.Option(help=f"What a head drafts: {', '.join(TREES)}; k is a tree's depth.")] = "chain",
    tree_nodes: Annotated[int, typer.Option(help="Most tokens in a tree.")] = 16,
    tree_width: Annotated[int, typer.Option(help="Most tokens that follow one token of a tree.")] = 4,
    ngram_min: Annotated[int, typer.Option(help="Shortest n-gram to look up.")] = 1,
    ngram_max: Annotated[int, typer.Option(help="Longest n-gram to look up.")] = 4,
    suffix_depth: Annotated[int, typer.Option(help="suffix: match and draft together, at most.")] = 24,
    suffix_factor: Annotated[float, typer.Option(help="suffix: draft tokens per matched token, at most.")] = 1.0,
    suffix_min_prob: Annotated[float, typer.Option(help="suffix: least probability of a drafted token.")] = 0.1,
    earlier_run: Annotated[
        list[Path] | None, typer.Option(help="suffix: also draft from this run (a file that --json wrote); repeat.")
    ] = None,
    prediction: Annotated[str | None, typer.Option(help="Expected text (or @FILE) for prediction.")] = None,
    exit_layer: Annotated[int, typer.Option(help="Layers to draft with in early-exit (0: a quarter).")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="Also decode plainly and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The Run (schema 1) on stdout, nothing else.")] = False,
) -> None:
    """Decode one prompt and show what became of the drafts."""
    request = GenerationRequest(
        prompt=read_prompt(prompt),
        chat=not raw,
        system_prompt=system,
        target=target,
        proposer=proposer,
        draft=draft,
        k=k,
        draft_length=draft_length,
        confidence=confidence,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_bias(logit_bias or []),
            seed=seed,
        ),
        stop=tuple(stop or ()),
        stop_ids=tuple(stop_id or ()),
        ignore_eos=ignore_eos,
        tree=tree,
        tree_nodes=tree_nodes,
        tree_width=tree_width,
        ngram_min=ngram_min,
        ngram_max=ngram_max,
        suffix_depth=suffix_depth,
        suffix_factor=suffix_factor,
        suffix_min_prob=suffix_min_prob,
        suffix_earlier=bool(earlier_run),
        prediction=None if prediction is None else read_prompt(prediction),
        exit_layer=exit_layer,
        dtype=dtype,
        device=device,
    )
    request.validate()
    from decoder.report import print_run

    result, base = _decode(request, baseline, [read_output(path, request) for path in earlier_run or ()])
    for role in ("target", "draft"):
        note = result.versions.get(f"{role}_path_note")
        if note and "switched off" not in note:  # whoever did that knows
            err.print(f"the {role} ran {result.versions.get(f'{role}_path', 'eagerly')}: {note}", soft_wrap=True)
    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        print_run(result, base)
    if result.error:
        raise RequestError(result.error)
    if result.finish_reason == "cancelled":
        raise typer.Exit(130)


def _decode(request: GenerationRequest, baseline: bool, earlier: list[list[int]]) -> tuple[Any, Any]:
    from decoder.engine import SpeculativeDecoder

    bar, report = progress_bar()
    with bar:
        decoder = SpeculativeDecoder.load(request, report)
        decoder.remember(earlier)
        base = None
        if baseline:
            report(0.0, "decoding the baseline")
            plain = request.baseline()
            base_decoder = SpeculativeDecoder.load(plain, report)
            base_decoder.warm_up(plain)
            base = base_decoder.run(plain)
            report(0.5, "warming up")
            decoder.warm_up(request)
        stream = decoder.stream(request)
        tokens = 0
        try:
            for step in stream:
                tokens += len(step.emitted)
                report(tokens / request.max_new_tokens, f"decoding, step {step.index}")
        except KeyboardInterrupt:
            stream.close()
    return stream.run, base


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="The catalog as JSON.")] = False,
    target: Annotated[
        str | None, typer.Option(help="Say for every draft whether it fits this target, and how or why not.")
    ] = None,
    prepare: Annotated[str | None, typer.Option(help="Convert or download this model now.")] = None,
    compile_: Annotated[
        str | None, typer.Option("--compile", help="Compile this model's steps for this machine (minutes, once).")
    ] = None,
    role: Annotated[str, typer.Option(help="Compile it as target or as draft (default: what the catalog says).")] = "",
    layers: Annotated[int, typer.Option(help="Compile its first layers only, for early exit with so many.")] = 0,
    dtype: Annotated[str, typer.Option(help="Compile it in auto, float32, bfloat16 or float16.")] = "auto",
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Delete all compiled steps.")] = False,
) -> None:
    """List the models: name, kind, licence, present or how to get them."""
    if prepare:
        from decoder.loading import locate

        bar, report = progress_bar()
        with bar:
            place = locate(prepare, report)
        err.print(f"{prepare} is ready ({place.where})")
        return
    if compile_:
        compile_now(compile_, role, layers, dtype, err)
        return
    if clear_cache:
        print(f"{cache.clear_compiled() / 1e6:,.0f} MB of compiled steps deleted")
        return
    entries = [*catalog.targets(), *catalog.drafts()]
    verdicts = {}
    if target:
        from decoder import compat

        with err.status(f"reading what drafts for {target}"):
            verdicts = {e.name: compat.verdict(target, e) for e in entries if e.kind == "draft"}
    if as_json:
        rows = [
            {
                "name": e.name,
                "kind": e.kind,
                "proposer": e.proposer if e.kind == "draft" else None,
                "family": e.family,
                "licence": e.licence,
                "size_mb": e.size_mb,
                "present": e.present,
                "how_to_get": e.how_to_get,
                "fits": e.fits,
                "note": e.note,
                "verdict": verdicts.get(e.name),
            }
            for e in entries
        ]
        print(json.dumps(rows, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "kind", "fits", "licence", "MB", "here"):
        table.add_column(title, justify="right" if title == "MB" else "left")
    for e in entries:
        kind = e.kind if e.kind == "target" else e.proposer
        fits = (e.fits or "").split("/")[-1]
        table.add_row(e.name, kind, fits, e.licence, f"{e.size_mb:,}", "yes" if e.present else e.how_to_get)
    Console().print(table)
    plain = Console(highlight=False, soft_wrap=True)
    for name, verdict in verdicts.items():
        plain.print(f"{name}: {verdict}", markup=False)
    plain.print(f"{cache_line()} (models --clear-cache deletes them)")


@app.command()
def audit(
    target: Annotated[str, typer.Option(help="A catalog name, Hugging Face id, folder or .gguf.")] = "smollm2-135m",
    proposer: Annotated[list[str] | None, typer.Option(help="Check only this one; may be repeated.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model (default: one that fits, else the target).")] = None,
    k: Annotated[int, typer.Option("-k", "--k", help="Draft length in tokens.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens per prompt of the greedy check.")] = 200,
    prompts: Annotated[int, typer.Option(help="How many of the eight prompts to use.")] = 8,
    samples: Annotated[int, typer.Option(help="Sampled runs per proposer.")] = 400,
    seed: int = 0,
    dtype: Annotated[str, typer.Option(help="float32 is exact; bfloat16 reports near-ties.")] = "float32",
    device: str = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON.")] = False,
) -> None:
    """Check that speculation loses nothing: greedy token for token, sampled by a chi-square test."""
    from decoder.audit import AuditPlan, run_audit
    from decoder.report import print_audit

    plan = AuditPlan(
        target=target,
        proposers=tuple(proposer or ()),
        draft=draft,
        k=k,
        tokens=tokens,
        prompts=prompts,
        samples=samples,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    bar, report = progress_bar()
    with bar:
        result = run_audit(plan, report)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        print_audit(result)
    if not result.passed:
        raise typer.Exit(1)
