"""The draft heads as they are trained: EAGLE-3, an MTP layer, Medusa. Parameters have the names of the public files.

Every head gives, for the tokens of whole rows, the states of ``steps`` draft positions at once ("training-time test"):
at step j, index t stands for the (j+1)-th draft behind token t + 1, made from the head's own states of the steps
before, as it will be in use. It drafts the token at t + 2 + j, whose distribution the target gives at t + 1 + j.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadModel(nn.Module, ABC):
    """What the trainer asks of a head. ``target`` (a transformers model) is only read, never a parameter of it."""

    reads: str
    """Which states it reads: "aux" (three inner layers) or "final" (behind the final norm)."""
    own_head: bool
    """Whether it scores a draft vocabulary with weights of its own, or the whole one with the target's head."""

    @abstractmethod
    def unroll(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """``embedded`` [B, L, H] token embeddings and ``states`` [B, L, n, H] -> per step the states that are scored
        [B, L, H]; entries at which a step has no token to read are meaningless."""

    @abstractmethod
    def scoring(self, step: int) -> Tensor | None:
        """The output matrix [draft vocabulary, H] of a step, or None for the target's head."""


class _Norm(nn.RMSNorm):
    """In float32 under autocast too, as the target's norms are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class _Attention(nn.Module):
    """A Llama layer's projections; ``inputs`` is what q, k and v read."""

    def __init__(self, config: Any, inputs: int) -> None:
        super().__init__()
        hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
        self.q_proj = nn.Linear(inputs, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.group = heads // kv

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, L, inputs] of one step. ``past`` holds keys and values of the steps before, and is given this one's.

        Index t sees the first step's entries up to t (what the target confirmed), and of each later step only its own
        index (what was drafted on the way).
        """
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        past.append((k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)))
        keys, values = past[0]
        if len(past) == 1:
            mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        else:
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ keys.transpose(2, 3)).float().masked_fill(~causal, -torch.inf)
            own = [(q * other).sum(-1, keepdim=True).float() for other, _ in past[1:]]
            weights = (torch.cat([scores, *own], -1) * self.head_dim**-0.5).softmax(-1).to(v.dtype)
            mixed = weights[..., :length] @ values
            for i, (_, other) in enumerate(past[1:]):
                mixed = mixed + weights[..., length + i : length + i + 1] * other
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    """One decoder layer; ``wide``: EAGLE-3's, whose attention reads embedding and state side by side."""

    def __init__(self, config: Any, *, wide: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, 2 * hidden if wide else hidden)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Norm(hidden, eps)
        self.post_attention_layernorm = _Norm(hidden, eps)
        self.hidden_norm = _Norm(hidden, eps) if wide else None

    def forward(
        self, x: Tensor, embedded: Tensor | None, rope: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        if self.hidden_norm is None or embedded is None:
            read = self.input_layernorm(x)
        else:
            read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(read, rope, past)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Recurrent(HeadModel):
    """Shared by EAGLE-3 and MTP: one layer that reads the next token and a state, and then its own state."""

    def __init__(self, config: Any, target: Any) -> None:
        super().__init__()
        # Outside the module tree: the target's rotary tables are not the head's.
        self._rotary = [target.model.rotary_emb]

    @abstractmethod
    def _step(self, embedded: Tensor, state: Tensor, rope: tuple[Tensor, Tensor], past: Any) -> tuple[Tensor, Tensor]:
        """(what the next step reads, what is scored), both [B, L, H]."""

    @abstractmethod
    def _first(self, states: Tensor) -> Tensor:
        """What the first step reads instead of a state of its own: [B, L, n, H] -> [B, L, H]."""

    def unroll(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        length = embedded.shape[1]
        state, scored = self._first(states), []
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))  # index t now reads the token at t + 1 + step
            positions = torch.arange(length, device=embedded.device)[None] + step
            cos, sin = self._rotary[0](embedded, positions)
            state, out = self._step(embedded, state, (cos[:, None], sin[:, None]), past)
            scored.append(out)
        return scored


class Eagle3Head(_Recurrent):
    """EAGLE-3: reads three inner states of the target, scores a draft vocabulary with a head of its own."""

    reads, own_head = "aux", True

    def __init__(self, config: Any, target: Any, vocabulary: Tensor) -> None:
        """``vocabulary`` int64 [draft vocabulary]: the target's ids that it can draft, ascending."""
        super().__init__(config, target)
        hidden = config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = _Layer(config, wide=True)
        self.norm = _Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(vocabulary), bias=False)

    def warm_start(self, target: Any, vocabulary: Tensor) -> None:
        """Begin as the target ends: its last layer, norm and head, on the deepest of the three states; the embeddings
        are read as its first layer reads them."""
        first, last, hidden = target.model.layers[0], target.model.layers[-1], self.norm.weight.shape[0]
        with torch.no_grad():
            self.fc.weight[:, : 2 * hidden].mul_(0.1)
            self.fc.weight[:, 2 * hidden :] = torch.eye(hidden)
            mine = self.midlayer
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(mine.self_attn, name).weight
                weight[:, :hidden] = getattr(first.self_attn, name).weight
                weight[:, hidden:] = getattr(last.self_attn, name).weight
            mine.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            mine.mlp.load_state_dict({k: v.float() for k, v in last.mlp.state_dict().items()})
            mine.input_layernorm.weight.copy_(first.input_layernorm.weight)
            assert mine.hidden_norm is not None
            mine.hidden_norm.weight.copy_(last.input_layernorm.weight)
            mine.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary])

    def _first(self, states: Tensor) -> Tensor:
        result: Tensor = self.fc(states.flatten(2))
        return result

    def _step(self, embedded: Tensor, state: Tensor, rope: tuple[Tensor, Tensor], past: Any) -> tuple[Tensor, Tensor]:
        state = self.midlayer(state, embedded, rope, past)
        return state, self.norm(state)

    def scoring(self, step: int) -> Tensor:
        return self.lm_head.weight


class _MtpParts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = _Norm(hidden, eps)
        self.pre_fc_norm_hidden = _Norm(hidden, eps)
        self.layers = nn.ModuleList([_Layer(config, wide=False)])
        self.norm = _Norm(hidden, eps)


class MtpHead(_Recurrent):
    """One more layer on the last hidden state, named as Qwen3-Next names its own; embeddings and head are the target's.

    It reads the state behind the final norm and, from the second draft on, its own behind ``mtp.norm``.
    """

    reads, own_head = "final", False

    def __init__(self, config: Any, target: Any, vocabulary: Tensor) -> None:
        super().__init__(config, target)
        self.mtp = _MtpParts(config)

    def warm_start(self, target: Any, vocabulary: Tensor) -> None:
        """Begin as the target's last layer, norm and head on what stood before the final norm, and of the embedding
        with little. The stream has size one here, not the target's: with it the layer's additions are scaled, so that
        nothing changes but the size of what ``fc`` has to learn."""
        last, final, hidden = target.model.layers[-1], target.model.norm, self.mtp.norm.weight.shape[0]
        with torch.no_grad():
            # The state comes multiplied with the final norm's weight and is normed once more: both are undone here.
            before, behind = _stream_sizes(target, vocabulary)
            weight = final.weight.float()
            self.mtp.pre_fc_norm_hidden.weight.copy_(behind / torch.where(weight.abs() < 1e-3, 1.0, weight))
            self.mtp.fc.weight[:, :hidden].mul_(0.1)
            self.mtp.fc.weight[:, hidden:] = torch.eye(hidden)
            layer: Any = self.mtp.layers[0]
            layer.load_state_dict({k: v.float() for k, v in last.state_dict().items()}, strict=True)
            for adds in (layer.self_attn.o_proj, layer.mlp.down_proj):
                adds.weight.mul_(1 / before)
            self.mtp.norm.weight.copy_(final.weight)

    def _first(self, states: Tensor) -> Tensor:
        return states[:, :, -1]

    def _step(self, embedded: Tensor, state: Tensor, rope: tuple[Tensor, Tensor], past: Any) -> tuple[Tensor, Tensor]:
        mtp = self.mtp
        x = mtp.fc(torch.cat([mtp.pre_fc_norm_embedding(embedded), mtp.pre_fc_norm_hidden(state)], -1))
        state = mtp.norm(mtp.layers[0](x, None, rope, past))
        return state, state

    def scoring(self, step: int) -> None:
        return None


class MedusaHead(HeadModel):
    """Medusa: head i foretells the (i+1)-th draft from the target's last state alone: x + SiLU(Linear x), then its own
    output matrix over the draft vocabulary. Parameters ``{i}.0.linear.weight/bias`` and ``{i}.1.weight``."""

    reads, own_head = "final", True

    def __init__(self, config: Any, target: Any, vocabulary: Tensor, heads: int = 4) -> None:
        super().__init__()
        for i in range(heads):
            block = nn.Module()
            block.linear = nn.Linear(config.hidden_size, config.hidden_size)
            self.add_module(str(i), nn.ModuleList([block, nn.Linear(config.hidden_size, len(vocabulary), bias=False)]))
        self.heads = heads

    def warm_start(self, target: Any, vocabulary: Tensor) -> None:
        """Begin as the target's own head: the residual blocks add nothing yet."""
        with torch.no_grad():
            for i in range(self.heads):
                block, out = self._parts(i)
                block.linear.weight.zero_()
                block.linear.bias.zero_()
                out.weight.copy_(target.get_output_embeddings().weight[vocabulary])

    def _parts(self, i: int) -> tuple[Any, Any]:
        parts: Any = getattr(self, str(i))
        return parts[0], parts[1]

    def unroll(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        # The trainer counts from the last *read* token, t + 1: what it foretells there, head i knows from state t.
        last = states[:, :, -1]
        return [last + F.silu(self._parts(i)[0].linear(last)) for i in range(min(steps, self.heads))]

    def scoring(self, step: int) -> Tensor:
        weight: Tensor = self._parts(step)[1].weight
        return weight


HEADS: dict[str, type[Any]] = {"eagle3": Eagle3Head, "mtp": MtpHead, "medusa": MedusaHead}


def _stream_sizes(target: Any, vocabulary: Tensor) -> tuple[float, float]:
    """Root mean square of what the target's final norm reads and of what it gives: medians over frequent tokens."""
    sizes: list[Tensor] = []
    hook = target.model.norm.register_forward_hook(
        lambda _, read, gives: sizes.extend(x.float().square().mean(-1).sqrt() for x in (read[0], gives))
    )
    try:
        target(input_ids=vocabulary[:256][None].to(target.device), use_cache=False)
    finally:
        hook.remove()
    return float(sizes[0].median()), float(sizes[1].median())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)
