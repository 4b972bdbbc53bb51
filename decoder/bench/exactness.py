"""Is every proposer's greedy output, in float32, the target's own? On the device at hand, token for token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decoder.bench.bed import Bed
from decoder.bench.measure import sentence
from decoder.bench.random_models import HEADS
from decoder.request import PROPOSERS, TREES, GenerationRequest


@dataclass(frozen=True, slots=True)
class Exact:
    """One comparison with plain decoding. Where they part, ``at`` is the first token that differs and ``gap`` how far
    apart the target's two likeliest logits were there: rounding can only turn a near-tie."""

    equal: bool
    at: int | None = None
    gap: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict; ``Exact(**it)`` reads it back."""
        return asdict(self)

    def words(self) -> str:
        """For a table."""
        if self.equal:
            return "equal"
        if self.error:
            return f"FAILED: {self.error}"
        return f"DIFFERENT at token {self.at}, where the two likeliest logits were {self.gap:.2g} apart"


def compare(bed: Bed, ids: Sequence[int]) -> Exact:
    """``ids`` against what the target wrote by itself."""
    expected = bed.continuation
    if list(ids) == expected:
        return Exact(True)
    pairs = zip(ids, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(expected)))
    text = torch.tensor([[*bed.ids, *expected[:at]]], device=bed.device)
    with torch.inference_mode():
        best = bed.model(input_ids=text).logits[0, -1].float().topk(2).values.tolist()
    return Exact(False, at, best[0] - best[1])


def check(bed: Bed, *, transformers: bool = True) -> dict[str, Exact]:
    """Every proposer, three rows together, the eager path, and transformers' own greedy output."""
    found: dict[str, Exact] = {}
    with full_float32():
        proposers = {"none": None, **bed.proposers((0.0, 0.3)), **bed.other_proposers(HEADS)}
        for label, proposer in proposers.items():
            # The engine takes whatever proposer it was given; a name of ours only decides what a request must hold.
            name = label if label in PROPOSERS else "ngram"
            request = bed.request.replace(proposer=name, prediction=bed.prediction(0.3), exit_layer=0)
            for tree in TREES if label in HEADS else ("chain",):
                shown = label if tree == "chain" else f"{label}, {tree} tree"
                found[shown] = _checked(bed, request.replace(tree=tree), proposer)
        found["three rows together"] = _rows_together(bed)
        eager = bed.eager()
        if eager is not None:
            found["eager path"] = compare(bed, bed.decoder(None, eager).run(bed.request).output_ids)
        if transformers:
            ids = torch.tensor([list(bed.ids)], device=bed.device)
            with torch.inference_mode():
                full = bed.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(bed.continuation), do_sample=False
                )
            found["transformers"] = compare(bed, full[0, len(bed.ids) :].tolist())
    return found


def _checked(bed: Bed, request: GenerationRequest, proposer: Any) -> Exact:
    try:
        run = bed.decoder(proposer).run(request)
    except Exception as error:  # one broken proposer must not hide what the others do
        return Exact(False, error=sentence(error))
    return Exact(False, error=run.error) if run.error else compare(bed, run.output_ids)


def _rows_together(bed: Bed) -> Exact:
    """Rows of different length and draft length that decode together, the first of them the known text."""
    words = bed.request.prompt.split()
    cuts = ((len(words) // 3, 1), (len(words) // 16, 8))
    others = [bed.request.replace(prompt=" ".join(words[cut:]), k=k) for cut, k in cuts]
    requests = [r.replace(proposer="draft-model") for r in (bed.request, *others)]
    try:
        runs = bed.decoder(bed.proposers(())["draft-model"]).generate(requests)
    except Exception as error:
        return Exact(False, error=sentence(error))
    for request, run in zip(requests[1:], runs[1:], strict=True):
        alone = bed.decoder(None).run(request.replace(proposer="none")).output_ids
        if run.output_ids != alone:
            return Exact(False, error=f"the row of {len(request.prompt.split())} tokens is not what it is alone")
    return compare(bed, runs[0].output_ids)


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 products in float32: no TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
