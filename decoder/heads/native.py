"""The MTP layer inside a target's own checkpoint, for architectures whose layers are not plain Llama ones.

transformers builds it from the target's own layer class (latent attention, experts, gated attention, ...) and knows how
the checkpoint names its weights: DeepSeek-V3 (``model.layers.{N}.*``), GLM-4.5, Qwen3-Next (``mtp.*``) and others. The
drafting, with a cache that can be rolled back, is ours. Of several MTP layers the first drafts every token, as in vLLM.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from decoder.errors import ModelError
from decoder.heads.layout import Layout
from decoder.heads.models import Borrowed, RecurrentHead
from decoder.kv_cache import KVCache


class NativeHead(RecurrentHead):
    """``layer``: transformers' MtpLayer, whose output behind its last norm is scored and fed back."""

    def __init__(self, layer: Any, rotary: Any, borrowed: Borrowed, *, hidden: int, context: int) -> None:
        super().__init__()
        self.borrowed, self.hidden, self.depth, self.context = borrowed, hidden, 1, context
        self.capture = (borrowed.layers,)
        self.layer, self.rotary, self.head = layer, rotary, borrowed.scorer()

    def run(
        self, ids: Tensor, states: Tensor, positions: Tensor, end: int, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        embedded = F.embedding(ids, self.borrowed.embedding)
        result: Tensor = self.layer(
            embedded,
            states,
            position_embeddings=self.rotary(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            cache=cache.cache,
        )
        return result

    def score(self, out: Tensor) -> Tensor:
        logits: Tensor = self.head(out)
        return logits


def load_native(name: str, model: Any, layout: Layout, borrowed: Borrowed) -> NativeHead:
    """Read the first MTP layer of ``model``'s own checkpoint. Raises ModelError where transformers cannot."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise ModelError(f"the MTP layer of {name} needs transformers 5.24 or newer") from None
    text = model.config.get_text_config()
    layer_names = rf"^model\.layers\.{text.num_hidden_layers}\." if layout.style == "deepseek" else r"^mtp\."
    # The real model stays as it is: transformers reads these off it.
    described = copy.copy(model)
    described.config = copy.deepcopy(model.config)
    settings = described.config.get_text_config()
    settings.num_mtp_layers = 1
    if getattr(settings, "layer_types", None) is not None and getattr(settings, "mtp_layer_types", None) is None:
        settings.mtp_layer_types = ["full_attention"]
    described._keys_to_ignore_on_load_unexpected = [layer_names]
    try:
        mtp = MtpModel.from_pretrained(described, device_map={"": borrowed.embedding.device})
    except Exception as error:  # transformers raises nearly everything for what it cannot read
        raise ModelError(f"the MTP layer of {name} cannot be loaded: {str(error).splitlines()[0][:240]}") from error
    layer = mtp.layers[0]
    if mtp.rotary_emb is None or mtp.has_per_layer_rope or not mtp.use_post_norm:
        raise ModelError(f"the MTP layer of {name} has positions or norms that Redline does not compute")
    layer.eval().requires_grad_(False)
    context = int(getattr(text, "max_position_embeddings", 0) or 2048)
    return NativeHead(layer, mtp.rotary_emb, borrowed, hidden=int(text.hidden_size), context=context)
