"""Model families that transformers does not know by name but whose layers it has: no code of a checkpoint is run."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def register() -> None:
    """Teach transformers MiMo: layers of Qwen2, and MTP layers in the same checkpoint that it leaves unread."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

    class MiMoForCausalLM(Qwen2ForCausalLM):
        config_class = MiMoConfig
        _keys_to_ignore_on_load_unexpected = [r"model\.mtp_layers\."]  # noqa: RUF012 (transformers' own idiom)

    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
