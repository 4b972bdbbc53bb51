"""Controls to a request and back, and what excludes what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.errors import RequestError
from decoder.request import GenerationRequest, SamplingParams
from playground.controls import (
    CONTROLS,
    excluded,
    from_request,
    read_bias,
    read_lengths,
    read_stops,
    to_request,
    write_stops,
)

START = from_request(GenerationRequest(prompt="Hello", proposer="ngram"))


def test_the_start_values_name_every_control() -> None:
    assert tuple(START) == CONTROLS


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(prompt="Hello"),
        GenerationRequest(prompt="Hello", chat=False, proposer="ngram", ngram_min=2, ngram_max=7, k=9),
        GenerationRequest(prompt="a", system_prompt="", proposer="draft-model", draft="smollm2-draft"),
        GenerationRequest(prompt="a", proposer="eagle3", draft="./my-head"),
        GenerationRequest(prompt="a", proposer="mtp"),
        GenerationRequest(prompt="a", proposer="ngram", draft_length="auto"),
        GenerationRequest(prompt="a", proposer="draft-model", draft_length="confidence", confidence=0.6),
        GenerationRequest(prompt="a", proposer="medusa", draft_length="moving-average"),
        GenerationRequest(prompt="a", proposer="eagle3", tree="dynamic", tree_nodes=24, tree_width=3),
        GenerationRequest(prompt="a", system_prompt="be brief", proposer="prediction", prediction="b\n\tc"),
        GenerationRequest(
            prompt="a",
            proposer="suffix",
            suffix_depth=12,
            suffix_factor=2.5,
            suffix_min_prob=0.2,
            suffix_earlier=True,
        ),
        GenerationRequest(
            prompt="a",
            proposer="early-exit",
            exit_layer=5,
            stop=("\n\n", "a\\n", "\t"),
            stop_ids=(1, 2),
            ignore_eos=True,
            sampling=SamplingParams(
                temperature=0.7,
                top_k=40,
                top_p=0.9,
                min_p=0.05,
                repetition_penalty=1.1,
                logit_bias=((5, -1.5),),
                seed=9,
            ),
            dtype="float32",
            device="cpu",
        ),
    ],
)
def test_a_request_survives_the_controls(request_: GenerationRequest) -> None:
    assert to_request(from_request(request_)) == request_


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": "  "}, "the prompt is empty"),
        ({"k": 0}, "between 1 and 64"),
        ({"k": 1.5}, "whole number"),
        ({"k": None}, "k (draft length) is empty"),
        ({"k": "four"}, "must be a number"),
        ({"temperature": float("nan")}, "must be a number"),
        ({"top_p": 0}, "top-p must be above 0"),
        ({"seed": -1}, "seed must be between"),
        ({"max_new_tokens": 10**9}, "max new tokens must be between"),
        ({"target": " "}, "no target is chosen"),
        ({"proposer": "oracle"}, "unknown proposer"),
        ({"proposer": "prediction"}, "prediction needs the text"),
        ({"draft_length": "confidence"}, "looks its drafts up"),
        ({"draft_length": "by feeling"}, "unknown draft length"),
        ({"proposer": "eagle3", "tree": "shrub"}, "unknown tree"),
        ({"proposer": "eagle3", "tree": "static", "tree_nodes": 1}, "tree nodes must be between"),
        ({"logit_bias": "12 = 3"}, "token id: bias"),
        ({"stop_ids": "1, x"}, "'x' is not a token id"),
        ({"prompt": 7}, "must be text"),
        ({"proposer": "suffix", "suffix_depth": 0}, "suffix depth must be between"),
        ({"proposer": "suffix", "suffix_factor": None}, "suffix factor is empty"),
    ],
)
def test_bad_values_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_request({**START, **change})
    assert sentence in str(caught.value)


def test_what_the_proposer_does_not_use_stays_out() -> None:
    left_over = {"prediction": "left over", "draft": "left over", "exit_layer": 3, "confidence": 0.9}
    request = to_request({**START, **left_over, "tree": "static", "tree_nodes": 99})
    assert (request.prediction, request.draft, request.exit_layer) == (None, None, 0)
    assert (request.confidence, request.tree, request.tree_nodes) == (0.4, "chain", 16)
    assert to_request({**START, "proposer": "none", "draft_length": "auto"}).draft_length == "fixed"


def test_the_last_proposers_draft_is_not_handed_to_another() -> None:
    held = {**START, "target": "smollm2-135m", "draft": "smollm2-draft"}
    assert to_request({**held, "proposer": "draft-model"}).draft == "smollm2-draft"
    assert to_request({**held, "proposer": "eagle3"}).draft == "smollm2-eagle3"
    assert to_request({**held, "proposer": "draft-model", "draft": "smollm2-medusa"}).draft == "smollm2-draft"
    assert to_request({**held, "proposer": "eagle3", "draft": "somebody/draft"}).draft == "somebody/draft"
    assert to_request({**held, "proposer": "eagle3", "target": "somebody/target"}).draft == "smollm2-draft"


def test_numbers_from_the_page_may_be_floats() -> None:
    request = to_request({**START, "k": 4.0, "seed": 3.0})
    assert (request.k, request.sampling.seed) == (4, 3)
    assert isinstance(request.k, int)


@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",)), min_size=1), max_size=5))
def test_stop_strings_survive_their_text_field(stops: list[str]) -> None:
    assert read_stops(write_stops(tuple(stops))) == tuple(stops)


def test_exclusions_give_reasons() -> None:
    reasons = excluded({"proposer": "none", "temperature": 0, "mode": "raw"})
    assert reasons["baseline"]
    assert "is the baseline" in reasons["baseline"]
    assert reasons["top_p"]
    assert "greedy" in reasons["top_p"]
    assert reasons["system_prompt"]
    assert "raw" in reasons["system_prompt"]
    assert reasons["draft"]
    assert reasons["prediction"]
    assert reasons["k"]
    reasons = excluded({"proposer": "draft-model", "temperature": 0.5, "mode": "chat", "system_mode": "own"})
    assert not any(reasons[name] for name in ("draft", "k", "baseline", "top_p", "system_prompt"))
    for proposer in ("eagle3", "eagle", "mtp", "medusa"):
        assert excluded({"proposer": proposer})["draft"] is None


def test_lengths() -> None:
    assert read_lengths("1, 2 4,8 2") == (1, 2, 4, 8)
    for text in ("", "0", "65", "x", "1;2", "-3", "9" * 40):
        with pytest.raises(RequestError):
            read_lengths(text)
    with pytest.raises(RequestError, match="too many"):
        read_lengths(" ".join(str(n) for n in range(1, 20)))


def test_biases() -> None:
    assert read_bias("5: -1.5\n\n 7 : 2") == ((5, -1.5), (7, 2.0))
    with pytest.raises(RequestError, match="is not a number"):
        read_bias("5: x")
