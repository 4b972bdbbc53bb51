"""Messages for a target to answer: always the same, all different, and none of those that drafts are measured on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from decoder.bench.suites import SUITES, load_suite
from decoder.training import prompts
from decoder.training.prompts import passages_of, write_prompts


def test_messages_are_different_and_the_same_again() -> None:
    written = write_prompts(2000, seed=5)
    assert len(set(written)) == 2000
    assert written == write_prompts(2000, seed=5)
    assert written != write_prompts(2000, seed=6)
    slots = r"\{(func|does|cls|passage|goal|who|place|num|day|n|buggy|good|long)\}"
    assert not [text for text in written if re.search(slots, text)]


def test_parts_that_do_not_suffice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"templates": ["Say {word}."], "slots": {"word": ["yes", "no"]}}
    (tmp_path / "parts.json").write_text(json.dumps(dict.fromkeys(prompts.SHARES, part)))
    monkeypatch.setattr(prompts, "PARTS", tmp_path / "parts.json")
    assert sorted(write_prompts(2)) == ["Say no.", "Say yes."]
    with pytest.raises(ValueError, match="no 3 different"):
        write_prompts(3)


def test_no_message_is_one_that_drafts_are_measured_on() -> None:
    """Neither whole nor in part: no eight words in a row."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    measured = {
        run: prompt.id for suite in SUITES for prompt in load_suite(suite).prompts for run in runs(prompt.prompt)
    }
    shared = {(measured[run], " ".join(run)) for text in write_prompts(6000) for run in runs(text) if run in measured}
    assert not shared


def test_passages_are_prose_of_several_sentences() -> None:
    prose = (
        "The river rises in hills. It turns east at the mill. Boats go up to the bridge. It freezes in cold winters."
    )
    code = "Here is the code. def f(x): return {x}. It is quite short. It does nothing much at all."
    repeated = "It is a very good idea. " * 5
    assert passages_of([prose, code, repeated, "Too short to be summarised.", prose]) == [prose]
    asked = write_prompts(200, passages=[prose])
    assert any(prose in text for text in asked)
    assert any("\n\n" in text and prose not in text for text in asked)
