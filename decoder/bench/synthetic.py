"""The check for a bare machine with an accelerator: Llama-shaped models with random weights, built in memory.

Needs torch and transformers only: no network, no weights, no tokenizer. Costs are real, texts are not. Acceptance is
set by a proposer that replays the target's own continuation with a chosen error rate; a truncated copy of the target
is a draft of real cost, whatever it gets right.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decoder.bench.floor import Floor, measure_floor
from decoder.bench.hugging_face import ASSISTED, PLAIN, HuggingFaceVariant
from decoder.bench.measure import Case, Report, Sample, Variant, interleave, silent
from decoder.bench.ours import OurVariant
from decoder.bench.widths import WIDTHS, Width, measure_widths
from decoder.engine import SpeculativeDecoder, Target
from decoder.loading import LoadedModel
from decoder.proposers.base import Context, Proposal, Proposer
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.request import GenerationRequest

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama by its sizes; ``draft_layers`` of them make the truncated copy."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    draft_layers: int
    tied: bool = False


SHAPES = {
    "1b": Shape("1b", 2048, 16, 8192, 32, 8, 128_256, 2, tied=True),
    "8b": Shape("8b", 4096, 32, 14_336, 32, 8, 128_256, 2),
    "tiny": Shape("tiny", 64, 3, 96, 4, 2, 128, 1),
}


@dataclass(frozen=True, slots=True)
class SyntheticPlan:
    """Which shapes, on what, and how much. ``errors`` are the replaying proposer's error rates."""

    shapes: tuple[str, ...] = ("1b", "8b")
    device: str = "cuda"
    dtype: str = "bfloat16"
    k: int = 4
    tokens: int = 64
    prompt_tokens: int = 128
    rounds: int = 20
    repeats: int = 2
    errors: tuple[float, ...] = (0.0, 0.2, 0.5)
    transformers: bool = True
    exact_tokens: int = 128
    exact_shape: str = "1b"
    """Checked in float32; "" leaves it out."""
    buffer_bytes: int | None = None


@dataclass(frozen=True)
class Synthetic:
    """One shape: its floor, the cost of each width, the samples of every variant, and whether greedy was exact."""

    shape: str
    dtype: str
    device: str
    parameters: int
    path: str
    floor: Floor | None = None
    widths: tuple[Width, ...] = ()
    samples: tuple[Sample, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)
    """By proposer: float32 greedy equal to plain decoding, token for token (only in the exactness part)."""

    def overhead_ms(self, variant: str) -> float | None:
        """Median overhead of a round (wall minus device) over the samples of ``variant``."""
        values = [s.overhead_ms / s.rounds for s in self.samples if s.variant == variant and s.overhead_ms and s.rounds]
        return statistics.median(values) if values else None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        raw = {name: getattr(self, name) for name in ("shape", "dtype", "device", "parameters", "path")}
        return {
            **raw,
            "floor": self.floor.to_json() if self.floor else None,
            "widths": [w.to_json() for w in self.widths],
            "samples": [s.to_json() for s in self.samples],
            "errors": dict(self.errors),
            "exact": dict(self.exact),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Synthetic:
        """Read what ``to_json`` wrote."""
        values = dict(data)
        values["floor"] = Floor.from_json(data["floor"]) if data["floor"] else None
        values["widths"] = tuple(Width.from_json(w) for w in data["widths"])
        values["samples"] = tuple(Sample(**s) for s in data["samples"])
        return cls(**values)


class IdTokenizer:
    """Token 17 is written " 17": a tokenizer for models whose texts mean nothing."""

    chat_template = None
    eos_token_id = None
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(f" {i}" for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return f" {token}"

    def get_vocab(self) -> dict[str, int]:
        return {f" {i}": i for i in range(self.size)}


class ReplayProposer(Proposer):
    """Proposes the continuation that the target itself wrote; each token is wrong with probability ``error``."""

    name = "replay"

    def __init__(self, continuation: Sequence[int], error: float, vocab_size: int, seed: int = 0) -> None:
        self.continuation, self.error, self.vocab_size, self.seed = list(continuation), error, vocab_size, seed

    def begin(self, context: Context) -> None:
        self._context = context
        self._random = random.Random(self.seed)

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        drafts = []
        for row, k in zip(self._context.rows, ks, strict=True):
            at = row.emitted
            drafts.append([self._spoilt(token) for token in self.continuation[at : at + k]])
        return Proposal.of_lists(drafts, self._context.device, ["the recorded continuation is over"] * len(drafts))

    def _spoilt(self, token: int) -> int:
        return (token + 1) % self.vocab_size if self._random.random() < self.error else token


def build(shape: Shape, device: str, dtype: str, seed: int = 0) -> Any:
    """A Llama of that shape with random weights, made on ``device`` in ``dtype``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(_DTYPES[dtype])
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wider than a trained model's, so that greedy choices are seldom near-ties.
                parameter.normal_(0.0, 2.0 / parameter.shape[1] ** 0.5)
    return model.eval().requires_grad_(False)


def truncated(model: Any, shape: Shape, device: str, dtype: str) -> Any:
    """A copy of the model's first ``draft_layers`` layers, embeddings, norm and head, as a model of its own."""
    import dataclasses

    short = build(dataclasses.replace(shape, layers=shape.draft_layers), device, dtype)
    wanted = short.state_dict()
    short.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in wanted})
    return short


def loaded(model: Any, name: str, device: str, dtype: str) -> LoadedModel:
    """The model as ``loading.load`` would have given it."""
    size = int(model.config.vocab_size)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=IdTokenizer(size),
        family="llama",
        revision="random",
        fingerprint=name,
        dtype=dtype,
        device=device,
        vocab_size=size,
        context=int(model.config.max_position_embeddings),
        eos_ids=frozenset(),
    )


class _Bed:
    """A target, its truncated draft, and a plain continuation of one prompt."""

    def __init__(self, shape: Shape, plan: SyntheticPlan, dtype: str, tokens: int) -> None:
        from decoder.assemble import new_runner

        self.plan, self.dtype = plan, dtype
        self.model = build(shape, plan.device, dtype)
        self.draft = truncated(self.model, shape, plan.device, dtype)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        target = loaded(self.model, shape.name, plan.device, dtype)
        self.runner = new_runner(target)
        self.draft_runner = new_runner(loaded(self.draft, f"{shape.name}-draft", plan.device, dtype))
        self.target = Target(self.runner, target.tokenizer, shape.name, frozenset(), dtype, shape.name)
        generator = random.Random(1)
        self.ids = tuple(generator.randrange(shape.vocabulary) for _ in range(plan.prompt_tokens))
        request = GenerationRequest(
            " ".join(str(i) for i in self.ids), chat=False, target=shape.name, max_new_tokens=tokens, ignore_eos=True,
            k=plan.k, dtype=dtype, device="auto",
        )  # fmt: skip
        self.case = Case("synthetic", shape.name, request, self.ids)
        plain = self.decoder(None).run(request)
        self.path = str(getattr(self.runner, "path", ""))
        self.continuation = list(plain.output_ids)

    def decoder(self, proposer: Proposer | None) -> SpeculativeDecoder:
        return SpeculativeDecoder(self.target, proposer)

    def proposers(self, errors: Sequence[float]) -> dict[str, Proposer]:
        """Every proposer of the check, by label."""
        vocabulary = self.runner.vocab_size
        found: dict[str, Proposer] = {
            f"replay, {error:.0%} wrong": ReplayProposer(self.continuation, error, vocabulary) for error in errors
        }
        found["draft-model"] = DraftModelProposer(self.draft_runner)
        layers = int(self.model.config.num_hidden_layers)
        found["early-exit"] = EarlyExitProposer(self.runner, layers)
        found["ngram"] = NgramProposer()
        return found


def run_synthetic(plan: SyntheticPlan, report: Report = silent) -> list[Synthetic]:
    """Every shape of ``plan``, and the exactness part last."""
    found = []
    for index, name in enumerate(plan.shapes):
        report(index / (len(plan.shapes) + 1), f"building {name}")
        found.append(_measure(SHAPES[name], plan, report))
        _free(plan.device)
    if plan.exact_shape:
        report(len(plan.shapes) / (len(plan.shapes) + 1), f"exactness in float32, {plan.exact_shape}")
        found.append(check_exact(SHAPES[plan.exact_shape], plan))
        _free(plan.device)
    return found


def _measure(shape: Shape, plan: SyntheticPlan, report: Report) -> Synthetic:
    bed = _Bed(shape, plan, plan.dtype, plan.tokens)
    variants: list[Variant] = [OurVariant("none", 0, decoder=bed.decoder(None))]
    for label, proposer in bed.proposers(plan.errors).items():
        # Labels that are no proposer's name run as n-gram requests: the engine takes whatever proposer it was given.
        known = label if label in ("draft-model", "early-exit", "ngram") else "ngram"
        variants.append(OurVariant(known, plan.k, decoder=bed.decoder(proposer), label=label))
    if plan.transformers:
        variants.append(HuggingFaceVariant(PLAIN, model=bed.model))
        variants.append(HuggingFaceVariant(ASSISTED, plan.k, model=bed.model, assistant=bed.draft))
    samples, errors = interleave(variants, [bed.case], plan.repeats, report)
    widths = measure_widths(bed.runner, context=plan.prompt_tokens, rounds=max(plan.rounds, 1), widths=WIDTHS)
    floor = measure_floor(bed.model, plan.device, buffer_bytes=plan.buffer_bytes)
    return Synthetic(
        shape.name, plan.dtype, plan.device, bed.parameters, bed.path, floor, tuple(widths), tuple(samples), errors
    )


def check_exact(shape: Shape, plan: SyntheticPlan) -> Synthetic:
    """float32 greedy with every proposer against plain decoding and, where it is measured, transformers."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        bed = _Bed(shape, plan, "float32", plan.exact_tokens)
        exact = {
            label: list(bed.decoder(proposer).run(bed.case.request.replace(proposer="ngram")).output_ids)
            == bed.continuation
            for label, proposer in bed.proposers((0.0, 0.3)).items()
        }
        if plan.transformers:
            ids = torch.tensor([list(bed.ids)], device=plan.device)
            with torch.inference_mode():
                full = bed.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=plan.exact_tokens, do_sample=False
                )
            exact["plain = transformers"] = full[0, len(bed.ids) :].tolist() == bed.continuation
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return Synthetic(shape.name, "float32", plan.device, bed.parameters, bed.path, exact=exact)


def _free(device: str) -> None:
    """Give a model's memory back before the next one is built."""
    import gc

    from decoder import assemble

    # The fused weights of in-memory models are kept by the process's cache; these models are gone for good.
    assemble._weights.clear()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
