"""The cache of a recurrent head: ragged rows, rows that leave, texts that outgrow the head, trees of one row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.engine import SpeculativeDecoder
from decoder.heads.runner import HeadRunner
from decoder.sampling import spread
from decoder.trace import violations
from tests import heads
from tests.decoder.every_proposer import every_decoder, request_for
from tests.heads import V, predictable, states
from tests.tiny import runner_of, tiny_decoder

layers_both_ways = heads.layers_both_ways
pytestmark = pytest.mark.usefixtures("layers_both_ways")

CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}


def runner(name: str = "eagle3") -> HeadRunner:
    found: Any = heads.load_tiny(name)
    return HeadRunner(found, vocab_size=V, device="cpu")


def captured(ids: list[int], name: str) -> torch.Tensor:
    """The target's states [T, n * H] that the head reads."""
    every = states(predictable(), ids)
    return torch.cat([every[i] for i in heads.load_tiny(name).capture], -1)


def text(length: int, seed: int) -> list[int]:
    return torch.randint(1, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_ragged_rows_give_what_each_gives_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of different length, taken in together in parts of five, drafting on, committing more, drafting on."""
    import decoder.heads.runner

    monkeypatch.setattr(decoder.heads.runner, "PREFILL_CHUNK", 5)
    together, texts = runner(name), [text(n, n) for n in (4, 17, 9)]
    together.reset(3)
    known = [0, 0, 0]
    for new in ((4, 17, 9), (1, 3, 0), (0, 1, 2)):
        grown = [k + n for k, n in zip(known, new, strict=True)]
        for row, size in enumerate(grown):
            texts[row] += text(size + 1 - len(texts[row]), 50 + size)
        width = max(new)
        ids, features = torch.zeros(3, width, dtype=torch.long), torch.full((3, width, 0), 0.0)
        parts = []
        for row, (a, b) in enumerate(zip(known, grown, strict=True)):
            ids[row, : b - a] = torch.tensor(texts[row][a + 1 : b + 1])
            parts.append(captured(texts[row], name)[a:b])
        features = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=7.0)
        logits = [together.take_in(ids, features, list(new))]
        drafts = [torch.tensor([[11], [12], [13]]), torch.tensor([[21], [22], [23]])]
        logits += [together.step(draft) for draft in drafts]
        known = grown
        assert together.lengths == known
        for row, n in enumerate(new):
            if n == 0:
                continue  # nothing new: what it drafts from is meaningless
            alone = runner(name)
            alone.reset(1)
            everything = torch.tensor([texts[row][1 : known[row] + 1]])
            ours = [alone.take_in(everything, captured(texts[row], name)[None, : known[row]], [known[row]])]
            ours += [alone.step(draft[row : row + 1]) for draft in drafts]
            for a, b in zip(logits, ours, strict=True):
                assert torch.allclose(a[row], b[0], **CLOSE)


def test_rows_that_stay_keep_their_cache() -> None:
    head = runner()
    texts = [text(n, n) for n in (6, 9, 7)]
    head.reset(3)
    features = torch.nn.utils.rnn.pad_sequence([captured(t, "eagle3")[:-1] for t in texts], batch_first=True)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(t[1:]) for t in texts], batch_first=True)
    head.take_in(ids, features, [5, 8, 6])
    head.select([0, 2])
    assert head.lengths == [5, 6]
    more = [text(8, 90), text(8, 91)]
    longer = [texts[0] + more[0][:1], texts[2] + more[1][:1]]
    new = torch.stack([captured(t, "eagle3")[len(t) - 2 : len(t) - 1] for t in longer])
    logits = head.take_in(torch.tensor([[t[-1]] for t in longer]), new, [1, 1])
    for row, whole in enumerate(longer):
        alone = runner()
        alone.reset(1)
        expected = alone.take_in(torch.tensor([whole[1:]]), captured(whole, "eagle3")[None, :-1], [len(whole) - 1])
        assert torch.allclose(logits[row], expected[0], **CLOSE)
    head.reset(2)
    assert head.cache.rows[0].keys is None, "rows that left still lie in the old buffers"


def test_trees_are_drafted_one_row_at_a_time() -> None:
    head = runner()
    head.reset(2)
    head.take_in(torch.tensor([[3], [4]]), torch.zeros(2, 1, 192), [1, 1])
    with pytest.raises(ValueError, match="one row at a time"):
        head.branch([5], [None])


def test_spread_puts_scores_where_the_target_has_the_token() -> None:
    logits = spread(torch.tensor([[[1.0, 2.0]]]), torch.tensor([3, 1]), 5)
    assert logits.tolist() == [[[-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]]]
    assert spread(logits, None, 5) is logits


# --- texts that outgrow the head ------------------------------------------------------------------------------------


def short_sighted(tmp_path: Path, context: int) -> SpeculativeDecoder:
    config, tensors = heads.eagle(predictable())
    config["max_position_embeddings"] = context
    proposer = heads.load_proposer(heads.save(tmp_path, (config, tensors)), "eagle", predictable())
    return tiny_decoder(proposer, runner_of(predictable()))


def test_a_head_drafts_up_to_its_context_and_then_no_more(tmp_path: Path) -> None:
    decoder = short_sighted(tmp_path, 40)
    plain = SpeculativeDecoder(decoder.target)
    ask = partial(request_for, "eagle", max_new_tokens=60, ignore_eos=True, k=4)
    run = decoder.run(ask("The quick brown fox"))
    assert violations(run) == []
    assert run.output_ids == plain.run(ask("The quick brown fox")).output_ids
    length = len(run.prompt_ids)
    drafted_at = []
    for step in run.steps:
        if step.drafts:
            drafted_at.append(length + len(step.drafts))
        length += len(step.emitted)
    assert max(drafted_at) == 40
    long = decoder.run(ask("The quick brown fox jumps over the lazy dog. " * 4))
    assert long.metrics["not_speculating"] == "the text is longer than the head's context of 40 tokens"
    assert long.output_ids == plain.run(ask("The quick brown fox jumps over the lazy dog. " * 4)).output_ids


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_a_tree_is_no_deeper_than_the_heads_context(tree: str, tmp_path: Path) -> None:
    decoder = short_sighted(tmp_path, 30)
    request = request_for("eagle", "The quick brown fox", max_new_tokens=40, ignore_eos=True, k=6, tree=tree)
    run = decoder.run(request)
    assert run.output_ids == SpeculativeDecoder(decoder.target).run(request).output_ids


def test_a_row_that_has_outgrown_the_head_does_not_hold_up_its_neighbours(tmp_path: Path) -> None:
    decoder = short_sighted(tmp_path, 60)
    requests = [
        request_for("eagle", "The quick brown fox jumps over the lazy dog. " * 8, max_new_tokens=30, ignore_eos=True),
        request_for("eagle", "fox", max_new_tokens=30, ignore_eos=True, k=3),
    ]
    alone = [decoder.run(request) for request in requests]
    long, short = decoder.generate(requests)
    assert [long.output_ids, short.output_ids] == [run.output_ids for run in alone]
    assert long.metrics["num_draft_tokens"] == 0
    assert [len(s.drafts) for s in short.steps] == [len(s.drafts) for s in alone[1].steps]


def test_memory_does_not_grow_with_runs() -> None:
    decoder = every_decoder("eagle3", "fused")
    proposer: Any = decoder.proposer
    sizes = []
    for n in (20, 90, 20, 90):
        decoder.run(request_for("eagle3", "fox", max_new_tokens=n, ignore_eos=True))
        sizes.append(proposer.runner.cache.rows[0].keys.numel())
        assert all(sum(len(part) for part in row) <= 8 for row in proposer._states.parts)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("tree", ["chain", "static"])
def test_a_head_that_breaks_down_costs_time_once(tree: str) -> None:
    """NaN in its cache is gone at the next run: a slot that is masked by weight 0 would still poison its readers."""
    proposer: Any = heads.tiny_head("eagle")
    decoder = tiny_decoder(proposer, runner_of(predictable()))
    request = request_for("eagle", "The quick brown fox", max_new_tokens=25, ignore_eos=True, k=3, tree=tree)
    sound = decoder.run(request)
    head, run = proposer.runner.head, proposer.runner.head.run
    try:
        head.run = lambda *args: run(*args) + torch.nan
        broken = decoder.run(request)
        for layer in proposer.runner.cache.rows:
            layer.keys = torch.full_like(layer.keys, torch.nan)
            layer.values = torch.full_like(layer.values, torch.nan)
    finally:
        head.run = run
    assert broken.output_ids == sound.output_ids
    assert broken.metrics["num_draft_tokens"] == 0
    assert "not numbers" in broken.metrics["not_speculating"]
    again = decoder.run(request)
    assert [[d.id for d in s.drafts] for s in again.steps] == [[d.id for d in s.drafts] for s in sound.steps]
