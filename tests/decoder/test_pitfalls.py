"""Faults that public implementations had (pitfalls.md), each on the whole engine with a toy vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch

from decoder.proposers.draft_model import DraftModelProposer
from decoder.trace import Run, Source, Verdict, violations
from tests.statistics import LIMIT, fits
from tests.toys import Recite, TableRunner, ToyTokenizer, ask, log, toy_decoder

V = 6
P = [0.05, 0.30, 0.10, 0.25, 0.20, 0.10]
Q = [0.30, 0.05, 0.25, 0.10, 0.10, 0.20]


def rotated(row: list[float], by: int) -> list[float]:
    """Another row for every last token, so that a wrong position shows."""
    return row[by % len(row) :] + row[: by % len(row)]


def p_row(prefix: tuple[int, ...]) -> list[float]:
    return log(rotated(P, prefix[-1]))


def q_row(prefix: tuple[int, ...]) -> list[float]:
    return log(rotated(Q, 2 * prefix[-1]))


def sound(run: Run) -> Run:
    assert violations(run) == []
    return run


def sample_outputs(decoder, n: int, tokens: int, **sampling) -> list[tuple[int, ...]]:
    outputs = []
    for seed in range(n):
        run = decoder.run(ask("a", max_new_tokens=tokens, **{"k": 4, **sampling, "seed": seed}))
        outputs.append(run.output_ids)
    return outputs


def exact(length: int, row=P, transform=lambda r: r) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first ``length`` tokens behind prompt token 0."""
    found = {}
    for ids in itertools.product(range(V), repeat=length):
        probability, last = 1.0, 0
        for token in ids:
            probability *= transform(rotated(row, last))[token]
            last = token
        found[ids] = probability
    return found


# --- distribution ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4])
def test_sampled_output_has_the_targets_distribution(k: int):
    """Token by token and in pairs, with a draft that is wrong about everything."""
    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V)))
    outputs = sample_outputs(decoder, 3000, 3, temperature=1.0, k=k)
    assert fits([o[:2] for o in outputs], exact(2)) > LIMIT
    assert fits([o[1:3] for o in outputs], _pairs_after_first()) > LIMIT


def _pairs_after_first() -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    for ids, probability in exact(3).items():
        found[ids[1:]] = found.get(ids[1:], 0.0) + probability
    return found


def test_an_argmax_draft_with_softmax_q_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Negative control of the test above: the draft runs greedily while softmax(q) enters the ratio."""
    import decoder.proposers.chain as module

    monkeypatch.setattr(module, "draw", lambda probs, u: probs.argmax(-1))
    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V)))
    outputs = sample_outputs(decoder, 3000, 3, temperature=1.0, k=4)
    assert fits([o[1:3] for o in outputs], _pairs_after_first()) < 1e-6


def test_sampling_parameters_reach_the_target_rows():
    """Temperature 0.3 and top-p 0.5: the output follows the processed p, not p."""

    def processed(row: list[float]) -> list[float]:
        sharp = [x ** (1 / 0.3) for x in row]
        total = sum(sharp)
        sharp = [x / total for x in sharp]
        kept, mass = [0.0] * V, 0.0
        for i in sorted(range(V), key=lambda i: -sharp[i]):
            if mass < 0.5:
                kept[i] = sharp[i]
            mass += sharp[i]
        return [x / sum(kept) for x in kept]

    flat = [0.05, 0.28, 0.08, 0.27, 0.24, 0.08]  # so flat that several tokens survive
    decoder = toy_decoder(lambda prefix: log(rotated(flat, prefix[-1])), V, DraftModelProposer(TableRunner(q_row, V)))
    outputs = sample_outputs(decoder, 1500, 3, temperature=0.3, top_p=0.5)
    expected: dict[tuple[int, ...], float] = {}
    for ids, probability in exact(3, row=flat, transform=processed).items():
        expected[ids[1:]] = expected.get(ids[1:], 0.0) + probability
    assert fits([o[1:3] for o in outputs], expected) > LIMIT


def test_a_one_hot_proposer_keeps_the_distribution():
    decoder = toy_decoder(p_row, V, Recite(lambda tokens, k: [1, 3, 1, 3][:k]))
    outputs = sample_outputs(decoder, 3000, 3, temperature=1.0)
    assert fits([o[1:3] for o in outputs], _pairs_after_first()) > LIMIT


# --- what is stored -------------------------------------------------------------------------------------------------


def test_recorded_p_and_q_are_the_rows_behind_the_prompt():
    """A prompt of 7 and k = 3: row t follows the prompt and t drafts, nothing earlier and nothing later."""
    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V)))
    run = sound(decoder.run(ask("abcdefa", k=3, max_new_tokens=12, temperature=1.0, seed=4)))
    last = run.output_ids[0]
    for step in run.steps[1:]:
        before = last
        for draft in step.drafts:
            assert draft.q == pytest.approx(rotated(Q, 2 * before)[draft.id], abs=1e-6)
            if draft.verdict is not Verdict.UNTESTED:
                assert draft.p == pytest.approx(rotated(P, before)[draft.id], abs=1e-6)
                assert draft.accept_prob == pytest.approx(min(1.0, draft.p / draft.q), abs=1e-5)
                assert (draft.u < draft.accept_prob) == (draft.verdict is Verdict.ACCEPTED)
            before = draft.id
        last = step.emitted[-1].id


def test_stored_q_is_the_processed_array_that_was_drawn_from():
    """top_k = 2, temperature 0.5: q and p sum to 1 over two tokens."""
    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V)))
    run = sound(decoder.run(ask(k=3, max_new_tokens=30, temperature=0.5, top_k=2, seed=1)))
    seen = 0
    for step in run.steps:
        for draft in step.drafts:
            assert len(draft.top_q) == 2
            assert sum(t.probability for t in draft.top_q) == pytest.approx(1.0, abs=1e-6)
            assert draft.q in [pytest.approx(t.probability) for t in draft.top_q]
            seen += 1
    assert seen


def test_a_proposer_without_probabilities_has_q_1():
    decoder = toy_decoder(p_row, V, Recite(lambda tokens, k: [1, 2][:k]))
    run = sound(decoder.run(ask(k=2, max_new_tokens=20, temperature=1.0)))
    drafts = [d for s in run.steps for d in s.drafts]
    assert drafts
    assert all(d.q == 1.0 and d.top_q == () for d in drafts)


def test_p_of_every_emitted_token_equals_plain_decoding():
    plain = toy_decoder(p_row, V).run(ask(proposer="none", max_new_tokens=40))
    fast = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V))).run(ask(k=4, max_new_tokens=40))
    a = [(e.id, e.p) for s in plain.steps for e in s.emitted]
    b = [(e.id, e.p) for s in fast.steps for e in s.emitted]
    assert [x for x, _ in a] == [x for x, _ in b]
    assert [p for _, p in a] == pytest.approx([p for _, p in b], abs=1e-5)


def test_a_rejection_keeps_the_residuals_top():
    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V)))
    run = sound(decoder.run(ask(k=2, max_new_tokens=60, temperature=1.0)))
    rejections = [(s, d) for s in run.steps for d in s.drafts if d.verdict is Verdict.REJECTED]
    assert rejections
    for step, draft in rejections:
        assert sum(t.probability for t in step.residual_top) == pytest.approx(1.0, abs=1e-5)
        assert draft.id not in [t.id for t in step.residual_top]
        assert step.emitted[-1].id in [t.id for t in step.residual_top]
        assert step.emitted[-1].source is Source.CORRECTED


# --- stops ----------------------------------------------------------------------------------------------------------


def certain(script: list[int]):
    """A target that always continues ``script`` behind a one-token prompt."""

    def rows(prefix: tuple[int, ...]) -> list[float]:
        at = len(prefix) - 1
        want = script[at] if at < len(script) else 0
        return [30.0 if i == want else 0.0 for i in range(26)]

    return rows


def follow(script: list[int]):
    return lambda tokens, k: script[len(tokens) - 1 : len(tokens) - 1 + k]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_inside_an_accepted_run_ends_it(temperature: float):
    script = [1, 2, 9, 3, 4]
    decoder = toy_decoder(certain(script), 26, Recite(follow(script)), eos=[9])
    run = sound(decoder.run(ask(k=3, max_new_tokens=20, temperature=temperature)))
    assert run.output_ids == (1, 2, 9)
    assert run.finish_reason == "eos"
    assert [d.verdict for d in run.steps[-1].drafts] == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.UNTESTED]
    assert all(e.source is Source.ACCEPTED for e in run.steps[-1].emitted)


def test_a_stop_id_inside_an_accepted_run_leaves_nothing_behind():
    script = [10, 11, 7, 20, 21, 22]
    decoder = toy_decoder(certain(script), 26, Recite(follow(script)))
    run = sound(decoder.run(ask(k=5, max_new_tokens=20, stop_ids=(7,))))
    assert run.output_ids == (10, 11, 7)
    assert run.finish_reason == "stop"


def test_a_stop_string_across_two_rounds():
    script = [1, 2, 3, 4, 5, 6]  # b c d e f g
    decoder = toy_decoder(certain(script), 26, Recite(follow(script)))
    run = sound(decoder.run(ask(k=1, max_new_tokens=20, stop=("def",))))
    assert run.text == "bc"
    assert run.finish_reason == "stop"
    assert run.output_ids == (1, 2, 3, 4, 5)


def test_the_earliest_of_several_stop_strings_ends_the_text():
    script = [1, 2, 3, 4, 5, 6]
    decoder = toy_decoder(certain(script), 26, Recite(follow(script)))
    run = sound(decoder.run(ask(k=5, max_new_tokens=20, stop=("f", "cd"))))
    assert run.text == "b"


@pytest.mark.parametrize("k", [1, 2, 4, 32])
@pytest.mark.parametrize("limit", [1, 2, 4, 5, 33])
def test_max_new_tokens_is_met_exactly(k: int, limit: int):
    script = [i % 7 for i in range(100)]
    decoder = toy_decoder(certain(script), 26, Recite(follow(script)))
    run = sound(decoder.run(ask(k=k, max_new_tokens=limit)))
    assert len(run.output_ids) == limit
    assert run.finish_reason == "length"


def test_a_text_that_fills_the_context_stops_there():
    script = [1, 2, 3, 4] * 10
    decoder = toy_decoder(certain(script), 26, Recite(follow(script)), context=12)
    run = sound(decoder.run(ask(k=4, max_new_tokens=100)))
    assert len(run.prompt_ids) + len(run.output_ids) == 12
    assert run.finish_reason == "length"


# --- caches and positions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", range(5))
def test_the_targets_cache_holds_exactly_the_committed_text(forced: int):
    """Accept lengths 0..k forced in every step: the runner's prefix is checked by its table at every position."""
    script = [(3 * i + i // 5) % 11 for i in range(220)]

    def almost(tokens: list[int], k: int) -> list[int]:
        right = script[len(tokens) - 1 : len(tokens) - 1 + k]
        return [t if i < forced else 25 for i, t in enumerate(right)]

    decoder = toy_decoder(certain(script), 26, Recite(almost))
    run = sound(decoder.run(ask(k=4, max_new_tokens=200)))
    assert list(run.output_ids) == script[:200]
    assert {s.num_accepted for s in run.steps[1:-2] if len(s.drafts) == 4} == {forced}
    assert decoder.target.runner.cached() == [0, *script[:199]]


def test_a_draft_that_is_a_copy_of_the_target_is_always_accepted():
    """50 steps: the draft must have the keys and values of its own last token after a full accept."""
    for temperature in (0.0, 1.0):
        decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(p_row, V)))
        run = sound(decoder.run(ask(k=4, max_new_tokens=251, temperature=temperature)))
        assert run.metrics["draft_acceptance_rate"] == 1.0
        full = run.steps[1:-1]
        assert len(full) >= 49
        assert all(len(s.emitted) == 5 and s.emitted[-1].source is Source.BONUS for s in full)


def test_the_draft_cache_rewinds_to_what_was_accepted():
    """After a accepts it holds committed - 1 tokens and all of them right; a full accept costs no extra pass."""
    runner = TableRunner(q_row, V)
    proposer = DraftModelProposer(runner)
    decoder = toy_decoder(p_row, V, proposer)
    stream = decoder.stream(ask(k=3, max_new_tokens=80, temperature=1.0, seed=2))
    text = list(stream.run.prompt_ids)
    text += [e.id for e in next(stream).emitted]
    widths = []
    for step in stream:
        before = len(text)
        passes = [w for _, w in runner.passes]
        text += [e.id for e in step.emitted]
        if step.drafts:
            kept = runner.cached()
            assert kept == text[: len(kept)], "the draft's cache holds what was never committed"
            assert len(kept) == before + min(step.num_accepted, len(step.drafts) - 1)
            widths.append(passes[-len(step.drafts)])
            assert len(passes) == sum(len(s.drafts) for s in stream.run.steps)
    assert set(widths[1:]) <= {1, 2}
    assert 2 in widths


def test_draft_rows_after_a_partial_accept_are_those_of_a_fresh_prefill():
    """Output right but acceptance low: what a drafter at wrong positions looks like. q is checked against the table."""

    def deep(prefix: tuple[int, ...]) -> list[float]:
        return log(rotated(Q, sum((i + 1) * t for i, t in enumerate(prefix))))

    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(deep, V)))
    run = sound(decoder.run(ask(k=4, max_new_tokens=80, temperature=1.0)))
    text = [*run.prompt_ids]
    for step in run.steps:
        prefix = list(text)
        for draft in step.drafts:
            expected = torch.tensor(deep(tuple(prefix))).softmax(-1)[draft.id]
            assert draft.q == pytest.approx(float(expected), abs=1e-6)
            prefix.append(draft.id)
        text += [e.id for e in step.emitted]


# --- state that drafts must not advance -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.4, "logit_bias": ((2, 1.5),)}],
)
def test_penalties_follow_each_rows_own_history(penalties: dict):
    """Repeating drafts under a penalty: equal to plain decoding, and rejected drafts leave no trace in the state."""
    plain = toy_decoder(p_row, V).run(ask(proposer="none", max_new_tokens=60, **penalties))
    for script in (lambda tokens, k: [tokens[-1]] * k, lambda tokens, k: ([1, 3] * k)[:k]):
        fast = sound(toy_decoder(p_row, V, Recite(script)).run(ask(k=4, max_new_tokens=60, **penalties)))
        assert fast.output_ids == plain.output_ids
    fast = toy_decoder(p_row, V, DraftModelProposer(TableRunner(p_row, V))).run(
        ask(k=4, max_new_tokens=60, **penalties)
    )
    assert fast.output_ids == plain.output_ids
    assert fast.metrics["draft_acceptance_rate"] == 1.0, "the draft's own history is not the row's"


def test_temperature_0_still_speculates_and_says_so():
    run = toy_decoder(p_row, V, DraftModelProposer(TableRunner(p_row, V))).run(ask(k=4, max_new_tokens=20))
    assert run.metrics["num_draft_tokens"] > 0
    assert run.metrics["not_speculating"] is None


def test_a_run_that_drafted_nothing_says_why_and_has_no_rate():
    run = toy_decoder(p_row, V, Recite(lambda tokens, k: [])).run(ask(k=4, max_new_tokens=20, proposer="ngram"))
    assert run.metrics["draft_acceptance_rate"] is None
    assert run.metrics["not_speculating"] == "the script has nothing"
    plain = toy_decoder(p_row, V).run(ask(proposer="none", max_new_tokens=20))
    assert plain.metrics["not_speculating"] is None


# --- broken numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", [1, 6])
def test_nan_logits_stop_the_run_with_its_steps_and_no_invalid_id(temperature: float, where: int):
    def rows(prefix: tuple[int, ...]) -> list[float]:
        return [float("nan")] * V if len(prefix) >= where else p_row(prefix)

    for proposer in (None, Recite(lambda tokens, k: [1, 2][:k])):
        run = sound(toy_decoder(rows, V, proposer).run(ask(k=2, max_new_tokens=30, temperature=temperature)))
        assert run.finish_reason == "error"
        assert "not numbers" in run.error
        assert all(0 <= i < V for i in run.output_ids)
        assert len(run.output_ids) < 30
        assert bool(run.output_ids) == (where > 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_breaks_down_only_costs_time(temperature: float):
    def broken(prefix: tuple[int, ...]) -> list[float]:
        return [float("nan")] * V if len(prefix) > 5 else q_row(prefix)

    run = sound(
        toy_decoder(p_row, V, DraftModelProposer(TableRunner(broken, V))).run(
            ask(k=3, max_new_tokens=30, temperature=temperature, seed=5)
        )
    )
    assert run.finish_reason == "length"
    assert len(run.output_ids) == 30
    if temperature == 0:
        assert run.output_ids == toy_decoder(p_row, V).run(ask(proposer="none", max_new_tokens=30)).output_ids


def test_p_equal_to_q_up_to_rounding_never_gives_nan():
    def almost(prefix: tuple[int, ...]) -> list[float]:
        return [x * (1 + 1e-7) for x in p_row(prefix)]

    run = sound(
        toy_decoder(p_row, V, DraftModelProposer(TableRunner(almost, V))).run(
            ask(k=4, max_new_tokens=300, temperature=1.0)
        )
    )
    assert run.metrics["draft_acceptance_rate"] > 0.99


# --- trees in the engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_keeps_the_accepted_path_in_the_cache(temperature: float):
    """Siblings at two depths; the second branch is the right one, so kept slots must be moved together."""
    script = [(5 * i) % 13 for i in range(100)]

    def branches(tokens: list[int], k: int) -> list[int]:
        right = script[len(tokens) - 1 : len(tokens) + 1]
        if len(right) < 2:
            return []
        return [20, right[0], 21, right[1], 22, 23]

    decoder = toy_decoder(
        certain(script), 26, Recite(branches, lambda n: [None, None, 1, 1, 0, 3]), tokenizer=ToyTokenizer()
    )
    run = sound(decoder.run(ask(k=3, max_new_tokens=60, temperature=temperature)))
    assert list(run.output_ids) == script[:60]
    assert decoder.target.runner.cached() == [0, *script[:59]]
    assert [d.verdict for d in run.steps[1].drafts] == [
        Verdict.REJECTED,
        Verdict.ACCEPTED,
        Verdict.REJECTED,
        Verdict.ACCEPTED,
        Verdict.UNTESTED,
        Verdict.REJECTED,
    ]


# --- sameness -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    decoder = toy_decoder(p_row, V, DraftModelProposer(TableRunner(q_row, V)))
    runs = [decoder.run(ask(k=3, max_new_tokens=30, temperature=1.0, seed=s)).output_ids for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
