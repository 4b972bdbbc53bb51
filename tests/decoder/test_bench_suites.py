"""The prompts of the bench, and the loader that refuses what is not a suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoder.bench.suites import SUITES, load_suite
from decoder.errors import RequestError


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_ten_prompts_of_its_own(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert suite.description
    assert len(suite.prompts) == 10
    assert len({p.id for p in suite.prompts}) == len({p.prompt for p in suite.prompts}) == 10


def test_no_prompt_is_in_two_suites() -> None:
    prompts = [p.prompt for name in SUITES for p in load_suite(name).prompts]
    assert len(set(prompts)) == 60


def test_edits_carry_the_file_that_they_change() -> None:
    for prompt in load_suite("edit").prompts:
        assert prompt.prediction is not None
        assert prompt.prediction in prompt.prompt
        assert 10 <= prompt.prediction.count("\n") <= 42


def test_texts_to_summarise_are_of_some_length() -> None:
    for prompt in load_suite("summarise").prompts:
        assert 10 <= len(prompt.prompt.strip().splitlines()) <= 42


def good() -> dict[str, Any]:
    return {"name": "mine", "description": "d", "prompts": [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}]}


def spoilt(**changes: Any) -> dict[str, Any]:
    return {**good(), **changes}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "an object of"),
        ({**good(), "extra": 1}, "an object of"),
        (spoilt(name="other"), "its name"),
        (spoilt(description=" "), "description"),
        (spoilt(prompts=[]), "no prompts"),
        (spoilt(prompts=[{"id": "a"}]), "id and prompt"),
        (spoilt(prompts=[{"id": "a", "prompt": "x", "answer": "z"}]), "nothing else"),
        (spoilt(prompts=[{"id": "a", "prompt": " "}]), "empty"),
        (spoilt(prompts=[{"id": "a", "prompt": 3}]), "empty"),
        (spoilt(prompts=[{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]), "the same"),
        (spoilt(prompts=[{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}]), "the same"),
    ],
)
def test_what_is_no_suite_is_refused(tmp_path: Path, data: Any, words: str) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(data))
    with pytest.raises(RequestError, match=words):
        load_suite("mine", tmp_path)


def test_a_sound_suite_is_read_and_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(good()))
    assert [p.id for p in load_suite("mine", tmp_path).prompts] == ["a", "b"]
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        load_suite("torn", tmp_path)
    with pytest.raises(RequestError, match="cannot read"):
        load_suite("absent", tmp_path)
    with pytest.raises(RequestError, match="choose from chat"):
        load_suite("poetry")
