"""From a checked checkpoint to a head: every tensor that its layout names, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoder.errors import IncompatibleError, ModelError
from decoder.heads import fit
from decoder.heads.expect import TargetFacts, eagle3_settings, medusa_shape
from decoder.heads.files import HeadFiles
from decoder.heads.layout import Layout
from decoder.heads.models import Borrowed, Eagle3Head, EagleHead, MedusaHeads, MtpHead, RecurrentHead
from decoder.heads.names import canonical
from decoder.heads.sizes import read_sizes

_IDS = ("d2t", "t2d", "token_map")


def borrow(model: Any) -> Borrowed:
    """What a head uses of a transformers model. Raises ModelError where its embedding is more than a table."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or head is None:
        raise ModelError(f"draft heads need a plain embedding and an output head; this is {type(embedding).__name__}")
    layers = int(model.config.get_text_config().num_hidden_layers)
    # Detached: the same memory, but no parameters of the head.
    bias = None if head.bias is None else head.bias.detach()
    return Borrowed(embedding.weight.detach(), head.weight.detach(), bias, layers)


def load_head(files: HeadFiles, layout: Layout, target: TargetFacts, borrowed: Borrowed) -> RecurrentHead | MedusaHeads:
    """Build the head on the target's device and in its dtype. Raises IncompatibleError when it does not fit."""
    reasons = fit.problems(files, layout, target)
    if reasons:
        raise IncompatibleError(f"{files.name} does not fit {target.name}: {'; '.join(reasons)}")
    if not files.shapes:
        raise ModelError(f"the draft {files.name} has no weights here")
    names = canonical(files.shapes, layout)
    like = borrowed.embedding
    read = files.tensors(names.values())
    tensors: dict[str, Tensor] = {}
    for name, own in names.items():
        tensor = read[own]
        tensors[name] = tensor.to(like.device, torch.long if name in _IDS else like.dtype)
    tensors.pop("t2d", None)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and embedding.shape == like.shape and torch.equal(embedding, like):
        del tensors["embed_tokens.weight"]  # the target's own, stored once more
    with torch.inference_mode(False), torch.no_grad():
        if layout.proposer == "medusa":
            shape = medusa_shape({name: tuple(t.shape) for name, t in tensors.items()}, files.config)
            return MedusaHeads(tensors, shape, borrowed).eval()
        sizes = read_sizes(files.name, files.config)
        if layout.proposer == "eagle3":
            return Eagle3Head(tensors, sizes, eagle3_settings(files.config, sizes, target), borrowed).eval()
        if layout.proposer == "eagle":
            return EagleHead(tensors, sizes, borrowed).eval()
        return MtpHead(tensors, sizes, layout.style, borrowed).eval()
