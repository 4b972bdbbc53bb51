"""The trace: its invariants hold for whatever is decoded, and JSON is read back exactly or refused by field."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.errors import TraceError
from decoder.metrics import acceptance, timing
from decoder.proposers.draft_model import DraftModelProposer
from decoder.trace import RUN_FIELDS, Run, Source, Verdict, violations
from tests.toys import Recite, TableRunner, ask, toy_decoder

V = 8


def rows(seed: int):
    def table(prefix: tuple[int, ...]) -> list[float]:
        return [float((seed * 7 + 3 * prefix[-1] + 5 * i * i + len(prefix)) % 11) / 3 for i in range(V)]

    return table


@st.composite
def runs(draw: Any) -> Run:
    """Any run: who drafts, how it samples, where it stops, and whether it was cancelled on the way."""
    target, draft = rows(draw(st.integers(0, 50))), rows(draw(st.integers(0, 50)))
    kind = draw(st.sampled_from(["none", "model", "copy", "recite", "tree"]))
    proposer: Any = None
    if kind == "model":
        proposer = DraftModelProposer(TableRunner(draft, V))
    elif kind == "copy":
        proposer = DraftModelProposer(TableRunner(target, V))
    elif kind == "recite":
        guess = draw(st.lists(st.integers(0, V - 1), max_size=6))
        proposer = Recite(lambda tokens, k: guess[:k])
    elif kind == "tree":
        nodes = draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=6))
        links = [draw(st.one_of(st.none(), st.integers(0, i - 1))) if i else None for i in range(len(nodes))]
        proposer = Recite(lambda tokens, k: nodes, lambda n: links)
    request = ask(
        "abc",
        proposer="none" if proposer is None else "ngram",
        k=draw(st.integers(1, 6)),
        draft_length=draw(st.sampled_from(["fixed", "moving-average", "auto"])),
        max_new_tokens=draw(st.integers(1, 30)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
        seed=draw(st.integers(0, 1000)),
        stop_ids=tuple(draw(st.lists(st.integers(0, V - 1), max_size=1))),
        stop=tuple(draw(st.lists(st.sampled_from(["ab", "h", "cde"]), max_size=2))),
    )
    decoder = toy_decoder(target, V, proposer, eos=draw(st.lists(st.integers(0, V - 1), max_size=1)), context=24)
    stream = decoder.stream(request)
    limit = draw(st.one_of(st.none(), st.integers(0, 4)))
    for done, _ in enumerate(stream, start=1):
        if limit is not None and done > limit:
            stream.close()
    return stream.run


@settings(max_examples=150, deadline=None)
@given(runs())
def test_every_run_keeps_the_invariants(run: Run) -> None:
    assert violations(run) == []
    a = acceptance(run.steps)
    drafts = [d for s in run.steps for d in s.drafts]
    by = {v: sum(d.verdict is v for d in drafts) for v in Verdict}
    assert len(drafts) == by[Verdict.ACCEPTED] + by[Verdict.REJECTED] + by[Verdict.UNTESTED]
    kept = sum(e.source is Source.ACCEPTED for s in run.steps for e in s.emitted)
    assert a.num_accepted_draft_tokens == kept == by[Verdict.ACCEPTED]
    if drafts:
        assert a.draft_acceptance_rate == kept / len(drafts)
        assert a.mean_acceptance_length == 1 + kept / a.num_spec_steps
        assert sum(a.acceptance_histogram) == a.num_spec_steps
        assert sum(n * c for n, c in enumerate(a.acceptance_histogram)) == kept
    else:
        assert a.draft_acceptance_rate is None
    assert timing(run.steps).decode_ms == pytest.approx(run.decode_ms)
    greedy = run.request["sampling"]["temperature"] == 0
    for step in run.steps:
        for draft in step.drafts:
            tested = draft.verdict is not Verdict.UNTESTED
            assert (draft.p is not None) == tested == (draft.accept_prob is not None)
            assert (draft.u is not None) == (tested and not greedy)
            if tested and greedy:
                assert draft.accept_prob == (draft.verdict is Verdict.ACCEPTED)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_json_gives_the_same_run_back(run: Run) -> None:
    text = json.dumps(run.to_json(), allow_nan=False)
    assert tuple(json.loads(text)) == RUN_FIELDS
    assert Run.from_json(json.loads(text)) == run


def sample() -> dict[str, Any]:
    run = toy_decoder(rows(3), V, DraftModelProposer(TableRunner(rows(4), V))).run(
        ask("abc", k=3, max_new_tokens=12, temperature=1.0)
    )
    return run.to_json()


GOOD = sample()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["schema"], 2, "schema"),
        (["id"], "../../etc", "id"),
        (["id"], "", "id"),
        (["id"], "é1", "id"),
        (["schema"], True, "schema"),
        (["k"], True, "k"),
        (["seed"], -1, "seed"),
        (["prompt_ids"], [1, "2"], "prompt_ids[1]"),
        (["prompt_ids"], {}, "prompt_ids"),
        (["output_ids", 0], 2**31, "output_ids[0]"),
        (["finish_reason"], "tired", "finish_reason"),
        (["decode_ms"], float("nan"), "decode_ms"),
        (["decode_ms"], float("inf"), "decode_ms"),
        (["decode_ms"], 10**400, "decode_ms"),
        (["text"], "\ud800", "text"),
        (["text"], None, "text"),
        (["steps"], "x", "steps"),
        (["steps", 1, "drafts", 0, "verdict"], "maybe", "steps[1].drafts[0].verdict"),
        (["steps", 1, "drafts", 0, "q"], 1.5, "steps[1].drafts[0].q"),
        (["steps", 1, "drafts", 0, "u"], -0.1, "steps[1].drafts[0].u"),
        (["steps", 1, "drafts", 0, "top_q", 0, "probability"], "1", "steps[1].drafts[0].top_q[0].probability"),
        (["steps", 1, "emitted", 0, "source"], "magic", "steps[1].emitted[0].source"),
        (["steps", 1, "extra"], 1, "steps[1].extra"),
        (["extra"], 1, "extra"),
        (["metrics"], [], "metrics"),
        (["versions"], {"a": 1}, "versions.a"),
    ],
)
def test_a_broken_field_is_refused_by_name(path: list, value: Any, field: str) -> None:
    data = copy.deepcopy(GOOD)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(TraceError) as error:
        Run.from_json(data)
    assert error.value.path == field


@pytest.mark.parametrize("field", RUN_FIELDS)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    data = {key: value for key, value in GOOD.items() if key != field}
    with pytest.raises(TraceError, match=field):
        Run.from_json(data)


@pytest.mark.parametrize("data", [None, [], "run", 3, True, {}])
def test_what_is_no_run_at_all_is_refused(data: Any) -> None:
    with pytest.raises(TraceError):
        Run.from_json(data)


def test_a_trace_that_contradicts_itself_is_refused() -> None:
    data = copy.deepcopy(GOOD)
    data["output_ids"] = data["output_ids"][:-1]
    with pytest.raises(TraceError, match="contradicts"):
        Run.from_json(data)
    data = copy.deepcopy(GOOD)
    data["decode_ms"] += 5
    with pytest.raises(TraceError, match="decode_ms"):
        Run.from_json(data)


def test_deep_nesting_in_free_fields_is_refused() -> None:
    data = copy.deepcopy(GOOD)
    nested: Any = 1
    for _ in range(50):
        nested = [nested]
    data["request"]["x"] = nested
    with pytest.raises(TraceError, match="deep"):
        Run.from_json(data)
