"""From a request to a decoder: load the target, load or build what the proposer needs, refuse what does not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from decoder import catalog, compat, loading
from decoder.assemble_heads import with_head
from decoder.compiled import CompiledRunner, compiled_steps
from decoder.engine import SpeculativeDecoder, Target
from decoder.errors import IncompatibleError, ModelError
from decoder.fused import FusedRunner, Weights, why_not
from decoder.graphs import graph_runner
from decoder.heads.layout import HEADS
from decoder.loading import LoadedModel, Progress, silent
from decoder.proposers import Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.proposers.prediction import PredictionProposer
from decoder.proposers.suffix import SuffixProposer
from decoder.request import GenerationRequest
from decoder.target import ModelRunner, RowRunner

_runners: dict[int, tuple[LoadedModel, RowRunner]] = {}
_weights: dict[int, tuple[LoadedModel, Weights]] = {}
_lock = threading.Lock()


def new_runner(loaded: LoadedModel) -> RowRunner:
    """A runner with a cache of its own: the lean path where the model's layers allow it, else transformers' own."""
    if why_not(loaded.model):
        return ModelRunner(loaded.model, context=loaded.context, device=loaded.device)
    if id(loaded) not in _weights:
        _weights[id(loaded)] = (loaded, Weights(loaded.model))
    weights = _weights[id(loaded)][1]
    recorded = graph_runner(weights, context=loaded.context, device=loaded.device)
    if recorded is not None:
        return recorded
    steps = compiled_steps(loaded)
    if steps:
        return CompiledRunner(weights, steps, context=loaded.context, device=loaded.device)
    return FusedRunner(weights, context=loaded.context, device=loaded.device)


def _forget_unloaded() -> None:
    """Let go of what belongs to models that ``loading`` no longer keeps."""
    kept = {id(model) for model in loading.in_memory()}
    for known in (_runners, _weights):
        for key in [key for key in known if key not in kept]:
            del known[key]


def runner_of(loaded: LoadedModel, *, own: bool = False) -> RowRunner:
    """The runner of a loaded model; its cache is reused by every run of this process, one at a time.

    ``own`` makes a separate one, for a model that drafts for itself.
    """
    with _lock:
        _forget_unloaded()
        if own:
            return new_runner(loaded)
        if id(loaded) not in _runners:
            _runners[id(loaded)] = (loaded, new_runner(loaded))
        return _runners[id(loaded)][1]


def assemble(request: GenerationRequest, progress: Callable[[float, str], None] | None = None) -> SpeculativeDecoder:
    """Load what ``request`` names and put the decoder together. Raises RequestError, ModelError, IncompatibleError."""
    request.validate()
    report: Progress = progress or silent
    both = request.proposer == "draft-model" or request.proposer in HEADS
    loaded = loading.load(
        request.target, request.dtype, request.device, lambda f, m: report(f * (0.7 if both else 1.0), m)
    )
    runner = runner_of(loaded)
    versions = {
        "target_family": loaded.family,
        "target_revision": loaded.revision,
        "target_implementation": type(loaded.model).__name__,
        "target_path": runner.path,
    }
    target = Target(
        runner=runner,
        tokenizer=loaded.tokenizer,
        name=loaded.name,
        eos_ids=loaded.eos_ids,
        dtype=loaded.dtype,
        fingerprint=loaded.fingerprint,
        versions=versions,
        context_note=loaded.context_note,
    )
    if request.proposer in HEADS:
        return with_head(request, target, loaded, lambda f, m: report(0.7 + 0.3 * f, m))
    if both:
        return _with_draft(request, target, lambda f, m: report(0.7 + 0.3 * f, m))
    layers = int(loaded.model.config.get_text_config().num_hidden_layers)
    return SpeculativeDecoder(target, _proposer(request, target, runner, layers))


def _proposer(request: GenerationRequest, target: Target, runner: RowRunner, layers: int) -> Proposer | None:
    if request.proposer == "ngram":
        return NgramProposer()
    if request.proposer == "suffix":
        return SuffixProposer()
    if request.proposer == "prediction":
        tokenizer = target.tokenizer
        return PredictionProposer(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    if request.proposer == "early-exit":
        return EarlyExitProposer(runner, layers, request.exit_layer)
    return None


def _with_draft(request: GenerationRequest, target: Target, report: Progress) -> SpeculativeDecoder:
    """The draft-model decoder. A draft that was named must fit; one that was not is looked for, or done without."""
    if request.draft:
        return _with_named_draft(request.draft, request, target, report)
    problems = []
    for entry in catalog.drafts_for("draft-model"):
        if not entry.present or entry.fits not in (None, request.target):
            continue
        try:
            return _with_named_draft(entry.name, request, target, report)
        except ModelError as error:
            problems.append(str(error))
    reason = problems[0] if problems else f"no draft that is here was made for {request.target}"
    return SpeculativeDecoder(target, None, not_speculating=reason)


def _with_named_draft(name: str, request: GenerationRequest, target: Target, report: Progress) -> SpeculativeDecoder:
    head = compat.head_layout(name)
    if head is not None:
        raise IncompatibleError(f"{name} is {head.title}, no model of its own: choose the proposer {head.proposer}")
    reasons = compat.check_pair(request.target, name)
    if reasons:
        raise IncompatibleError(f"{name} does not fit {request.target}: {'; '.join(reasons)}")
    loaded = loading.load(name, target.dtype, target.runner.device, report, role="draft")
    # A model that drafts for itself needs a cache of its own.
    runner = runner_of(loaded, own=name == request.target)
    versions = {
        "draft_family": loaded.family,
        "draft_revision": loaded.revision,
        "draft_implementation": type(loaded.model).__name__,
        "draft_fingerprint": loaded.fingerprint,
    }
    return SpeculativeDecoder(target, DraftModelProposer(runner), draft=name, versions=versions)
