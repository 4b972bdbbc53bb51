"""``python -m decoder train``: write rows, train drafts on them, and ship what came out."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from decoder.errors import ModelError, RequestError

app = typer.Typer(
    no_args_is_help=True,
    help="Train drafts for a target: write its own conversations, train on them, export. Everything can be stopped and "
    "resumed with the same command.",
)
err = Console(stderr=True, highlight=False)

Rows_ = Annotated[Path, typer.Option(help="Rows that the target wrote (.npz of `train data`).")]
Target_ = Annotated[str, typer.Option(help="The target: a name of `models`, a local folder or a Hugging Face id.")]
Out = Annotated[Path, typer.Option(help="Folder for checkpoints, learning curve and best weights.")]
Prefix = Annotated[int, typer.Option(help="Ids at the start of each row that carry no information.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]
Threads = Annotated[int, typer.Option(help="CPU threads (0: torch's choice).")]


def say(text: str) -> None:
    """Progress: to stderr, a line at a time."""
    err.print(text, markup=False, soft_wrap=True)


def load_target(name: str, device: str, threads: int) -> Any:
    """The target (a LoadedModel) in bf16. A mistyped name is refused before anything is written."""
    import torch

    from decoder.loading import load

    if threads:
        torch.set_num_threads(threads)
    return load(name, dtype="bfloat16", device=device, progress=lambda fraction, text: None)


@app.command("data")
def data(
    out: Annotated[Path, typer.Option(help="File of rows to write (.npz).")],
    target: Target_ = "smollm2-135m",
    rows: Annotated[int, typer.Option(min=1, help="Rows to write.")] = 1024,
    length: Annotated[int, typer.Option(min=64, help="Tokens per row.")] = 384,
    batch: Annotated[int, typer.Option(min=1, help="Rows that decode together.")] = 128,
    seed: int = 0,
    openings: Annotated[
        Path | None, typer.Option(help="Text file: each line begins a first message, drawn for each row.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON list of whole first messages, one a row (`train prompts` writes one), instead."),
    ] = None,
    join: Annotated[list[Path] | None, typer.Option(help="Older files of rows, put before the new ones.")] = None,
    stop_after: Annotated[int | None, typer.Option(help="Leave after this many batches.")] = None,
    device: Device = "auto",
    threads: Threads = 0,
) -> None:
    """Write conversations of TARGET with itself: what every draft here learns from."""
    from decoder.training.data import DataPlan, extend, find_turns, generate

    lines: tuple[str, ...] = ()
    if openings is not None:
        try:
            lines = tuple(line for line in openings.read_text(encoding="utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read the openings {openings}: {error}") from None
    messages: tuple[str, ...] = ()
    if prompts is not None:
        try:
            messages = tuple(map(str, json.loads(prompts.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read the prompts {prompts}: {error}") from None
        if lines or len(messages) < rows:
            reason = (
                "openings go without prompts" if lines else f"there are {len(messages):,} prompts for {rows:,} rows"
            )
            raise RequestError(f"cannot write these rows: {reason}")
    loaded = load_target(target, device, threads)
    plan = DataPlan(rows, length, batch, seed, lines, messages)
    fresh = out.with_suffix(".new.npz") if join else out
    made = generate(
        _runner(loaded), loaded.tokenizer, plan, fresh, target=loaded.fingerprint, stop_after=stop_after,
        progress=lambda n, of, rate: say(f"rows {n:,}/{of:,}, {rate:,.0f} tokens/s"),
    )  # fmt: skip
    if join:
        made = extend(out, [*join, fresh], len(find_turns(loaded.tokenizer).prefix))
    typer.echo(json.dumps({"rows": made, "file": str(out)}))


def _runner(loaded: Any) -> Any:
    """A runner on the fastest path that takes batches of any size."""
    from decoder.assemble import new_runner

    runner = new_runner(loaded)
    settle = getattr(getattr(runner, "steps", None), "settle", None)
    if settle is not None:
        settle()
    return runner


@app.command("prompts")
def prompts(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Messages to write.")] = 4096,
    seed: int = 0,
    passages: Annotated[
        Path | None, typer.Option(help="Older rows (.npz): half of what is to be summarised are answers from these.")
    ] = None,
    target: Target_ = "smollm2-135m",
) -> None:
    """Write messages for `train data --prompts`: questions, tasks in code, texts to summarise."""
    from decoder.training.prompts import passages_of, write_prompts

    texts: list[str] = []
    if passages is not None:
        from decoder.training.data import answers_of, find_turns
        from decoder.training.rows import load_rows

        tokenizer = load_target(target, "cpu", 0).tokenizer
        turns = find_turns(tokenizer)
        rows = load_rows(passages, len(turns.prefix))
        answers = answers_of(rows.tokens[rows.part("train")], turns)
        texts = passages_of(tokenizer.batch_decode(answers))
        say(f"{len(texts):,} passages from {len(answers):,} answers")
    try:
        written = write_prompts(count, seed, texts)
    except ValueError as error:
        raise RequestError(str(error)) from None
    out.write_text(json.dumps(written, ensure_ascii=False, indent=0), encoding="utf-8")


def _head(
    kind: str, rows: Path, target: str, out: Path, prefix: int, features: Path | None, options: dict[str, Any],
    eval_every: int, eval_rows: int, stop_after: int | None, device: str, threads: int, start: Path | None,
) -> None:  # fmt: skip
    import torch

    from decoder.training.features import FeatureCache, eagle3_layers
    from decoder.training.head_models import HEADS
    from decoder.training.heads import HeadPlan, Material, draft_vocabulary, save_vocabulary, start_from, train
    from decoder.training.rows import load_rows

    loaded = load_target(target, device, threads)
    model, material_rows = loaded.model, load_rows(rows, prefix)
    text = model.config.get_text_config()
    layers = int(text.num_hidden_layers)
    if model.config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ModelError(f"heads are trained for Llama-shaped targets; {target} is {model.config.model_type}")
    cache = FeatureCache.open(
        features or out / "features", material_rows,
        target=loaded.fingerprint, layers=[*eagle3_layers(layers), layers], hidden=int(text.hidden_size),
    )  # fmt: skip
    plan = HeadPlan(kind=kind, **options)
    vocabulary = draft_vocabulary(material_rows, int(text.vocab_size), plan.vocabulary)
    torch.manual_seed(plan.seed)
    head = HEADS[kind](text, model, vocabulary)
    head.warm_start(model, vocabulary)
    about = asdict(plan) | {"rows": material_rows.digest, "prefix": prefix, "target": loaded.fingerprint}
    if start is not None:
        kept = start_from(head, start, vocabulary, plan.unroll)
        say(f"starts from {start}, which drafts {kept:,} of these {len(vocabulary):,} ids")
        about["start"] = str(start)
    head = head.to(model.device)
    out.mkdir(parents=True, exist_ok=True)
    _same_plan(out / "plan.json", about)
    save_vocabulary(out, vocabulary)
    say(f"{kind}: {sum(p.numel() for p in head.parameters()):,} parameters")
    train(
        head, Material(material_rows, model, cache), plan, vocabulary, out,
        eval_every=eval_every, eval_rows=eval_rows, stop_after=stop_after, say=say,
    )  # fmt: skip
    typer.echo(json.dumps({"trained": kind, "folder": str(out)}))


def _same_plan(path: Path, about: dict[str, Any]) -> None:
    """Keep the plan, or refuse to go on with another one from the same checkpoints."""
    if path.is_file():
        found = json.loads(path.read_text())
        differ = [key for key in about if found.get(key) != about[key]]
        if differ:
            words = ", ".join(f"{key} {found.get(key)} instead of {about[key]}" for key in differ)
            raise ModelError(f"{path.parent} was begun with another plan ({words}): choose another --out")
    path.write_text(json.dumps(about))


Steps = Annotated[int, typer.Option(min=1, help="Steps of the whole schedule.")]
Batch = Annotated[int, typer.Option(min=1, help="Rows per step.")]
Vocabulary_ = Annotated[int, typer.Option(min=16, help="Most frequent ids: the draft vocabulary.")]
Features = Annotated[Path | None, typer.Option(help="Folder of the target's states (default: OUT/features).")]
Start = Annotated[Path | None, typer.Option(help="Folder of an earlier run of this kind: begin with its best weights.")]
EvalEvery = Annotated[int, typer.Option(min=1)]
EvalRows = Annotated[int, typer.Option(min=1, help="Validation rows of each evaluation.")]
StopAfter = Annotated[int | None, typer.Option(help="Leave after this many steps; run again to go on.")]


@app.command("eagle3")
def eagle3(
    rows: Rows_, out: Out, target: Target_ = "smollm2-135m", steps: Steps = 2600, batch: Batch = 8,
    unroll: Annotated[int, typer.Option(min=1, help="Draft positions unrolled in training.")] = 3,
    vocabulary: Vocabulary_ = 8192, lr: float = 2e-3, head_lr: float = 1e-3, seed: int = 0,
    features: Features = None, eval_every: EvalEvery = 200, eval_rows: EvalRows = 48, stop_after: StopAfter = None,
    prefix: Prefix = 24, device: Device = "auto", threads: Threads = 0, start: Start = None,
) -> None:  # fmt: skip
    """An EAGLE-3 head: three inner states of the target, a draft vocabulary, training-time test."""
    options = {
        "steps": steps, "batch": batch, "unroll": unroll, "vocabulary": vocabulary, "lr": lr, "head_lr": head_lr,
        "seed": seed,
    }  # fmt: skip
    _head(
        "eagle3", rows, target, out, prefix, features, options,
        eval_every, eval_rows, stop_after, device, threads, start,
    )  # fmt: skip


@app.command("mtp")
def mtp(
    rows: Rows_, out: Out, target: Target_ = "smollm2-135m", steps: Steps = 800, batch: Batch = 8,
    unroll: Annotated[int, typer.Option(min=1, help="Draft positions unrolled in training.")] = 3,
    vocabulary: Vocabulary_ = 8192,
    sample: Annotated[int, typer.Option(min=0, help="Rarer ids drawn for each step.")] = 1024,
    lr: float = 2e-3, head_lr: float = 1e-3, seed: int = 0,
    features: Features = None, eval_every: EvalEvery = 200, eval_rows: EvalRows = 48, stop_after: StopAfter = None,
    prefix: Prefix = 24, device: Device = "auto", threads: Threads = 0, start: Start = None,
) -> None:  # fmt: skip
    """One extra layer on the last hidden state, with the target's embeddings and head."""
    options = {
        "steps": steps, "batch": batch, "unroll": unroll, "vocabulary": vocabulary, "sample": sample, "lr": lr,
        "head_lr": head_lr, "seed": seed,
    }  # fmt: skip
    _head(
        "mtp", rows, target, out, prefix, features, options,
        eval_every, eval_rows, stop_after, device, threads, start,
    )  # fmt: skip


@app.command("medusa")
def medusa(
    rows: Rows_, out: Out, target: Target_ = "smollm2-135m", steps: Steps = 800, batch: Batch = 8,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads: draft positions.")] = 4,
    vocabulary: Vocabulary_ = 8192, lr: float = 2e-3, head_lr: float = 1e-3, seed: int = 0,
    features: Features = None, eval_every: EvalEvery = 200, eval_rows: EvalRows = 48, stop_after: StopAfter = None,
    prefix: Prefix = 24, device: Device = "auto", threads: Threads = 0, start: Start = None,
) -> None:  # fmt: skip
    """Medusa heads: each foretells one position from the target's last state."""
    options = {
        "steps": steps, "batch": batch, "unroll": heads, "vocabulary": vocabulary, "lr": lr, "head_lr": head_lr,
        "seed": seed,
    }  # fmt: skip
    _head(
        "medusa", rows, target, out, prefix, features, options,
        eval_every, eval_rows, stop_after, device, threads, start,
    )  # fmt: skip


@app.command("average")
def average(
    first: Annotated[Path, typer.Option(help="Folder of the run that the other one started from.")],
    second: Annotated[Path, typer.Option(help="Folder of the run that went on from it.")],
    out: Annotated[Path, typer.Option(help="Folder of the mean, to be exported.")],
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the second's weights.")] = 0.7,
) -> None:
    """The mean of two runs' weights: often better than both on the rows of both."""
    from decoder.training.average import average as mix

    mix(first, second, share, out)
    typer.echo(json.dumps({"folder": str(out), "share": share}))


@app.command("export")
def export(
    run: Annotated[Path, typer.Option(help="Folder that `train eagle3`, `mtp` or `medusa` wrote.")],
    rows: Rows_,
    out: Annotated[Path, typer.Option(help="Folder of the head; its last part is the head's name.")],
    target: Target_ = "smollm2-135m",
    target_name: Annotated[str, typer.Option(help="The target's name on the card.")] = "SmolLM2-135M-Instruct",
    base_model: Annotated[str, typer.Option(help="Its Hugging Face id.")] = "HuggingFaceTB/SmolLM2-135M-Instruct",
    k: Annotated[int, typer.Option(min=1)] = 4,
    features: Features = None,
    note: Annotated[str, typer.Option(help="Sentence for the card on acceptance with real prompts.")] = "",
    device: Device = "auto",
    threads: Threads = 0,
) -> None:
    """Ship the best weights of a head's training RUN: public layout, card, held-out acceptance on the test rows."""
    from decoder.training.checkpoint import load_weights
    from decoder.training.curve import read_curve
    from decoder.training.export_head import export_head
    from decoder.training.features import FeatureCache, eagle3_layers
    from decoder.training.head_models import HEADS
    from decoder.training.heads import HeadPlan, Material, draft_vocabulary, evaluate_head
    from decoder.training.rows import load_rows

    about = json.loads((run / "plan.json").read_text())
    plan = HeadPlan(**{field.name: about[field.name] for field in fields(HeadPlan)})
    loaded = load_target(target, device, threads)
    text = loaded.model.config.get_text_config()
    layers = int(text.num_hidden_layers)
    material_rows = load_rows(rows, about["prefix"])
    if material_rows.digest != about["rows"]:
        raise ModelError(f"{rows} is not the file of rows that {run} was trained on")
    cache = FeatureCache.open(
        features or run / "features", material_rows,
        target=loaded.fingerprint, layers=[*eagle3_layers(layers), layers], hidden=int(text.hidden_size),
    )  # fmt: skip
    vocabulary = draft_vocabulary(material_rows, int(text.vocab_size), plan.vocabulary)
    head = HEADS[plan.kind](text, loaded.model, vocabulary)
    load_weights(run / "best.safetensors", head)
    head = head.to(loaded.model.device)
    material = Material(material_rows, loaded.model, cache)
    test = evaluate_head(head, material, vocabulary, material_rows.part("test"), k=k)
    size = export_head(
        plan.kind, head, vocabulary, text, plan, material_rows, read_curve(run / "curve.jsonl"), test, out,
        target_name=target_name, base_model=base_model, note=note, started="start" in about,
        averaged=about.get("averaged"),
    )  # fmt: skip
    typer.echo(json.dumps({"folder": str(out), "bytes": size} | test.to_json()))


def _mount() -> None:
    """The draft model's own commands, made before this one."""
    from decoder.training.draft_model import main as train_draft_model
    from decoder.training.export import main as export_draft_model

    app.command("draft-model")(train_draft_model)
    app.command("export-draft-model")(export_draft_model)


_mount()
