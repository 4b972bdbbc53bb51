"""What decoding does beside the passes of models keeps to one thread: a wait for others costs more than it gains."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoder.engine import SpeculativeDecoder, Target
from decoder.proposers.draft_model import DraftModelProposer
from decoder.sampling import likeliest
from decoder.threads import FEW, alone
from tests.toys import TableRunner, ToyTokenizer, ask

VOCABULARY = 40_000
SHARED_OUT = 32_768
"""Numbers from which PyTorch shares out an operation."""


class Watch(TorchDispatchMode):
    """Every operation on a row of a vocabulary, and how many threads it may take."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (*args, made) if isinstance(x, Tensor)]
        if max(sizes, default=0) >= SHARED_OUT:
            self.seen.add((str(func), torch.get_num_threads()))
        return made


@functools.cache
def row(token: int) -> list[float]:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(token)).tolist()


def quiet(runner: TableRunner, watch: Watch) -> TableRunner:
    """Its passes are a model's: what they take is theirs."""
    forward = runner.forward

    def unwatched(*args: Any, **options: Any) -> Tensor:
        assert torch.get_num_threads() == 2, "a pass has all threads"
        before = set(watch.seen)
        logits = forward(*args, **options)
        watch.seen = before
        return logits

    runner.forward = unwatched  # type: ignore[method-assign]
    return runner


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


FEW_NUMBERS = (
    *("empty", "view", "slice", "select", "expand", "detach", "alias", "unsqueeze", "squeeze", "_to_copy"),
    *("index_add_", "index_put_"),
)
"""Operations that touch no number of what they are given, or only those of a short index."""


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("draft_length", ["fixed", "confidence"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    ],
)
def test_a_step_shares_out_nothing_but_passes(sampling: dict[str, float], draft_length: str) -> None:
    watch = Watch()
    target, draft = (quiet(TableRunner(lambda ids: row(ids[-1] % 7), VOCABULARY), watch) for _ in range(2))
    tokenizer = ToyTokenizer([chr(97 + i % 26) for i in range(VOCABULARY)])
    decoder = SpeculativeDecoder(Target(target, tokenizer, "toy", frozenset()), DraftModelProposer(draft))
    asked = ask(proposer="draft-model", k=3, max_new_tokens=9, draft_length=draft_length, confidence=1e-6, **sampling)
    stream = decoder.stream(asked)
    with watch:
        steps = list(stream)
    assert len(stream.run.output_ids) == 9
    assert any(step.drafts for step in steps)
    names = {name for name, threads in watch.seen if threads != 1}
    assert not {name for name in names if not any(part in name for part in FEW_NUMBERS)}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_much_work_is_shared_out_and_an_error_gives_the_threads_back() -> None:
    with alone(FEW + 1):
        assert torch.get_num_threads() == 2

    def fail() -> None:
        with alone(FEW):
            assert torch.get_num_threads() == 1
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 40), (5,)])
def test_the_likeliest_is_what_argmax_says(shape: tuple[int, ...]) -> None:
    scores = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1)).float()  # with ties
    values, ids = likeliest(scores)
    assert torch.equal(ids, scores.argmax(-1))
    assert torch.equal(values, scores.amax(-1))
    scores[..., 3] = float("nan")
    assert likeliest(scores)[0].isnan().all()
    low = torch.full(shape, -torch.inf, dtype=torch.bfloat16)
    assert likeliest(low)[0].eq(-torch.inf).all()
