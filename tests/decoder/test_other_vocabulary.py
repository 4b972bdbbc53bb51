"""Drafting with another vocabulary: exact whatever the draft writes, right where the draft is right, rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decoder.engine import SpeculativeDecoder, Target
from decoder.proposers.base import Proposal
from decoder.proposers.other_vocabulary import OtherVocabularyProposer
from decoder.request import GenerationRequest
from decoder.trace import Run, Verdict, violations
from decoder.vocabulary import SharedVocabulary
from tests.decoder.test_engine import PROMPTS, generate
from tests.decoder.test_pitfalls import P, Q, V, _pairs_after_first, p_row, rotated
from tests.spellings import STORY, letters, sentencepiece_like, shared, small_tokenizer
from tests.statistics import LIMIT, fits
from tests.tiny import PATHS, runner, tiny_decoder, tiny_tokenizer
from tests.toys import TableRunner, ask, log, toy_decoder

DRAFTS = {"byte-level": small_tokenizer, "sentencepiece": sentencepiece_like}


def sound(run: Run) -> Run:
    assert violations(run) == []
    return run


# --- a target and a draft that know one story -----------------------------------------------------------------------


class Reader:
    """Logits that go on with ``story`` in the tokens of one vocabulary. ``slips``: how often the draft is wrong."""

    def __init__(self, vocabulary: SharedVocabulary, story: str, *, draft: bool, size: int, slips: int = 0) -> None:
        self.spelling = vocabulary.draft if draft else vocabulary.target
        self.data = story.encode()
        self.size, self.slips = size, slips
        encoded = self.spelling.encode(self.data)
        self.starts = dict(zip([0, *encoded.ends], encoded.ids, strict=False))
        self.strange: list[bytes] = []
        """Prefixes that are not the story's."""

    def __call__(self, prefix: tuple[int, ...]) -> list[float]:
        lead = len(self.spelling.lead)
        text = b"".join(self.spelling.bytes_of(token) for token in prefix[lead:])
        if not self.data.startswith(text):
            self.strange.append(text)
            return [float(i == prefix[-1]) for i in range(self.size)]
        wanted = self.starts.get(len(text))
        if wanted is None:  # inside a token: the rest of it on its own
            end = min(at for at in [*self.starts, len(self.data)] if at > len(text))
            rest = self.spelling.encode(self.data[len(text) : end]).ids
            wanted = rest[0] if rest else 0
        if self.slips and len(prefix) % self.slips == 0:
            wanted = (wanted + 7) % self.size
        return [30.0 if i == wanted else 0.0 for i in range(self.size)]


def reading(
    kind: str, story: str = STORY * 3, slips: int = 0, context: int = 4096
) -> tuple[SpeculativeDecoder, OtherVocabularyProposer, TableRunner]:
    """A target that recites ``story`` behind its beginning, and a draft that knows it in its own tokens."""
    vocabulary = shared(tiny_tokenizer(), DRAFTS[kind]())
    sizes = len(tiny_tokenizer()), max(DRAFTS[kind]().get_vocab().values()) + 1
    target = Reader(vocabulary, story, draft=False, size=sizes[0])
    draft = Reader(vocabulary, story, draft=True, size=sizes[1], slips=slips)
    table = TableRunner(draft, sizes[1], context)
    proposer = OtherVocabularyProposer(table, vocabulary)
    return toy_decoder(target, sizes[0], proposer, tokenizer=tiny_tokenizer()), proposer, table


def recite(n: int, skip: str = "The quick", story: str = STORY * 3) -> list[int]:
    """The next ``n`` tokens behind ``skip``."""
    ids, start = tiny_tokenizer()(story)["input_ids"], tiny_tokenizer()(skip)["input_ids"]
    assert ids[: len(start)] == start
    return list(ids[len(start) : len(start) + n])


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("k", [1, 2, 4, 32])
def test_a_draft_that_knows_the_text_is_accepted_throughout(kind: str, k: int) -> None:
    """Emoji and Chinese characters over several tokens, spaces in rows, words that each vocabulary splits otherwise."""
    decoder, _, _ = reading(kind)
    run = sound(decoder.run(ask("The quick", proposer="draft-model", k=k, max_new_tokens=150)))
    assert list(run.output_ids) == recite(150)
    assert run.metrics["num_draft_tokens"] > 100 * k / (k + 1)
    assert run.metrics["draft_acceptance_rate"] > 0.95
    assert all(draft.q == 1.0 for step in run.steps for draft in step.drafts)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafts_cache_is_rolled_back_to_where_it_parts_from_the_text(kind: str, temperature: float) -> None:
    decoder, proposer, table = reading(kind, slips=3)
    stream = decoder.stream(ask("The quick", proposer="draft-model", k=4, max_new_tokens=120, temperature=temperature))
    rejected = known = 0
    for step in stream:
        rejected += any(draft.verdict is Verdict.REJECTED for draft in step.drafts)
        if step.index and stream.run.finish_reason is None:
            assert table.cached() == proposer._fed[0], "what is believed to be in the cache is what is in it"
            known = proposer._equal[0]
            assert table.cached()[:known] == proposer._texts[0].ids[:known]
    assert list(stream.run.output_ids) == recite(120)
    assert rejected > 10
    assert known > 50


@pytest.mark.parametrize("k", [1, 2, 4, 32])
@pytest.mark.parametrize("extra", [None, 0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_max_new_tokens_is_met_exactly(k: int, extra: int | None, temperature: float) -> None:
    limit = {None: 1, 0: 2, 1: k, 2: k + 1}[extra]
    decoder, _, _ = reading("byte-level")
    run = sound(
        decoder.run(ask("The quick", proposer="draft-model", k=k, max_new_tokens=limit, temperature=temperature))
    )
    assert list(run.output_ids) == recite(limit)
    assert run.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_inside_a_draft(temperature: float) -> None:
    decoder, _, _ = reading("byte-level")
    request = ask("The quick", proposer="draft-model", k=8, max_new_tokens=100, stop=("灯",), temperature=temperature)
    run = sound(decoder.run(request))
    assert run.finish_reason == "stop"
    assert run.text == STORY[len("The quick") : STORY.index("灯")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafts_end_token_is_the_targets(temperature: float) -> None:
    """A control token that both have is drafted; the run ends with it."""
    vocabulary = shared(tiny_tokenizer(), small_tokenizer())
    story = "The quick brown fox"
    ids, theirs = tiny_tokenizer()(story)["input_ids"], small_tokenizer()(story)["input_ids"]
    end, other_end = tiny_tokenizer().eos_token_id, small_tokenizer().eos_token_id

    def certain(script: list[int], size: int):
        return lambda prefix: [30.0 if i == [*script, 0][min(len(prefix), len(script))] else 0.0 for i in range(size)]

    draft = TableRunner(certain([*theirs, other_end], 400), 400)
    target = TableRunner(certain([*ids, end], len(tiny_tokenizer())), len(tiny_tokenizer()))
    decoder = SpeculativeDecoder(
        Target(target, tiny_tokenizer(), "toy", frozenset({end})), OtherVocabularyProposer(draft, vocabulary)
    )
    request = ask("The quick", proposer="draft-model", k=16, max_new_tokens=60, temperature=temperature)
    run = sound(decoder.run(request))
    assert list(run.output_ids) == [*ids[len(tiny_tokenizer()("The quick")["input_ids"]) :], end]
    assert run.finish_reason == "eos"
    if temperature == 0:
        assert run.steps[-1].drafts[-1].id == end
        assert len(run.steps) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_draft_context_ends_drafting_not_the_run(temperature: float) -> None:
    decoder, _, table = reading("byte-level", context=60)
    run = sound(decoder.run(ask("The quick", proposer="draft-model", k=4, max_new_tokens=100, temperature=temperature)))
    assert list(run.output_ids) == recite(100)
    assert run.metrics["num_spec_steps"] > 0
    assert run.metrics["num_plain_steps"] > 10
    assert max(table.lengths) <= 60


def test_a_text_inside_a_character_that_the_draft_cannot_spell_is_not_drafted_on() -> None:
    vocabulary = shared(tiny_tokenizer(), letters([*"abc"]))
    proposer = OtherVocabularyProposer(TableRunner(lambda prefix: [0.0, 1.0, 0.0], 3), vocabulary)
    fox = tiny_tokenizer()("🦊")["input_ids"]
    script = [*fox, *tiny_tokenizer()("abc")["input_ids"]]
    start = len(tiny_tokenizer()("a")["input_ids"])

    def rows(prefix: tuple[int, ...]) -> list[float]:
        at = len(prefix) - start
        return [30.0 if i == script[at % len(script)] else 0.0 for i in range(len(tiny_tokenizer()))]

    decoder = toy_decoder(rows, len(tiny_tokenizer()), proposer, tokenizer=tiny_tokenizer())
    run = sound(decoder.run(ask("a", proposer="draft-model", k=2, max_new_tokens=len(script))))
    assert list(run.output_ids) == script
    inside = run.steps[1 : len(fox)]
    assert all(not step.drafts for step in inside), "behind a part of the fox nothing is drafted"
    assert any(step.drafts for step in run.steps)


# --- real models: exact whatever is drafted -------------------------------------------------------------------------


def crossing(kind: str, path: str, seed: int = 1) -> tuple[OtherVocabularyProposer, Any]:
    """A random draft model with another vocabulary for the tiny target."""
    tokenizer = DRAFTS[kind]()
    size = max(tokenizer.get_vocab().values()) + 1
    draft = runner(seed=seed, layers=1, vocab_size=size, path=path)
    return OtherVocabularyProposer(draft, shared(tiny_tokenizer(), tokenizer)), runner(path=path)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize(("k", "path"), [(1, "fused"), (4, "generic"), (4, "fused"), (32, "fused")])
def test_greedy_equals_generate(prompt: str, kind: str, k: int, path: str) -> None:
    proposer, target = crossing(kind, path)
    request = GenerationRequest(PROMPTS[prompt], chat=False, proposer="draft-model", k=k, max_new_tokens=60)
    run = sound(tiny_decoder(proposer, target).run(request))
    assert list(run.output_ids) == generate(PROMPTS[prompt], 60)
    assert run.metrics["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    "penalties", [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "logit_bias": ((65, 2.0),)}]
)
def test_penalties_are_the_targets(penalties: dict[str, Any]) -> None:
    proposer, target = crossing("byte-level", "fused")
    request = ask("The quick brown fox", proposer="draft-model", k=4, max_new_tokens=40, **penalties)
    plain = tiny_decoder(None, runner()).run(request.replace(proposer="none"))
    assert sound(tiny_decoder(proposer, target).run(request)).output_ids == plain.output_ids


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_a_batch_give_what_they_give_alone(path: str) -> None:
    """Greedy and sampled rows together, of different lengths: some read, some are re-encoded, some end earlier."""
    requests = [
        ask("The quick brown fox jumps over", proposer="draft-model", k=4, max_new_tokens=30, temperature=0.8, seed=3),
        ask("🦊🐻", proposer="draft-model", k=2, max_new_tokens=9),
        ask("def f(x): return", proposer="draft-model", k=3, max_new_tokens=24, temperature=0.7, seed=8),
        ask("Speculative decoding drafts tokens", proposer="draft-model", k=5, max_new_tokens=40),
    ]
    alone = [sound(tiny_decoder(*crossing("byte-level", path)).run(request)).output_ids for request in requests]
    together = tiny_decoder(*crossing("byte-level", path)).generate(requests)
    assert [sound(run).output_ids for run in together] == alone


# --- sampled: the distribution --------------------------------------------------------------------------------------

OURS = "abcdef"
THEIRS = ["c", "a", "b", "e", "d", "ab"]
"""Other ids, "ab" in one token, no "f"."""


def theirs_row(prefix: tuple[int, ...]) -> list[float]:
    return log(rotated(Q, 2 * prefix[-1]))


def intersecting(proposer: type[OtherVocabularyProposer] = OtherVocabularyProposer) -> SpeculativeDecoder:
    vocabulary = shared(letters(OURS), letters(THEIRS, [("a", "b")]))
    return toy_decoder(p_row, V, proposer(TableRunner(theirs_row, V), vocabulary), tokenizer=letters(OURS))


def sampled_pairs(decoder: SpeculativeDecoder, k: int, n: int = 2000) -> float:
    """p-value of the pair of drafted tokens against the target's own distribution."""
    outputs = []
    for seed in range(n):
        request = ask("a", proposer="draft-model", k=k, max_new_tokens=3, temperature=1.0, seed=seed)
        outputs.append(decoder.run(request).output_ids)
    return fits([o[1:3] for o in outputs], _pairs_after_first())


@pytest.mark.parametrize("k", [1, 4])
def test_sampled_output_has_the_targets_distribution(k: int) -> None:
    assert sampled_pairs(intersecting(), k) > LIMIT


def test_the_drafts_whole_distribution_taken_for_the_restricted_one_would_be_caught() -> None:
    """Negative control: q is not renormalised over what both have."""

    class Whole(OtherVocabularyProposer):
        def _draft_chain(self, logits: Tensor, ks: Sequence[int], u: Tensor, reasons: list[str | None]) -> Proposal:
            proposal = super()._draft_chain(logits, ks, u, reasons)
            assert proposal.q is not None
            proposal.q = proposal.q * 0.5
            return proposal

    assert sampled_pairs(intersecting(Whole), 4) < 1e-6


def test_recorded_q_is_restricted_and_sums_to_one() -> None:
    decoder = intersecting()
    run = sound(decoder.run(ask("a", proposer="draft-model", k=3, max_new_tokens=60, temperature=1.0, seed=2)))
    drafts = [draft for step in run.steps for draft in step.drafts]
    assert len(drafts) > 40
    for draft in drafts:
        assert draft.text != "f"
        assert all(top.text != "f" for top in draft.top_q)
        assert sum(top.probability for top in draft.top_q) == pytest.approx(1.0, abs=1e-6)
    assert "f" in run.text


def test_the_first_draft_is_drawn_from_the_draft_model_behind_the_text_in_its_own_tokens() -> None:
    decoder = intersecting()
    run = sound(decoder.run(ask("a", proposer="draft-model", k=2, max_new_tokens=80, temperature=1.0, seed=5)))
    text = "a" + run.steps[0].emitted[0].text
    own = letters(THEIRS, [("a", "b")])
    for step in run.steps[1:]:
        if step.drafts:
            # "f" is no token of the draft: it reads on without it.
            read = own(text.replace("f", ""))["input_ids"]
            row = dict(zip(THEIRS, torch.tensor(theirs_row(tuple(read))).softmax(-1).tolist(), strict=True))
            both = {word: row[word] for word in "abcde"}
            first = step.drafts[0]
            assert first.q == pytest.approx(both[first.text] / sum(both.values()), abs=1e-6)
        text += "".join(token.text for token in step.emitted)


def test_a_draft_that_differs_in_its_ids_only_is_accepted_always() -> None:
    """One distribution behind permuted ids: every draft is kept, greedy (re-encoded) and sampled (intersection)."""
    order = [3, 1, 5, 0, 2, 4]
    words = [OURS[i] for i in order]

    def permuted(prefix: tuple[int, ...]) -> list[float]:
        row = p_row((order[prefix[-1]],))
        return [row[i] for i in order]

    for temperature in (0.0, 1.0):
        vocabulary = shared(letters(OURS), letters(words))
        proposer = OtherVocabularyProposer(TableRunner(permuted, V), vocabulary)
        decoder = toy_decoder(p_row, V, proposer, tokenizer=letters(OURS))
        request = ask("a", proposer="draft-model", k=4, max_new_tokens=101, temperature=temperature, seed=1)
        run = sound(decoder.run(request))
        assert run.metrics["draft_acceptance_rate"] == 1.0
        assert run.metrics["num_spec_steps"] == 20
    assert P != Q


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_breaks_down_only_costs_time(temperature: float) -> None:
    vocabulary = shared(letters(OURS), letters(THEIRS, [("a", "b")]))

    def broken(prefix: tuple[int, ...]) -> list[float]:
        return [float("nan")] * V if len(prefix) > 6 else theirs_row(prefix)

    decoder = toy_decoder(
        p_row, V, OtherVocabularyProposer(TableRunner(broken, V), vocabulary), tokenizer=letters(OURS)
    )
    run = sound(decoder.run(ask("a", proposer="draft-model", k=3, max_new_tokens=30, temperature=temperature)))
    assert run.finish_reason == "length"
    assert len(run.output_ids) == 30
