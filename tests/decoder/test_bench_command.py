"""``python -m decoder bench``: flags, JSON on stdout and nothing else, one line for what cannot be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.bench import floor as floors
from decoder.bench.result import BenchResult, save
from decoder.cli import main
from tests.decoder.test_bench_summary import result
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def call(*arguments: str) -> int:
    try:
        main(["bench", *arguments])
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def test_json_is_the_result_and_is_kept_by_date(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(floors, "CPU_BYTES", 1 << 20)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    code = call(
        "--target", str(folder), "--dtype", "float32", "--device", "cpu", "--suite", "chat", "--tokens", "6",
        "--proposer", "ngram", "-k", "3", "--quick", "--batch", "0", "--no-transformers", "--json",
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = BenchResult.from_json(json.loads(captured.out))
    assert found.variants == ("redline/none", "redline/ngram/3")
    kept = list((tmp_path / "bench").glob("*.json"))
    assert len(kept) == 1
    assert json.loads(kept[0].read_text()) == json.loads(captured.out)
    assert str(kept[0]) in captured.err.replace("\n", "")


def test_a_kept_bench_is_shown_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(result(), tmp_path / "bench.json")
    assert call("--show", str(path)) == 0
    assert "our plain / transformers plain" in capsys.readouterr().out
    assert call("--show", str(path), "--markdown") == 0
    assert "| redline/ngram/4 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "poetry"], "unknown suite"),
        (["--proposer", "magic"], "unknown proposer"),
        (["-k", "1,x"], "commas"),
        (["-k", "0"], "k is empty"),
        (["-k", "99"], "between 1 and 64"),
        (["--batch", "1,-2"], "between 1 and 32"),
        (["--prompts", "0"], "prompts must be between"),
        (["--tokens", "1"], "tokens must be between"),
        (["--repeats", "0"], "repeats must be between"),
        (["--memory", "3"], "at least 6"),
        (["--peer", "vllm"], "vllm=PYTHON"),
        (["--peer", "sglang=/bin/sh"], "unknown peer"),
        (["--peer", "vllm=/nowhere/python"], "is not a file"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--synthetic", "--shapes", "tiny,giant"], "unknown shape 'giant'"),
        (["--out", "/"], "is a folder"),
        (["--show", "/nowhere/bench.json"], "cannot read the bench"),
        (["--bogus"], "--bogus"),
        (["--target", "nonsense"], "unknown target"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_bad_flags_are_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert words in lines[0]


def test_help_and_bad_flags_need_no_torch() -> None:
    code = "import sys, decoder.cli, decoder.bench.command\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).resolve().parents[2])
