"""Proposers side by side: each with its settings and drafts; what cannot run says why, and the rest go on."""

from __future__ import annotations

from typing import Any

import pytest

from decoder import catalog
from decoder.errors import RequestError
from decoder.request import GenerationRequest
from decoder.trace import Run
from playground import compare_tables, pairs
from playground.compare_variants import by_proposer, left_out, offered
from playground.comparing import progress
from playground.controls import from_request
from playground.events import Begun, Done, Ended, Planned
from playground.pairs import DraftOption, Fit, Standing
from tests.playground.visual_runs import make_run

SHELF = {
    "draft-model": [DraftOption("small", 31, "ready"), DraftOption("alien", 9, "no", "7 entries differ")],
    "eagle3": [DraftOption("head", 12, "ready"), DraftOption("far", 850, "fetch", "made for T")],
    "medusa": [],
    "eagle": [],
    "mtp": [DraftOption("", 0, "ready")],
}
NONE_HERE = {"eagle", "medusa"}


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    def standings(target: str, *, read: bool) -> dict[str, Standing]:
        return {
            entry.name: Standing("own", f"no {entry.title} here") if entry.name in NONE_HERE else Standing("ready")
            for entry in catalog.proposers()
        }

    monkeypatch.setattr(pairs, "draft_options", lambda target, proposer, *, read: SHELF[proposer])
    monkeypatch.setattr(pairs, "standings", standings)
    monkeypatch.setattr(pairs, "check", lambda target, draft, proposer: Fit("strange" not in draft, "no"))
    monkeypatch.setattr(pairs, "guess_proposer", lambda name: "medusa" if "medusa" in name else "draft-model")


def held(**changes: Any) -> dict[str, Any]:
    return from_request(GenerationRequest(prompt="x", target="T")) | {"prediction": "The sky"} | changes


def test_every_usable_pair_is_offered_and_the_others_have_a_reason() -> None:
    values = [value for _, value in offered("T", None, read=True)]
    assert values == [
        "ngram", "suffix", "prediction", "draft-model:small", "early-exit", "eagle3:head", "eagle3:far", "mtp:",
    ]  # fmt: skip
    assert left_out("T", read=True) == [("EAGLE-1/2", "no EAGLE-1/2 here"), ("Medusa", "no Medusa here")]
    named = {value.split(":")[0] for value in values} | NONE_HERE | {"none"}
    assert named == {entry.name for entry in catalog.proposers()}  # nobody is forgotten


@pytest.mark.parametrize(
    ("typed", "value"),
    [("/models/mine", "draft-model:/models/mine"), ("/models/medusa", "medusa:/models/medusa"), ("/strange", None)],
)
def test_a_draft_that_was_typed_stands_by_who_drafts_with_it(typed: str, value: str | None) -> None:
    values = [v for _, v in offered("T", typed, read=True) if typed in v]
    assert values == ([value] if value else [])


def test_each_keeps_its_own_settings() -> None:
    chosen = ["ngram", "early-exit", "prediction", "draft-model:/models/mine", "eagle3:head", "mtp:"]
    values = held(ngram_min=2, ngram_max=5, exit_layer=7, draft="/models/mine", tree="dynamic", draft_length="auto")
    found = by_proposer(values, chosen, read=True)
    assert not found.refused
    by_name = {request.proposer: request for _, request in found.requests}
    assert (by_name["ngram"].ngram_min, by_name["ngram"].ngram_max) == (2, 5)
    assert by_name["early-exit"].exit_layer == 7
    assert by_name["early-exit"].ngram_max == 4  # what it does not use stays out
    assert by_name["prediction"].prediction == "The sky"
    assert by_name["draft-model"].draft == "/models/mine"
    assert (by_name["eagle3"].draft, by_name["eagle3"].tree) == ("head", "dynamic")
    assert by_name["draft-model"].tree == "chain"
    assert by_name["mtp"].draft is None
    assert {request.draft_length for request in by_name.values()} == {"auto"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["ngram"], "at least two"),
        (None, "at least two"),
        ("ngram", "at least two"),
        (["ngram", "<script>"], "not offered"),
        (["ngram", "draft-model:alien"], "not offered"),
        (["ngram"] * 12, "eleven"),
    ],
)
def test_no_choice_is_answered_with_a_sentence(wrong: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        by_proposer(held(), wrong)


def test_what_cannot_run_says_why_and_the_rest_go_on() -> None:
    found = by_proposer(held(prediction="", draft_length="confidence"), ["ngram", "prediction", "early-exit"])
    assert [request.proposer for _, request in found.requests] == ["early-exit"]
    assert len(found.refused) == 2
    assert found.refused[0].startswith("N-gram (prompt lookup): ngram looks its drafts up")
    assert found.refused[1].startswith("Predicted output: ")
    with pytest.raises(RequestError, match="Predicted output"):
        by_proposer(held(prediction="", draft_length="confidence"), ["ngram", "prediction"])
    with pytest.raises(RequestError, match="prompt is empty"):
        by_proposer(held(prompt=" "), ["ngram", "early-exit"])


def ended(refused: tuple[str, ...], *runs: Run) -> Any:
    plan = [Planned(GenerationRequest(prompt="x"), title=run.id) for run in runs]
    events = [e for i, run in enumerate(runs) for e in (Begun(i, run), Ended(i, run))]
    done = Done(tuple(runs), None, "none", stopped=False)
    return list(progress(plan, iter([*events, done]), refused))[-1]


def test_the_end_of_a_comparison_names_who_did_not_draft() -> None:
    plain = make_run(run_id="r1", proposer="medusa", not_speculating="no medusa head that is here was made for T")
    end = ended(("Predicted output: it needs a text",), make_run(run_id="r2"), plain)
    assert end.kind == "warning"
    assert "Predicted output: it needs a text" in end.text
    assert "medusa drafted nothing: no medusa head that is here" in end.text
    assert len(end.runs) == 2
    assert ended((), make_run(run_id="r2")).kind == "good"


def test_a_column_says_who_drafted_with_what_how_long_and_by_which_rule() -> None:
    run = make_run(proposer="eagle3", k=8).replace(draft="<head>")
    run = run.replace(request={**run.request, "draft_length": "auto", "tree": "static"})
    words = "EAGLE-3, <head>, k ≤ 8 by measured time, static tree"
    assert compare_tables.drafter(run) == words
    assert compare_tables.label(run) == words
    assert compare_tables.label(run, "mine") == "mine"
    table = compare_tables.metrics_table([run, run], ["mine", ""], 0, [None, None])
    assert table.count("EAGLE-3, &lt;head&gt;, k ≤ 8") == 2  # under its name as well
    strange = run.replace(request={"draft_length": [], "tree": {}, "confidence": "x"})
    assert compare_tables.drafter(strange) == "EAGLE-3, <head>, k = 8"
