"""The decoder of a proposer that drafts with a head of the target: find the head, refuse what does not fit, load it."""

from __future__ import annotations

from decoder import catalog, draft_vocabulary, loading
from decoder.engine import SpeculativeDecoder, Target
from decoder.errors import ModelError
from decoder.fused import why_not
from decoder.heads.expect import TargetFacts
from decoder.heads.files import HeadFiles, open_files
from decoder.heads.layout import Layout, find_layout, require
from decoder.heads.load import borrow, load_head
from decoder.heads.models import MedusaHeads, RecurrentHead
from decoder.heads.native import load_native
from decoder.heads.runner import HeadRunner
from decoder.kernel_runner import give_layers
from decoder.linear import pack_all
from decoder.loading import LoadedModel, Progress
from decoder.proposers.base import Proposer
from decoder.proposers.heads import HeadProposer, MedusaProposer
from decoder.request import GenerationRequest

_kept: dict[tuple[str, str, int], tuple[LoadedModel, RecurrentHead | MedusaHeads]] = {}
KEPT = 4
"""Heads that stay in memory at once."""


def with_head(request: GenerationRequest, target: Target, loaded: LoadedModel, report: Progress) -> SpeculativeDecoder:
    """A head that was named must fit; one that was not is looked for, or done without.

    Raises ModelError and IncompatibleError with one sentence.
    """
    if request.draft:
        return _named(request.draft, request, target, loaded, report)
    problems = []
    if request.proposer == "mtp":
        try:
            return _named(request.target, request, target, loaded, report, own=True)
        except ModelError as error:
            problems.append(str(error))
    for entry in catalog.drafts_for(request.proposer):
        if not entry.present or entry.fits not in (None, request.target):
            continue
        try:
            return _named(entry.name, request, target, loaded, report)
        except ModelError as error:
            problems.append(str(error))
    missing = f"no {request.proposer} head that is here was made for {request.target}"
    return SpeculativeDecoder(target, None, not_speculating="; ".join([*problems, missing]))


def _named(
    name: str,
    request: GenerationRequest,
    target: Target,
    loaded: LoadedModel,
    report: Progress,
    *,
    own: bool = False,
) -> SpeculativeDecoder:
    report(0.0, f"loading {name}")
    own = own or name == request.target
    files = open_files(name, role="target" if own else "draft")
    layout = _own_layer(files, request) if own else require(name, request.proposer, files.config, files.shapes)
    native = own and not (layout.style == "mimo" or why_not(loaded.model) is None)
    key = (name, layout.proposer, id(loaded))
    if key not in _kept:
        _make_room()
        borrowed = borrow(loaded.model)
        if native:
            _kept[key] = loaded, load_native(name, loaded.model, layout, borrowed)
        else:
            part = files.inside("mtp.", "model.mtp_layers.") if own else files
            facts = TargetFacts.of_config(loaded.name, loaded.model.config)
            head = load_head(part, layout, facts, borrowed)
            if isinstance(head, RecurrentHead) and head.ids is None and not own:
                ids = draft_vocabulary.read(files.folder, facts.vocab_size)
                if ids is not None:
                    head.score_only(ids.to(loaded.device))
            pack_all(head)
            if loaded.device == "cpu":
                give_layers(head, loaded.dtype)
            _kept[key] = loaded, head
    head = _kept[key][1]
    versions = {
        "draft_family": layout.proposer,
        "draft_revision": files.revision,
        "draft_implementation": type(head).__name__,
        "draft_layout": layout.style,
    }
    if isinstance(head, RecurrentHead) and head.ids is not None:
        versions["draft_scores"] = draft_vocabulary.words(len(head.ids), loaded.vocab_size)
    if files.folder is not None and not own:
        versions["draft_fingerprint"] = loading.folder_fingerprint(files.folder)
    report(1.0, f"{name} is ready")
    return SpeculativeDecoder(target, _proposer(layout, head, target), draft=name, versions=versions)


def _make_room() -> None:
    """Let go of heads whose target ``loading`` no longer keeps, and of the oldest."""
    alive = {id(model) for model in loading.in_memory()}
    for key in [key for key in _kept if key[2] not in alive]:
        del _kept[key]
    while len(_kept) >= KEPT:
        del _kept[next(iter(_kept))]


def _proposer(layout: Layout, head: RecurrentHead | MedusaHeads, target: Target) -> Proposer:
    runner = target.runner
    if isinstance(head, MedusaHeads):
        return MedusaProposer(head, device=runner.device, logits_device=runner.logits_device)
    return HeadProposer(
        layout.proposer,
        HeadRunner(head, vocab_size=runner.vocab_size, device=runner.device, logits_device=runner.logits_device),
    )


def _own_layer(files: HeadFiles, request: GenerationRequest) -> Layout:
    """The MTP layer inside the target's own checkpoint. Raises ModelError where there is none."""
    layout = find_layout(files.config, files.shapes)
    if request.proposer != "mtp" or layout is None or layout.proposer != "mtp":
        raise ModelError(
            f"{request.target} has no MTP layer of its own: its checkpoint holds no mtp.*, model.mtp_layers.* or "
            "eh_proj tensors"
            if request.proposer == "mtp"
            else f"{request.target} is no head for itself: {request.proposer} needs a head that was trained for it"
        )
    return layout
