"""Draft length policies in the engine: nothing is lost, greedy or sampled, and the trace says what was decided."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from decoder.errors import RequestError, TraceError
from decoder.proposers.base import Proposal
from decoder.proposers.draft_model import DraftModelProposer
from decoder.request import DRAFT_LENGTHS, GenerationRequest
from decoder.trace import Run, Step, violations
from tests.decoder.every_proposer import EVERY, WITH_PROBABILITIES, every_decoder, request_for
from tests.decoder.test_batch import essence
from tests.statistics import LIMIT, fits
from tests.tiny import PATHS, tiny_decoder
from tests.toys import Recite, TableRunner, ask, log, toy_decoder

V = 6
P = [0.05, 0.30, 0.10, 0.25, 0.20, 0.10]
PEAKED = [0.05, 0.55, 0.15, 0.05, 0.15, 0.05]
FLAT = [0.20, 0.15, 0.17, 0.16, 0.17, 0.15]
LIMIT_OF_TOYS = 0.4
"""Between the largest probabilities of the two draft rows."""
ADAPTIVE = [policy for policy in DRAFT_LENGTHS if policy != "fixed"]


def turned(row: list[float], by: int) -> list[float]:
    return row[by % V :] + row[: by % V]


def p_row(prefix: tuple[int, ...]) -> list[float]:
    return log(turned(P, prefix[-1]))


def q_row(prefix: tuple[int, ...]) -> list[float]:
    """Sure of itself behind every other token only, and then too sure."""
    return log(turned(PEAKED if prefix[-1] % 2 else FLAT, prefix[-1]))


def toy(proposer: Any = None) -> Any:
    return toy_decoder(p_row, V, proposer or DraftModelProposer(TableRunner(q_row, V)))


@pytest.fixture
def erratic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that make ``auto`` change its mind all the time."""
    rng = random.Random(7)

    def now() -> Iterator[float]:
        at = 0.0
        while True:
            at += rng.expovariate(1.0)
            yield at

    ticks = now()
    monkeypatch.setattr("decoder.clock.time.perf_counter", lambda: next(ticks))


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("key", [key for key in EVERY if key != "none"])
@pytest.mark.usefixtures("erratic_clock")
def test_greedy_text_does_not_depend_on_the_policy(key: str, path: str) -> None:
    decoder = every_decoder(key, path)
    prompt = "The quick brown fox jumps. The quick brown fox"
    base = request_for(key, prompt, max_new_tokens=70, ignore_eos=True)
    expected = tiny_decoder(None, decoder.target.runner).run(base.baseline()).output_ids
    for policy in ADAPTIVE:
        if policy == "confidence" and key not in WITH_PROBABILITIES:
            continue
        for k, confidence in ((3, 0.02), (32, 0.2)):
            run = decoder.run(base.replace(draft_length=policy, k=k, confidence=confidence))
            assert run.output_ids == expected, (policy, k)
            assert violations(run) == []
            assert run.metrics["num_draft_tokens"] > 0 or k > 3 or key not in WITH_PROBABILITIES
            assert all(len(step.drafts) <= step.k <= k for step in run.steps)


def _sampled(decoder: Any, n: int, **changes: Any) -> tuple[list[tuple[int, ...]], list[Run]]:
    runs = [
        decoder.run(ask("a", proposer="draft-model", max_new_tokens=4, temperature=1.0, seed=seed, **changes))
        for seed in range(n)
    ]
    return [run.output_ids for run in runs], runs


def _triples() -> dict[tuple[int, ...], float]:
    """Exact distribution of the tokens 2 to 4 behind the prompt "a"."""
    found: dict[tuple[int, ...], float] = {}
    for a, pa in enumerate(P):
        for b, pb in enumerate(turned(P, a)):
            for c, pc in enumerate(turned(P, b)):
                for d, pd in enumerate(turned(P, c)):
                    found[b, c, d] = found.get((b, c, d), 0.0) + pa * pb * pc * pd
    return found


@pytest.mark.parametrize("policy", DRAFT_LENGTHS)
@pytest.mark.usefixtures("erratic_clock")
def test_sampled_text_keeps_the_distribution(policy: str) -> None:
    outputs, runs = _sampled(toy(), 2500, draft_length=policy, k=3, confidence=LIMIT_OF_TOYS)
    assert fits([o[1:4] for o in outputs], _triples()) > LIMIT
    if policy == "confidence":
        lengths = {len(step.drafts) for run in runs for step in run.steps[1:2]}
        assert lengths == {0, 1, 2}


@pytest.mark.parametrize("policy", ["moving-average", "auto"])
@pytest.mark.usefixtures("erratic_clock")
def test_long_sampled_texts_keep_the_distribution_while_k_changes(policy: str) -> None:
    """Pairs of neighbours within long runs, where k has been many things (also 0 with ``auto``)."""
    pairs: list[tuple[int, int]] = []
    ks: set[int] = set()
    for seed in range(30):
        run = toy().run(
            ask("a", proposer="draft-model", max_new_tokens=150, temperature=1.0, seed=seed, k=8, draft_length=policy)
        )
        ks |= {step.k for step in run.steps[1:-8]}
        # The token's own offset from the row of the one before it: independent draws from P.
        pairs += [(b + a) % V for a, b in zip(run.output_ids, run.output_ids[1:], strict=False)]
    assert fits(pairs, dict(enumerate(P))) > LIMIT
    assert len(ks) >= 3
    if policy == "auto":
        assert 0 in ks


class Peeks(DraftModelProposer):
    """Negative control: drops a draft after seeing it, where its own probability is low."""

    def propose(self, ks: Sequence[int], u: Tensor) -> Proposal:
        proposal = super().propose(ks, u)
        assert proposal.q is not None
        own = proposal.q.gather(2, proposal.ids[..., None]).squeeze(2)
        kept = (own >= LIMIT_OF_TOYS).long().cumprod(1).sum(1)
        proposal.counts = proposal.counts.minimum(kept)
        return proposal


def test_a_draft_dropped_after_it_was_drawn_is_caught() -> None:
    outputs, _ = _sampled(toy(Peeks(TableRunner(q_row, V))), 2500, k=3)
    assert fits([o[1:4] for o in outputs], _triples()) < 1e-6


@pytest.mark.parametrize("key", WITH_PROBABILITIES)
def test_rows_with_policies_of_their_own_are_what_they_are_alone(key: str) -> None:
    """All but ``auto``, which goes by time; a sure row goes on while an unsure neighbour has stopped."""
    decoder = every_decoder(key, "fused")
    requests = [
        request_for(key, "The quick", k=8, max_new_tokens=40, ignore_eos=True, draft_length="confidence"),
        request_for(key, "def f(x):", k=5, max_new_tokens=50, ignore_eos=True),
        request_for(
            key, "fox", k=6, max_new_tokens=45, temperature=0.9, seed=4, draft_length="confidence", confidence=0.15
        ),
        request_for(key, "x x x", k=32, max_new_tokens=60, ignore_eos=True, draft_length="moving-average"),
    ]
    alone = [decoder.run(request) for request in requests]
    together = decoder.generate(requests)
    assert [essence(run) for run in together] == [essence(run) for run in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert [s.k_reason for s in ours.steps] == [s.k_reason for s in theirs.steps]


def test_auto_in_a_batch_is_greedy_exact() -> None:
    decoder = every_decoder("draft-model, poor", "fused")
    requests = [
        request_for("draft-model", p, k=16, max_new_tokens=n, ignore_eos=True, draft_length="auto")
        for p, n in (("The quick", 90), ("fox", 20), ("def f(x):", 60))
    ]
    plain = tiny_decoder(None, decoder.target.runner)
    for run, request in zip(decoder.generate(requests), requests, strict=True):
        assert run.output_ids == plain.run(request.baseline()).output_ids


# --- what the trace says ----------------------------------------------------------------------------------------------


def test_confidence_stops_before_an_unsure_token_and_says_so() -> None:
    run = toy().run(
        ask(
            "a", proposer="draft-model", k=6, max_new_tokens=120, temperature=1.0, seed=3,
            draft_length="confidence", confidence=LIMIT_OF_TOYS,
        )
    )  # fmt: skip
    before, counts = run.output_ids[0], set()
    for step in run.steps[1:]:
        for draft in step.drafts:
            assert before % 2 == 1, "drafted behind a token where the draft is unsure"
            before = draft.id
        if len(step.drafts) < step.k:
            assert before % 2 == 0
            assert step.k_reason == "the draft's likeliest next token had 0.20, below the confidence of 0.4"
            counts.add(len(step.drafts))
        elif step.k == 6:
            assert step.k_reason is None
        before = step.emitted[-1].id
    assert {0, 1, 2} <= counts


def test_a_confidence_that_nothing_reaches_drafts_nothing_and_says_why() -> None:
    draft = TableRunner(lambda prefix: log(FLAT), V)
    run = toy(DraftModelProposer(draft)).run(
        ask("a", proposer="draft-model", k=4, max_new_tokens=20, draft_length="confidence", confidence=0.99)
    )
    assert run.metrics["num_draft_tokens"] == 0
    assert run.metrics["not_speculating"] == "the draft's likeliest next token had 0.20, below the confidence of 0.99"
    # Each round asks the draft once: nobody pays for tokens that are not wanted.
    assert len(draft.passes) == len([s for s in run.steps if s.k > 0])


def test_confidence_spares_the_passes_behind_the_last_row_that_goes_on() -> None:
    draft = TableRunner(lambda prefix: log(PEAKED if prefix[-1] == 0 else FLAT), V)
    decoder = toy_decoder(lambda prefix: log(P), V, DraftModelProposer(draft))
    request = ask("a", proposer="draft-model", k=5, max_new_tokens=30, draft_length="confidence", confidence=0.4)
    decoder.run(request)
    assert max(n for _, n in draft.passes) <= 2
    assert len(draft.passes) <= 30


def test_moving_average_and_auto_give_their_reasons() -> None:
    script = [1, 2, 3, 4, 5] * 40

    def certain(prefix: tuple[int, ...]) -> list[float]:
        return [9.0 if i == script[len(prefix) - 1] else 0.0 for i in range(V)]

    decoder = toy_decoder(certain, V, Recite(lambda tokens, k: script[len(tokens) - 1 : len(tokens) - 1 + k]))
    run = decoder.run(ask("a", k=8, max_new_tokens=100, draft_length="moving-average"))
    assert [s.k for s in run.steps[1:6]] == [4] * 5
    assert {s.k for s in run.steps[8:12]} == {8}
    assert "accepted on average, so 8 of up to 8 are drafted" in (run.steps[8].k_reason or "")
    run = decoder.run(ask("a", k=8, max_new_tokens=150, draft_length="auto"))
    assert [s.k for s in run.steps[1:6]] == [4, 4, 4, 0, 0]
    assert run.steps[1].k_reason == "a first try of 4"
    assert run.steps[4].k_reason == "a round without drafts, to know its time"
    assert all(s.k_reason for s in run.steps[1:])


def test_a_draft_cut_by_the_length_limit_says_so() -> None:
    run = toy(Recite(lambda tokens, k: [1] * k)).run(ask("a", k=4, max_new_tokens=3))
    assert (run.steps[1].k, run.steps[1].k_reason) == (1, "only 2 more tokens may be written")


def test_a_round_without_drafts_is_fine_for_every_proposer_and_is_caught_up_with() -> None:
    """``commit`` is called after rounds of k = 0, and a draft model then takes in what it missed."""
    draft = TableRunner(p_row, V)
    decoder = toy(DraftModelProposer(draft))
    run = decoder.run(ask("a", proposer="draft-model", k=4, max_new_tokens=60, draft_length="auto"))
    assert {0, 4} <= {s.k for s in run.steps[1:-4]}
    drafted = [s for s in run.steps if s.drafts]
    assert all(s.num_accepted == len(s.drafts) for s in drafted)


def test_old_steps_without_a_reason_are_read_and_new_ones_come_back() -> None:
    run = toy().run(ask("a", proposer="draft-model", k=4, max_new_tokens=30, draft_length="moving-average"))
    data = json.loads(json.dumps(run.to_json()))
    assert Run.from_json(data) == run
    assert any(step.k_reason for step in run.steps)
    old = copy.deepcopy(data)
    for step in old["steps"]:
        del step["k_reason"]
    read = Run.from_json(old)
    assert {step.k_reason for step in read.steps} == {None}
    assert Step.from_json({**data["steps"][1], "k_reason": None}).k_reason is None
    with pytest.raises(TraceError, match="k_reason"):
        Step.from_json({**data["steps"][1], "k_reason": 3})


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_length": "clever"}, "unknown draft length 'clever': choose one of fixed, confidence"),
        ({"draft_length": None}, "draft length must be text"),
        ({"confidence": 1.5}, "confidence must be at least 0 and at most 1"),
        ({"confidence": "high"}, "confidence must be a number"),
        ({"draft_length": "confidence", "proposer": "ngram"}, "ngram looks its drafts up"),
    ],
)
def test_bad_lengths_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationRequest("x", proposer="draft-model").replace(**changes).validate()


def test_requests_from_before_there_were_policies_are_read() -> None:
    new = GenerationRequest("x", proposer="ngram", draft_length="auto", confidence=0.3)
    assert GenerationRequest.from_json(new.to_json()) == new
    old = new.to_json()
    del old["draft_length"], old["confidence"]
    assert GenerationRequest.from_json(old).draft_length == "fixed"
    assert new.baseline().draft_length == "fixed"
