"""The lean path computes what transformers computes, for every family that takes it; others are refused with why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decoder.fused import FusedRunner, Weights, why_not
from decoder.steps import StepModule, tapped

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama, biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "llama 3, scaled positions": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"num_key_value_heads": 1, "head_dim": 24}),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model whose norms and biases are not what they are initialised to, so that leaving one out shows."""
    config, kind, changes = FAMILIES[name]
    torch.manual_seed(3)
    model = kind(config(**{**SIZES, **changes})).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if "norm" in key or key.endswith("bias"):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 160, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lean_path_is_transformers(name: str) -> None:
    text = ids(90)
    with torch.inference_mode():
        output = build(name)(input_ids=text, output_hidden_states=True)
    model = build(name)
    assert why_not(model) is None
    runner = FusedRunner(Weights(model), context=512, device="cpu")
    runner.capture = (0, 2, 3)
    runner.reset(1)
    states, logits = [], []
    for start, end in ((0, 70), (70, 71), (71, 76), (76, 90)):
        logits.append(runner.forward(text[:, start:end]))
        assert runner.captured is not None
        states.append(runner.captured)
    assert torch.allclose(torch.cat(logits, 1), output.logits, atol=3e-4, rtol=1e-4)
    expected = torch.cat([output.hidden_states[i] for i in (0, 2, 3)], -1)
    assert torch.allclose(torch.cat(states, 1), expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_it_rounds_where_transformers_does(name: str) -> None:
    """One layer deep and before any attention kernel chooses its own order, nothing may differ at all."""
    text = ids(8)
    with torch.inference_mode():
        states = build(name, torch.bfloat16)(input_ids=text, output_hidden_states=True).hidden_states
    weights = Weights(build(name, torch.bfloat16))
    runner = FusedRunner(weights, context=512, device="cpu")
    runner.capture = (0,)
    runner.reset(1)
    runner.forward(text)
    assert torch.equal(runner.captured, states[0])
    reference = build(name, torch.bfloat16).model
    with torch.inference_mode():
        assert torch.equal(weights.normed(states[1]), reference.norm(states[1]))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_step_that_is_compiled_computes_the_same(name: str) -> None:
    """The module that goes into a compiled step, run as it stands."""
    text = ids(30)
    weights = Weights(build(name))
    runner = FusedRunner(weights, context=512, device="cpu")
    runner.reset(1)
    runner.capture = tapped(3)
    runner.forward(text[:, :25], last=True)
    expected = runner.forward(text[:, 25:])
    step = StepModule(weights, 256, 3)
    runner.rollback([25])
    keys, values = runner.buffers.keys, runner.buffers.values
    assert keys is not None
    assert values is not None
    slots = torch.arange(25, 30)
    mask = (torch.arange(256) <= slots[:, None]).repeat(weights.heads // weights.kv_heads, 1)
    with torch.inference_mode():
        logits, *states = step(text[:, 25:], slots, slots, mask, list(keys.unbind(0)), list(values.unbind(0)))
    assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)
    assert runner.captured is not None
    assert torch.allclose(torch.cat(states, -1), runner.captured, atol=2e-4, rtol=1e-4)


def test_layers_of_another_make_take_the_generic_path() -> None:
    gemma2 = Gemma2ForCausalLM(Gemma2Config(**{**SIZES, "attn_implementation": "eager"}))
    assert why_not(gemma2) == "gemma2 layers are not the plain Llama ones"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, "activation is relu"),
        ({"mlp_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "scaled by dynamic"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "a part of each head",
        ),
    ],
)
def test_a_llama_that_is_not_plain_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in (why_not(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))) or "")
