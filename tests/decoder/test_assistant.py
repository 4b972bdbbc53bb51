"""The shipped draft in somebody else's hands: as transformers' ``assistant_model`` it gives the same greedy text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from decoder import catalog, loading
from decoder.audit import oracle_greedy
from decoder.audit_prompts import audit_prompts
from decoder.bench.hugging_face import fixed_draft_length, own_defaults_only
from decoder.engine import SpeculativeDecoder

pytestmark = pytest.mark.real_model

PROMPTS = dict(audit_prompts())
TOKENS, K = 64, 4


@lru_cache
def assistant() -> Any:
    """The shipped folder as transformers alone reads it, in float32: generate() may write to its configuration."""
    folder = catalog.DRAFTS_DIR / "smollm2-draft"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["chat", "code", "emoji"])
def test_as_an_assistant_model_the_shipped_draft_changes_no_token(kind: str) -> None:
    request = PROMPTS[kind].replace(dtype="float32", device="cpu", max_new_tokens=TOKENS, k=K)
    plain = oracle_greedy(request)
    decoder = SpeculativeDecoder.load(request.replace(proposer="draft-model", draft="smollm2-draft"))
    ours = decoder.run(request.replace(proposer="draft-model", draft="smollm2-draft"))

    loaded = loading.load(request.target, "float32", "cpu")
    ids = torch.tensor([list(ours.prompt_ids)])
    passes = []
    counting = loaded.model.register_forward_hook(lambda *_: passes.append(1))
    config = GenerationConfig(
        max_new_tokens=TOKENS,
        do_sample=False,
        num_beams=1,
        top_k=0,
        repetition_penalty=1.0,
        eos_token_id=sorted(loaded.eos_ids),
        pad_token_id=sorted(loaded.eos_ids)[0],
    )
    try:
        with torch.inference_mode(), fixed_draft_length(assistant(), K), own_defaults_only(loaded.model):
            found = loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, assistant_model=assistant()
            )
    finally:
        counting.remove()
    theirs = tuple(found[0, ids.shape[1] :].tolist())
    assert theirs == plain.ids == ours.output_ids
    assert ours.metrics["num_accepted_draft_tokens"] > 0
    assert len(passes) < len(theirs), "its drafts were kept: fewer passes of the target than tokens"
