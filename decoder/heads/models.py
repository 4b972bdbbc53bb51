"""The forward of each head, from tensors that ``fit`` has checked. Embeddings and, where it has none, the output head
are the target's own tensors, never copies.

Entry p of a head reads the token at p + 1 and a state at p, and foretells the token at p + 2. The state is the target's
for committed text, and the head's own output for what it drafts on from there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.heads.expect import Eagle3Settings, MedusaShape
from decoder.heads.layer import HeadLayer, Output, Rope, frozen, norm
from decoder.heads.sizes import Sizes
from decoder.kv_cache import KVCache
from decoder.linear import Linear

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Borrowed:
    """What a head uses of its target: ``embedding`` [V, H], the output ``head`` [V, H] with its bias or None."""

    embedding: Tensor
    head: Tensor
    bias: Tensor | None
    layers: int

    def scorer(self, ids: Tensor | None = None) -> Output:
        """The target's output head, [..., H] -> [..., V], or its rows ``ids`` only."""
        whole = Output(self.head, self.bias)
        return whole if ids is None else whole.only(ids)


class RecurrentHead(nn.Module):
    """A head that drafts token by token. ``capture``: the target's states that it reads; ``depth``: layers of its
    cache; ``hidden``: width of what it feeds back; ``ids`` [D]: target ids of what it scores (None: all, in order)."""

    capture: tuple[int, ...]
    hidden: int
    depth: int
    context: int
    ids: Tensor | None = None
    borrowed: Borrowed
    head: Output

    def score_only(self, ids: Tensor) -> None:
        """Score the target ids ``ids`` [D] and no others, with a copy of their rows of the output matrix."""
        if self.ids is not None:
            raise ValueError("this head has a draft vocabulary of its own")
        self.head, self.ids = self.head.only(ids), ids

    def enter(self, states: Tensor) -> Tensor:
        """The target's captured states [..., n * H] as ``run`` reads them [..., hidden]."""
        return states

    @abstractmethod
    def run(
        self, ids: Tensor, states: Tensor, positions: Tensor, end: int, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """One pass over entries [B, T] at ``positions`` (all below ``end``) -> what is fed back, [B, T, hidden]."""

    @abstractmethod
    def score(self, out: Tensor) -> Tensor:
        """What is fed back [..., hidden] -> logits [..., D]."""


def _layer(tensors: Tensors, sizes: Sizes, prefix: str, index: int) -> HeadLayer:
    at = f"{prefix}{index}."
    return HeadLayer({k.removeprefix(at): v for k, v in tensors.items() if k.startswith(at)}, sizes, index)


class EagleHead(RecurrentHead):
    """EAGLE-1/2 (arXiv 2401.15077, 2406.16858): fc over embedding and the target's last state, one layer whose input is
    not normed, the target's head on its output."""

    def __init__(self, tensors: Tensors, sizes: Sizes, borrowed: Borrowed) -> None:
        super().__init__()
        self.borrowed, self.hidden, self.depth, self.context = borrowed, sizes.hidden, sizes.layers, sizes.context
        self.eps = sizes.eps
        self.capture = (borrowed.layers,)
        self.embedding = tensors.get("embed_tokens.weight", borrowed.embedding)
        own = tensors.get("lm_head.weight")
        self.head = borrowed.scorer() if own is None else Output(own)
        self.fc = Linear(frozen(tensors["fc.weight"]), frozen(tensors["fc.bias"]) if "fc.bias" in tensors else None)
        self.first = _layer(tensors, sizes, "layers.", 0)
        self.rest = nn.ModuleList(_layer(tensors, sizes, "layers.", i) for i in range(1, sizes.layers))
        self.rope = Rope(sizes, self.fc.weight)

    def run(
        self, ids: Tensor, states: Tensor, positions: Tensor, end: int, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        x = self.fc(torch.cat([F.embedding(ids, self.embedding), states], -1))
        rope = self.rope.at(positions, end)
        x = self.first(x, x, rope, mask, cache)
        for layer in self.rest:
            x = layer(layer.read(x), x, rope, mask, cache)  # type: ignore[operator]
        return x

    def score(self, out: Tensor) -> Tensor:
        logits: Tensor = self.head(out)
        return logits


class Eagle3Head(RecurrentHead):
    """EAGLE-3 (arXiv 2503.01840): fc over several inner states of the target, a layer whose attention reads embedding
    and state side by side, and a head of its own over a draft vocabulary."""

    def __init__(self, tensors: Tensors, sizes: Sizes, settings: Eagle3Settings, borrowed: Borrowed) -> None:
        super().__init__()
        self.borrowed, self.hidden, self.depth, self.context = borrowed, sizes.hidden, sizes.layers, sizes.context
        self.eps, self.settings, self.capture = sizes.eps, settings, settings.aux
        self.embedding = tensors.get("embed_tokens.weight", borrowed.embedding)
        self.fc, self.head = Linear(frozen(tensors["fc.weight"])), Output(frozen(tensors["lm_head.weight"]))
        self.norm = frozen(tensors["norm.weight"])
        self.input_norm = frozen(tensors["input_norm.weight"]) if settings.norm_before_fc else None
        norms = [tensors[f"fc_norm.{i}.weight"] for i in range(len(settings.aux))] if settings.fc_norm else []
        self.fc_norms = nn.ParameterList([frozen(norm) for norm in norms])
        self.state_norm = frozen(tensors["layers.0.hidden_norm.weight"])
        self.first = _layer(tensors, sizes, "layers.", 0)
        self.rest = nn.ModuleList(_layer(tensors, sizes, "layers.", i) for i in range(1, sizes.layers))
        self.rope = Rope(sizes, self.fc.weight)
        if "d2t" in tensors:
            self.ids = tensors["d2t"] + torch.arange(settings.draft_vocab, device=self.norm.device)

    def enter(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = norm(states, self.input_norm, self.eps)
        if len(self.fc_norms):
            parts = states.chunk(len(self.fc_norms), -1)
            states = torch.cat([norm(p, n, self.eps) for p, n in zip(parts, self.fc_norms, strict=True)], -1)
        entered: Tensor = self.fc(states)
        return entered

    def run(
        self, ids: Tensor, states: Tensor, positions: Tensor, end: int, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        rope = self.rope.at(positions, end)
        embedded = self.first.read(F.embedding(ids, self.embedding))
        normed = norm(states, self.state_norm, self.eps)
        residual = normed if self.settings.norm_before_residual else states
        x = self.first(torch.cat([embedded, normed], -1), residual, rope, mask, cache)
        for layer in self.rest:
            x = layer(layer.read(x), x, rope, mask, cache)  # type: ignore[operator]
        return norm(x, self.norm, self.eps) if self.settings.norm_output else x

    def score(self, out: Tensor) -> Tensor:
        normed = out if self.settings.norm_output else norm(out, self.norm, self.eps)
        logits: Tensor = self.head(normed)
        return logits if self.settings.logit_scale == 1.0 else logits * self.settings.logit_scale


class MtpHead(RecurrentHead):
    """One more layer on the target's last state, in Qwen3-Next's names or MiMo's; the target's embeddings and head.

    It feeds back its output behind the last norm. MiMo puts the state before the embedding, and its implementations
    blank the embedding at position 0.
    """

    def __init__(self, tensors: Tensors, sizes: Sizes, style: str, borrowed: Borrowed) -> None:
        super().__init__()
        self.borrowed, self.hidden, self.depth, self.context = borrowed, sizes.hidden, 1, sizes.context
        self.eps, self.capture = sizes.eps, (borrowed.layers,)
        self.state_first = self.blank_first = style == "mimo"
        names = (
            ["mtp_layers.0." + n for n in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")]
            if style == "mimo"
            else ["mtp." + n for n in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
        )
        fc, self.embedding_norm, self.state_norm, self.norm = (frozen(tensors[n + ".weight"]) for n in names)
        self.fc, self.head = Linear(fc), borrowed.scorer()
        self.layer = _layer(tensors, sizes, "mtp_layers." if style == "mimo" else "mtp.layers.", 0)
        self.rope = Rope(sizes, self.fc.weight)

    def run(
        self, ids: Tensor, states: Tensor, positions: Tensor, end: int, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        embedded = F.embedding(ids, self.borrowed.embedding)
        if self.blank_first:
            embedded = embedded * (positions != 0)[..., None]
        parts = [norm(embedded, self.embedding_norm, self.eps), norm(states, self.state_norm, self.eps)]
        x = self.fc(torch.cat(parts[::-1] if self.state_first else parts, -1))
        x = self.layer(self.layer.read(x), x, self.rope.at(positions, end), mask, cache)
        return norm(x, self.norm, self.eps)

    def score(self, out: Tensor) -> Tensor:
        logits: Tensor = self.head(out)
        return logits


class MedusaHeads(nn.Module):
    """Medusa (arXiv 2401.10774): head i foretells the token i + 1 behind the newest one, all from the state whose head
    gave that token: residual blocks x + SiLU(Linear x), then an output matrix."""

    def __init__(self, tensors: Tensors, shape: MedusaShape, borrowed: Borrowed) -> None:
        super().__init__()
        self.count, self.blocks, self.borrowed = shape.heads, shape.blocks, borrowed
        self.capture = (borrowed.layers,)
        self.ids: Tensor | None = tensors.get("token_map")
        # One matrix product does a block of all heads: [heads, H, H].
        self.weights = nn.ParameterList(
            frozen(torch.stack([tensors[f"blocks.{i}.layers.{j}.weight"] for i in range(self.count)]))
            for j in range(self.blocks)
        )
        biased = "blocks.0.layers.0.bias" in tensors
        self.biases = nn.ParameterList(
            frozen(torch.stack([tensors[f"blocks.{i}.layers.{j}.bias"] for i in range(self.count)]))
            for j in range(self.blocks if biased else 0)
        )
        own = [tensors[f"lm_heads.{i}.weight"] for i in range(self.count) if f"lm_heads.{i}.weight" in tensors]
        if self.ids is not None:
            own = [w if len(w) == len(self.ids) else w[self.ids] for w in own]
        outputs = [Output(frozen(weight)) for weight in own] or [borrowed.scorer(self.ids)]
        self.outputs = nn.ModuleList(outputs)
        """One for each head, or one for all."""

    def score(self, states: Tensor, heads: int) -> Tensor:
        """States [B, H] -> logits [B, heads, D] of the first ``heads`` heads."""
        x = states[:, None].expand(-1, heads, -1).transpose(0, 1)  # [heads, B, H]
        for j in range(self.blocks):
            y = x @ self.weights[j][:heads].transpose(1, 2)
            x = x + F.silu(y + self.biases[j][:heads, None] if len(self.biases) else y)
        if len(self.outputs) > 1:
            return torch.stack([self.outputs[i](x[i]) for i in range(heads)], 1)
        logits: Tensor = self.outputs[0](x).transpose(0, 1)
        return logits
