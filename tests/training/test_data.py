"""Rows that a target writes with itself: turns by the template, the same rows after a stop, no leak between parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.errors import ModelError
from decoder.training.data import DataPlan, Turns, answers_of, extend, find_turns, generate
from decoder.training.rows import load_rows
from tests.tiny import runner, tiny_tokenizer


class Talker:
    """The tiny tokenizer with a template whose turns are closed by the end token."""

    def __init__(self, template: str | None) -> None:
        self.inner = tiny_tokenizer()
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return "hi " + "".join(f"{m['role']}: {m['content']}<|end|>\n" for m in messages)


def test_the_template_is_cut_at_its_turns() -> None:
    talker = Talker("x")
    turns = find_turns(talker)
    assert list(turns.prefix) == talker.encode("hi user: ")
    assert list(turns.to_answer) == talker.encode("<|end|>\nassistant: ")
    assert list(turns.to_user) == talker.encode("<|end|>\nuser: ")
    with pytest.raises(ModelError, match="no chat template"):
        find_turns(Talker(None))


def plan(**changes: Any) -> DataPlan:
    return DataPlan(**({"rows": 12, "length": 60, "batch": 4, "seed": 3} | changes))


def test_rows_are_whole_conversations_and_survive_a_stop(tmp_path: Path) -> None:
    talker = Talker("x")
    made = generate(runner(), talker, plan(), tmp_path / "a.npz", target="tiny")
    assert made == 12
    first = generate(runner(), talker, plan(), tmp_path / "b.npz", target="tiny", stop_after=1)
    assert first == 4
    generate(runner(), talker, plan(), tmp_path / "b.npz", target="tiny")
    a, b = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert np.array_equal(a["rows"], b["rows"])
    turns, prefix = find_turns(talker), len(find_turns(talker).prefix)
    assert (a["rows"][:, :prefix] == turns.prefix).all()
    closed = 0
    for row in a["rows"].tolist():
        expected = [turns.to_answer, turns.to_user]
        at = prefix
        while at < len(row):
            if row[at] == 0:  # the end token: the template's own ids follow
                wanted = expected[0][: len(row) - at]
                assert tuple(row[at : at + len(wanted)]) == wanted
                expected.reverse()
                closed += 1
                at += len(wanted)
            else:
                at += 1
    assert closed > 0
    assert load_rows(tmp_path / "a.npz", prefix).length == 60


def test_openings_begin_the_first_message(tmp_path: Path) -> None:
    talker = Talker("x")
    generate(runner(), talker, plan(openings=("def f",), rows=4), tmp_path / "a.npz", target="tiny")
    begin, opening = len(find_turns(talker).prefix), talker.encode("def f")
    rows = np.load(tmp_path / "a.npz")["rows"]
    assert (rows[:, begin : begin + len(opening)] == opening).all()


def test_prompts_are_whole_messages_each_answered_once(tmp_path: Path) -> None:
    talker = Talker("x")
    prompts = tuple("the cat " * n + f"sat {n}" for n in (3, 1, 2, 0, 200))
    made = generate(runner(), talker, plan(prompts=prompts, rows=5, batch=2), tmp_path / "a.npz", target="tiny")
    assert made == 4, "a message that fills its row is left out"
    turns, rows = find_turns(talker), np.load(tmp_path / "a.npz")["rows"].tolist()
    seen = []
    for row in rows:
        body = row[len(turns.prefix) :]
        at = body.index(turns.to_answer[0])
        assert tuple(body[at : at + len(turns.to_answer)]) == turns.to_answer
        seen.append(body[:at])
    assert sorted(seen) == sorted(talker.encode(text) for text in prompts[:-1])
    again = generate(
        runner(), talker, plan(prompts=prompts, rows=5, batch=2), tmp_path / "b.npz", target="tiny", stop_after=1
    )
    assert again < made
    generate(runner(), talker, plan(prompts=prompts, rows=5, batch=2), tmp_path / "b.npz", target="tiny")
    assert sorted(np.load(tmp_path / "b.npz")["rows"].tolist()) == sorted(rows)
    with pytest.raises(ModelError, match="no prompt is shorter"):
        generate(runner(), talker, plan(prompts=prompts[-1:], rows=1), tmp_path / "c.npz", target="tiny")


def test_answers_are_cut_out_of_rows() -> None:
    turns = Turns(prefix=(1, 2), to_answer=(9, 8, 7), to_user=(9, 8, 6))
    whole, open_end, silent = (
        [1, 2, 5, 9, 8, 7, 3, 4, 9, 8, 6, 5],
        [1, 2, 5, 9, 8, 7, 3, 4, 5, 5, 5, 5],
        [1, 2, *[5] * 10],
    )
    assert answers_of(np.array([whole, open_end, silent]), turns) == [[3, 4]]


def test_another_plan_is_not_mixed_in_and_files_are_joined(tmp_path: Path) -> None:
    talker = Talker("x")
    generate(runner(), talker, plan(), tmp_path / "a.npz", target="tiny")
    with pytest.raises(ModelError, match="another plan"):
        generate(runner(), talker, plan(seed=4), tmp_path / "a.npz", target="tiny")
    generate(runner(), talker, plan(seed=4), tmp_path / "c.npz", target="tiny")
    assert extend(tmp_path / "all.npz", [tmp_path / "a.npz", tmp_path / "c.npz"], 4) == 24
    joined, old = np.load(tmp_path / "all.npz"), np.load(tmp_path / "a.npz")
    assert np.array_equal(joined["split"][:12], old["split"])


def test_the_command_line_trains_a_head_on_rows_it_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``train data``, ``train mtp`` and ``train export`` one after the other, as a user types them."""
    from decoder.cli import main
    from tests.tiny import save_tiny

    target = save_tiny(tmp_path / "model")

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments, "--target", str(target), "--device", "cpu"])
        return int(end.value.code or 0)

    rows, out = str(tmp_path / "rows.npz"), str(tmp_path / "run")
    assert run("data", "--out", rows, "--rows", "256", "--length", "64", "--batch", "64") == 0
    assert run("mtp", "--rows", rows, "--out", out, "--steps", "2", "--batch", "2", "--prefix", "4",
               "--vocabulary", "64", "--sample", "16", "--eval-rows", "2") == 0  # fmt: skip
    assert run("export", "--run", out, "--rows", rows, "--out", str(tmp_path / "tiny-mtp")) == 0
    assert (tmp_path / "tiny-mtp" / "model.safetensors").is_file()
    # Another plan does not go on from the same checkpoints.
    assert run("mtp", "--rows", rows, "--out", out, "--steps", "3", "--prefix", "4") == 2
    assert "begun with another plan" in capfd.readouterr().err
