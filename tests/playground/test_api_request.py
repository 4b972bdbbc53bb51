"""A call of ``run`` with the wrong kind of JSON is answered with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from decoder.errors import RequestError
from playground.api import read_request, text_field

FIELDS: dict[str, Any] = {"prompt": "Why?", "target": "smollm2-135m", "proposer": "ngram", "draft": None, "k": 4}


@pytest.mark.parametrize("options", [5, "x", [1], [["a", 1]]])
def test_options_must_be_an_object(options: Any) -> None:
    with pytest.raises(RequestError, match="options must be a JSON object"):
        read_request(FIELDS, options, {})


@pytest.mark.parametrize("sampling", [5, "top_k", [1], True])
def test_sampling_must_be_an_object(sampling: Any) -> None:
    with pytest.raises(RequestError, match="sampling must be a JSON object"):
        read_request(FIELDS, {"sampling": sampling}, {})


WRONG: list[dict[str, Any]] = [
    {"prompt": 5},
    {"prompt": None},
    {"target": [1]},
    {"proposer": {}},
    {"draft": 7},
    {"k": "4"},
    {"k": None},
    {"k": 2.5},
    {"max_new_tokens": [1]},
    {"chat": "yes"},
]


@pytest.mark.parametrize("fields", WRONG)
def test_each_field_of_a_wrong_type_is_a_sentence(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_request({**FIELDS, **fields}, {}, {})


MORE_WRONG: list[dict[str, Any]] = [
    {"stop": 5},
    {"stop": [1]},
    {"stop_ids": ["x"]},
    {"stop_ids": [[1]]},
    {"dtype": 16},
    {"system_prompt": 1},
    {"prediction": []},
    {"ngram_min": "1"},
    {"exit_layer": {}},
    {"sampling": {"top_k": "5"}},
    {"sampling": {"top_p": None}},
    {"sampling": {"logit_bias": 3}},
    {"sampling": {"logit_bias": [["a", 1]]}},
    {"sampling": {"logit_bias": [[1, "b"]]}},
    {"surprise": 1},
]


@pytest.mark.parametrize("options", MORE_WRONG)
def test_each_option_of_a_wrong_type_is_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_request(FIELDS, options, {})


@pytest.mark.parametrize("sampling", [{"temperature": "hot"}, {"seed": None}, {"seed": 1.5}, {"temperature": [0]}])
def test_temperature_and_seed_too(sampling: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_request(FIELDS, {}, sampling)


def test_a_good_call_is_read() -> None:
    request = read_request(FIELDS, {"ngram_max": 3, "sampling": {"top_k": 5}}, {"temperature": 0.5, "seed": 1})
    assert (request.ngram_max, request.sampling.top_k, request.sampling.temperature) == (3, 5, 0.5)


def test_text_fields() -> None:
    assert text_field("author", None) == ""
    with pytest.raises(RequestError, match="author must be text"):
        text_field("author", {"a": 1})
