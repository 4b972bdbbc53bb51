"""Only what is sure about a pair is remembered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decoder import compat
from decoder.errors import ModelError
from playground import pairs


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    pairs._verdict.cache_clear()
    yield
    pairs._verdict.cache_clear()


@pytest.mark.parametrize("trouble", [ModelError("the Hub cannot be reached"), OSError("half a file")])
def test_what_could_not_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch, trouble: Exception) -> None:
    answers: list[Exception | list[str]] = [trouble, []]

    def check(target: str, draft: str) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(compat, "check_pair", check)
    assert pairs.misfit("target", "draft")
    assert pairs.misfit("target", "draft") is None


@pytest.mark.parametrize(("reasons", "verdict"), [([], None), (["eos_token differs", "more"], "eos_token differs")])
def test_a_verdict_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, reasons: list[str], verdict: str | None) -> None:
    asked: list[str] = []
    monkeypatch.setattr(compat, "check_pair", lambda target, draft: asked.append(draft) or reasons)
    assert [pairs.misfit("target", "draft") for _ in range(3)] == [verdict] * 3
    assert asked == ["draft"]
