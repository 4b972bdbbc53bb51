"""From a request to a decoder: load the target, load or build what the proposer needs, refuse what does not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from decoder import catalog, compat, draft_vocabulary, kernel, loading
from decoder.assemble_heads import with_head
from decoder.compiled import CompiledRunner, model_steps
from decoder.engine import SpeculativeDecoder, Target
from decoder.errors import IncompatibleError, ModelError
from decoder.fused import FusedRunner, Weights, why_not
from decoder.graphs import graph_runner
from decoder.heads.layout import HEADS
from decoder.kernel_runner import KernelRunner, KernelSet
from decoder.linear import pack_all
from decoder.loading import LoadedModel, Progress, silent
from decoder.proposers import Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.proposers.other_vocabulary import OtherVocabularyProposer, way
from decoder.proposers.prediction import PredictionProposer
from decoder.proposers.suffix import SuffixProposer
from decoder.reading import reading
from decoder.request import GenerationRequest
from decoder.steps import DRAFT_WIDTHS, EXIT_WIDTHS, TARGET_WIDTHS
from decoder.target import ModelRunner, RowRunner

_runners: dict[tuple[int, str], tuple[LoadedModel, RowRunner]] = {}
_weights: dict[tuple[int, bool], tuple[LoadedModel, Weights]] = {}
"""By model, and whether it scores a part of its vocabulary."""
_lock = threading.Lock()


def new_runner(loaded: LoadedModel, widths: Sequence[int] = TARGET_WIDTHS, role: str = "target") -> RowRunner:
    """A runner with a cache of its own: the lean path where the model's layers allow it, else transformers' own.

    On the CPU it takes the kernel once it is built; where there can be none, compiled steps of these ``widths`` (tokens
    per pass). A draft scores what its folder says (``draft_vocabulary``).
    """
    if why_not(loaded.model):
        return ModelRunner(loaded.model, context=loaded.context, device=loaded.device)
    scored = draft_vocabulary.read(loaded.folder, loaded.vocab_size) if role == "draft" else None
    key = (id(loaded), scored is not None)
    if key not in _weights:
        scored = None if scored is None else scored.to(loaded.device)
        _weights[key] = (loaded, Weights(loaded.model, scored))
        pack_all(_weights[key][1])
    weights = _weights[key][1]
    recorded = graph_runner(weights, context=loaded.context, device=loaded.device)
    if recorded is not None:
        return recorded
    if loaded.device == "cpu" and kernel.why_not(weights) is None:
        held = KernelSet(weights, loaded.dtype, loaded.context, loaded.name)
        return KernelRunner(weights, held, lambda layers: held, context=loaded.context, device=loaded.device)
    if loaded.device == "cpu":
        return CompiledRunner(
            weights,
            model_steps(loaded, widths),
            lambda layers: model_steps(loaded, EXIT_WIDTHS, layers),
            context=loaded.context,
            device=loaded.device,
        )
    return FusedRunner(weights, context=loaded.context, device=loaded.device)


def _path_note(role: str, loaded: LoadedModel, runner: RowRunner) -> dict[str, str]:
    """For the record of a run: why a model does not run on the fastest path, or how far compiled steps reach."""
    if isinstance(runner, CompiledRunner) and not runner.path_note():
        return {f"{role}_compiled_width": str(max(runner.steps.steps)), f"{role}_compiled_context": str(runner.reach)}
    say = getattr(runner, "path_note", None)
    note = why_not(loaded.model) if isinstance(runner, ModelRunner) else say() if say else None
    return {f"{role}_path_note": note} if note else {}


def _forget_unloaded() -> None:
    """Let go of what belongs to models that ``loading`` no longer keeps."""
    kept = {id(model) for model in loading.in_memory()}
    for key in [key for key in _runners if key[0] not in kept]:
        del _runners[key]
    for held in [held for held in _weights if held[0] not in kept]:
        del _weights[held]


def runner_of(loaded: LoadedModel, role: str = "target") -> RowRunner:
    """The runner of a loaded model as target or draft: a model may be both, with a cache for each. Its cache is reused
    by every run of this process, one at a time."""
    with _lock:
        _forget_unloaded()
        key = (id(loaded), role)
        if key not in _runners:
            widths = TARGET_WIDTHS if role == "target" else DRAFT_WIDTHS
            _runners[key] = (loaded, new_runner(loaded, widths, role))
        return _runners[key][1]


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
        **_path_note("target", loaded, runner),
        **reading(loaded),
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
    proposer = _proposer(request, target, runner, layers)
    drafting = _path_note("draft", loaded, proposer.runner) if isinstance(proposer, EarlyExitProposer) else {}
    return SpeculativeDecoder(target, proposer, versions=drafting)


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
    pairing = compat.pairing(request.target, name)
    if not pairing.fits:
        raise IncompatibleError(f"{name} does not fit {request.target}: {'; '.join(pairing.misfit)}")
    loaded = loading.load(name, target.dtype, target.runner.device, report, role="draft")
    runner = runner_of(loaded, "draft")
    versions = {
        "draft_family": loaded.family,
        "draft_revision": loaded.revision,
        "draft_implementation": type(loaded.model).__name__,
        "draft_fingerprint": loaded.fingerprint,
        **_path_note("draft", loaded, runner),
    }
    scored = runner.weights.scored if isinstance(runner, FusedRunner) else None
    if scored is not None:
        versions["draft_scores"] = draft_vocabulary.words(len(scored), loaded.vocab_size)
    proposer: Proposer = DraftModelProposer(runner)
    if pairing.across:
        proposer = OtherVocabularyProposer(runner, compat.shared_vocabulary(request.target, name))
        versions["draft_vocabulary"] = f"{pairing.across}; {way(request)}"
    return SpeculativeDecoder(target, proposer, draft=name, versions=versions)
