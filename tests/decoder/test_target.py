"""The runner's cache: whatever was appended, rolled back, padded or branched, logits are those of a fresh pass."""

from __future__ import annotations

import random

import pytest
import torch

import decoder.fused as fused
import decoder.kv_cache as kv_cache
import decoder.target as module
from decoder.kernel import WIDEST
from tests.tiny import PATHS, runner, tiny_llama

pytestmark = pytest.mark.parametrize("path", PATHS)

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def fresh(ids: list[int], seed: int = 0) -> torch.Tensor:
    """Logits [T, V] of one pass without any cache."""
    with torch.inference_mode():
        return tiny_llama(seed)(input_ids=torch.tensor([ids])).logits[0]


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 384) for _ in range(n)]


def test_appending_and_rolling_back_equals_a_fresh_pass(path: str) -> None:
    model = runner(path=path)
    model.reset(1)
    rng = random.Random(1)
    text: list[int] = []
    for _ in range(40):
        new = some_ids(rng.randrange(1, 7), rng.randrange(10**6))
        logits = model.forward(torch.tensor([new]))[0]
        text += new
        assert torch.allclose(logits, fresh(text)[-len(new) :], **CLOSE)
        back = rng.randrange(0, min(4, len(text)))
        text = text[: len(text) - back]
        model.rollback([len(text)])
    assert model.lengths == [len(text)]


def test_the_allocated_size_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(70)
    results = []
    for bucket in (8, 64, 2048):
        monkeypatch.setattr(kv_cache, "BUCKET", bucket)
        monkeypatch.setattr(fused, "BUCKET", bucket)
        model = runner(path=path)
        model.reset(1)
        parts = [model.forward(torch.tensor([ids[i : i + 7]]))[0] for i in range(0, 70, 7)]
        results.append(torch.cat(parts))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


def test_a_used_buffer_gives_what_a_new_one_gives(path: str) -> None:
    model = runner(path=path)
    model.reset(1)
    model.forward(torch.tensor([some_ids(500)]))
    model.reset(1)
    ids = some_ids(20, 4)
    again = model.forward(torch.tensor([ids]))[0]
    assert torch.allclose(again, fresh(ids), **CLOSE)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 2500])
def test_a_long_prompt_in_chunks_gives_the_last_row(path: str, length: int) -> None:
    model = runner(path=path)
    model.reset(1)
    ids = some_ids(length)
    last = model.forward(torch.tensor([ids]), last=True)
    assert last.shape == (1, 1, 384)
    assert torch.allclose(last[0, 0], fresh(ids)[-1], **CLOSE)
    assert model.lengths == [length]


def test_rows_of_different_length_are_exact(path: str) -> None:
    """Ragged: each row has its own length, count and rollback, and padding is never attended."""
    model = runner(path=path)
    model.reset(3)
    texts = [some_ids(5, 1), some_ids(11, 2), some_ids(8, 3)]
    longest = max(map(len, texts))
    padded = torch.tensor([t + [7] * (longest - len(t)) for t in texts])
    last = model.forward(padded, [len(t) for t in texts], last=True)
    for b, text in enumerate(texts):
        assert torch.allclose(last[b, 0], fresh(text)[-1], **CLOSE)
    rng = random.Random(9)
    for _ in range(15):
        counts = [rng.randrange(0, 5) for _ in texts]
        counts[rng.randrange(3)] = 4
        new = [some_ids(c, rng.randrange(10**6)) for c in counts]
        logits = model.forward(torch.tensor([n + [5] * (4 - len(n)) for n in new]), counts)
        for b, tokens in enumerate(new):
            texts[b] = texts[b] + tokens
            if tokens:
                assert torch.allclose(logits[b, : len(tokens)], fresh(texts[b])[-len(tokens) :], **CLOSE)
        texts = [t[: len(t) - rng.randrange(0, 3)] for t in texts]
        model.rollback([len(t) for t in texts])


def test_ragged_prompts_longer_than_a_chunk(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    model = runner(path=path)
    model.reset(3)
    texts = [some_ids(5, 1), some_ids(50, 2), some_ids(32, 3)]
    padded = torch.tensor([t + [7] * (50 - len(t)) for t in texts])
    last = model.forward(padded, [len(t) for t in texts], last=True)
    for b, text in enumerate(texts):
        assert torch.allclose(last[b, 0], fresh(text)[-1], **CLOSE)
    assert model.lengths == [5, 50, 32]


def test_rows_that_are_done_take_no_part_in_the_rest_of_a_long_prompt(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 64)
    monkeypatch.setattr(module, "WORTH_A_PASS", 8)
    model = runner(path=path)
    passes: list[tuple[int, int]] = []
    weights = model.model if path == "generic" else model.weights
    whole = weights.forward if path == "generic" else weights.run

    def counted(*args: object, **kwargs: object) -> object:
        ids = kwargs["input_ids"] if path == "generic" else args[0]
        passes.append(tuple(ids.shape))
        return whole(*args, **kwargs)

    monkeypatch.setattr(weights, "forward" if path == "generic" else "run", counted)
    if path == "kernel":
        kernel = model.steps.steps[WIDEST]
        monkeypatch.setitem(
            model.steps.steps, WIDEST, lambda *a, **k: passes.append(tuple(a[0].shape)) or kernel(*a, **k)
        )
    model.capture = (1,)
    model.reset(4)
    texts = [some_ids(n, n) for n in (290, 40, 33, 2)]
    padded = torch.tensor([t + [7] * (290 - len(t)) for t in texts])
    last = model.forward(padded, [len(t) for t in texts], last=True)
    assert passes[0] == (4, 2)
    assert passes[-1][0] == 1
    assert sum(rows * width for rows, width in passes) < 450
    assert model.lengths == [290, 40, 33, 2]
    assert model.captured.shape[:2] == (4, 290)
    for b, text in enumerate(texts):
        assert torch.allclose(last[b, 0], fresh(text)[-1], **CLOSE)
        with torch.inference_mode():
            states = tiny_llama(0)(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
        assert torch.allclose(model.captured[b, : len(text)], states[1][0], **CLOSE)
    model.rollback([280, 40, 30, 1])
    texts = [texts[0][:280], texts[1], texts[2][:30], texts[3][:1]]
    after = model.forward(torch.tensor([[9, 8]] * 4))
    for b, text in enumerate(texts):
        assert torch.allclose(after[b], fresh([*text, 9, 8])[-2:], **CLOSE)


def test_where_a_prompts_pass_is_cut(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.prefill_parts([2500], 2500) == [(0, 1024), (1024, 2048), (2048, 2500)]
    assert module.prefill_parts([3, 2], 3) == [(0, 3)]
    assert module.prefill_parts([600, 600], 600) == [(0, 600)]
    assert module.prefill_parts([600, 500, 30], 600) == [(0, 30), (30, 500), (500, 600)]
    assert module.prefill_parts([600] * 32, 600) == [(0, 256), (256, 512), (512, 600)]
    assert module.prefill_parts([0, 0], 1) == [(0, 1)]


def test_a_tree_sees_its_ancestors_and_the_kept_path_stays(path: str) -> None:
    model = runner(path=path)
    model.reset(1)
    prompt = some_ids(9)
    model.forward(torch.tensor([prompt]))
    nodes = some_ids(6, 5)
    parents = [None, None, 0, 1, 3, 3]
    logits = model.forward(torch.tensor([[42, *nodes]]), parents=parents)[0]
    for node in range(6):
        chain, at = [], node
        while at is not None:
            chain.insert(0, nodes[at])
            at = parents[at]
        assert torch.allclose(logits[node + 1], fresh([*prompt, 42, *chain])[-1], **CLOSE)
    model.keep_path(0, 10, [1, 3, 5])
    assert model.lengths == [13]
    after = model.forward(torch.tensor([[77]]))[0, 0]
    kept = [*prompt, 42, nodes[1], nodes[3], nodes[5], 77]
    assert torch.allclose(after, fresh(kept)[-1], **CLOSE)


def test_the_first_layers_share_weights_and_cache_and_disturb_nothing(path: str) -> None:
    model = runner(path=path)
    exit_model = model.short(2)
    assert tiny_llama().config.num_hidden_layers == 3
    model.reset(1)
    prompt = some_ids(12)
    model.forward(torch.tensor([prompt]))
    exit_model.lengths = list(model.lengths)
    shallow = exit_model.forward(torch.tensor([[5]]))[0, 0]
    short = tiny_llama(0, 3)
    with torch.inference_mode():
        hidden = short.model(input_ids=torch.tensor([[*prompt, 5]]), output_hidden_states=True).hidden_states[2]
        expected = short.lm_head(short.model.norm(hidden))[0, -1]
    assert torch.allclose(shallow, expected, **CLOSE)
    exit_model.forward(torch.tensor([[6]]))
    after = model.forward(torch.tensor([[9]]))[0, 0]
    assert torch.allclose(after, fresh([*prompt, 9])[-1], **CLOSE)


@pytest.mark.parametrize("layers", [0, 3, 7])
def test_an_exit_that_does_not_exist_is_refused(path: str, layers: int) -> None:
    with pytest.raises(ValueError, match="exit after 1 to 2"):
        runner(path=path).short(layers)


def test_a_rollback_never_lengthens(path: str) -> None:
    model = runner(path=path)
    model.reset(1)
    model.forward(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="cannot be rolled back"):
        model.rollback([4])


def test_memory_does_not_grow_with_runs(path: str) -> None:
    model = runner(context=512, path=path)
    sizes = []
    for n in (30, 200, 30, 200):
        model.reset(1)
        model.forward(torch.tensor([some_ids(n)]))
        keys = model.kv.rows[0].keys if path == "generic" else model.buffers.keys
        sizes.append(keys.numel())
    assert len(set(sizes)) == 1


def test_captured_states_are_those_of_a_fresh_pass(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 16)
    ids = some_ids(45)
    with torch.inference_mode():
        states = tiny_llama(0)(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[3], states[0]], -1)
    model = runner(path=path)
    model.capture = (1, 3, 0)
    model.reset(1)
    model.forward(torch.tensor([ids[:40]]), last=True)
    assert model.captured is not None
    assert torch.allclose(model.captured, expected[:, :40], **CLOSE)
    model.forward(torch.tensor([ids[40:]]))
    assert torch.allclose(model.captured, expected[:, 40:], **CLOSE)
    model.capture = ()
    model.forward(torch.tensor([ids[:2]]))
    assert model.captured is None


def test_rows_that_leave_take_nothing_with_them(path: str) -> None:
    """Rows of different length go at different times; who stays computes what a fresh pass computes."""
    model = runner(path=path)
    model.capture = (1,)
    model.reset(4)
    texts = [some_ids(n, n) for n in (5, 40, 8, 21)]
    padded = torch.tensor([t + [7] * (40 - len(t)) for t in texts])
    model.forward(padded, [len(t) for t in texts])
    captured = model.captured
    assert captured is not None
    for stay in ([0, 2, 3], [1, 2], [0]):
        model.select(stay)
        captured = captured[stay]
        assert torch.equal(model.captured, captured)
        texts = [texts[b] for b in stay]
        assert model.lengths == [len(t) for t in texts]
        new = [some_ids(3, len(t)) for t in texts]
        logits = model.forward(torch.tensor(new))
        captured = model.captured
        texts = [t + n for t, n in zip(texts, new, strict=True)]
        for b, text in enumerate(texts):
            assert torch.allclose(logits[b], fresh(text)[-3:], **CLOSE)


def test_a_batch_of_the_size_that_was_left_over_starts_with_buffers_of_its_own(path: str) -> None:
    model = runner(path=path)
    model.reset(3)
    model.forward(torch.tensor([some_ids(300, b) for b in range(3)]))
    model.select([1])
    model.reset(1)
    ids = some_ids(20, 4)
    assert torch.allclose(model.forward(torch.tensor([ids]))[0], fresh(ids), **CLOSE)
    keys = model.kv.rows[0].keys if path == "generic" else model.buffers.keys
    assert keys._base is None, "the rows that left are still held"


def test_a_wiped_row_poisons_nobody(path: str) -> None:
    """Ragged rows share a width, so slots behind a short row's text are read with weight 0: they must be numbers."""
    model = runner(path=path)
    model.reset(2)
    model.forward(torch.tensor([some_ids(30), some_ids(30, 1)]))
    with torch.inference_mode():
        if path == "generic":
            rows = [tensor[0] for layer in model.kv.rows for tensor in (layer.keys, layer.values)]
        else:
            rows = [model.buffers.keys[:, 0], model.buffers.values[:, 0]]
        for row in rows:
            row.fill_(float("nan"))
    model.wipe(0)
    model.reset(2)
    texts = [some_ids(4, 2), some_ids(25, 3)]
    padded = torch.tensor([t + [7] * (25 - len(t)) for t in texts])
    model.forward(padded, [len(t) for t in texts], last=True)
    logits = model.forward(torch.tensor([[9], [9]]))
    for b, text in enumerate(texts):
        assert torch.allclose(logits[b], fresh([*text, 9])[-1:], **CLOSE)
