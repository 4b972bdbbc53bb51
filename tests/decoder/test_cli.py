"""The command line: fixed names, JSON and nothing else on stdout, one line on stderr and code 2 for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.trace import Run
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def decoder(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "decoder", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_json_is_exactly_the_run(folder: Path) -> None:
    done = decoder(
        "run", "--target", str(folder), "--proposer", "ngram", "-k", "3", "--prompt", "fox fox fox fox", "--raw",
        "--max-new-tokens", "12", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01",
        "--seed", "4", "--stop", "zzz", "--stop", "yyy", "--dtype", "float32", "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = Run.from_json(json.loads(done.stdout))
    assert done.stdout.count("\n") == 1
    assert (run.k, run.seed, run.proposer, run.dtype) == (3, 4, "ngram", "float32")
    assert run.request["stop"] == ["zzz", "yyy"]


def test_a_prompt_from_a_file_and_a_readable_report(folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The quick brown fox")
    done = decoder("run", "--target", str(folder), "--prompt", f"@{prompt}", "--max-new-tokens", "5", "--baseline")
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert "\x1b" not in done.stdout
    assert "draft length" not in done.stdout


def test_a_draft_length_that_adapts(folder: Path) -> None:
    arguments = ("run", "--target", str(folder), "--proposer", "draft-model", "--draft", str(folder), "--prompt", "fox")
    arguments += ("--raw", "--max-new-tokens", "30", "-k", "8", "--dtype", "float32", "--device", "cpu")
    done = decoder(*arguments, "--draft-length", "confidence", "--confidence", "0.05", "--json")
    assert done.returncode == 0, done.stderr
    run = Run.from_json(json.loads(done.stdout))
    assert (run.request["draft_length"], run.request["confidence"]) == ("confidence", 0.05)
    done = decoder(*arguments, "--draft-length", "moving-average")
    assert "draft length" in done.stdout
    assert "moving-average: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--prompt", ""], "prompt is empty"),
        (["run", "--prompt", "x", "-k", "0"], "between 1 and 64"),
        (["run", "--prompt", "x", "-k", "many"], "valid integer"),
        (["run"], "--prompt"),
        (["run", "--prompt", "x", "--bogus"], "--bogus"),
        (["run", "--prompt", "x", "--temperature", "nan"], "temperature"),
        (["run", "--prompt", "@/nowhere/at/all"], "cannot read the prompt file"),
        (["run", "--prompt", "x", "--target", "nonsense"], "unknown target"),
        (["run", "--prompt", "x", "--proposer", "magic"], "unknown proposer"),
        (["run", "--prompt", "x", "--draft-length", "clever"], "unknown draft length"),
        (["run", "--prompt", "x", "--logit-bias", "x"], "--logit-bias"),
        (["run", "--prompt", "x", "--target", "someone/something"], "cannot be reached"),
        (["audit", "--samples", "5"], "at least 100"),
        (["audit", "--proposer", "magic"], "unknown proposer"),
        (["models", "--prepare", "nonsense"], "unknown target"),
        (["models", "--compile", "nonsense"], "unknown target"),
        (["models", "--compile", "smollm2-135m", "--role", "both"], "--role is target or draft"),
        (["dance"], "dance"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], words: str) -> None:
    done = decoder(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert words in lines[0]


def test_a_draft_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "missing"
    done = decoder("run", "--prompt", "x", "--target", str(folder), "--proposer", "draft-model", "--draft", str(draft))
    assert done.returncode == 2
    assert "draft" in done.stderr
    assert "does not exist" in done.stderr


def test_models_say_what_compiled_steps_take_and_delete_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    library = tmp_path / "compiled" / "x" / "w1.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"0" * 3_000_000)
    assert "compiled steps take 3 MB" in " ".join(decoder("models").stdout.split())
    assert decoder("models", "--clear-cache").stdout == "3 MB of compiled steps deleted\n"
    assert not library.exists()


def test_a_run_says_in_one_line_how_to_compile(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    asked = ("run", "--target", str(folder), "--prompt", "fox", "--raw", "--max-new-tokens", "4", "--device", "cpu")
    assert "compil" not in decoder(*asked).stderr  # it is switched off here, and whoever did that knows
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setenv("CXX", sys.executable)  # stands for a compiler: nothing is compiled by asking
    done = decoder(*asked, "--json")
    Run.from_json(json.loads(done.stdout))
    assert f"python -m decoder models --compile {folder}" in " ".join(done.stderr.split())
    assert list(tmp_path.rglob("*.so")) == []


def test_models_lists_name_kind_licence_and_presence() -> None:
    done = decoder("models", "--json")
    rows = json.loads(done.stdout)
    assert rows[0]["name"] == "smollm2-135m"
    assert {"name", "kind", "licence", "present", "how_to_get"} <= rows[0].keys()


def test_suffix_decoding_from_an_earlier_run(folder: Path, tmp_path: Path) -> None:
    asked = ["run", "--target", str(folder), "--prompt", "The quick brown", "--raw", "--ignore-eos", "--json"]
    first = decoder(*asked, "--max-new-tokens", "24")
    file = tmp_path / "run.json"
    file.write_text(first.stdout)
    again = Run.from_json(json.loads(decoder(*asked, "--max-new-tokens", "24", "--proposer", "suffix", "--earlier-run",
                                             str(file)).stdout))  # fmt: skip
    assert again.output_ids == Run.from_json(json.loads(first.stdout)).output_ids
    assert again.versions["earlier_runs"] == "1 run, 24 tokens"
    assert again.metrics["num_accepted_draft_tokens"] > 10
    wrong = decoder(*asked, "--earlier-run", str(file))
    assert wrong.returncode == 2
    assert "only for --proposer suffix" in wrong.stderr
    file.write_text("{}")
    wrong = decoder(*asked, "--proposer", "suffix", "--earlier-run", str(file))
    assert wrong.returncode == 2
    assert "is not a run that --json wrote" in wrong.stderr


def test_models_says_which_drafts_fit_a_target_and_why_others_do_not(folder: Path) -> None:
    rows = json.loads(decoder("models", "--target", str(folder), "--json").stdout)
    drafts = {row["name"]: row["verdict"] for row in rows if row["kind"] == "draft"}
    assert all(drafts.values())
    assert drafts["Qwen/Qwen3-0.6B"] == "not here; made for Qwen/Qwen3-4B"
    assert "fits across vocabularies (other vocabulary:" in drafts["smollm2-draft"]
    assert "not token for token: " in drafts["smollm2-draft"]


def test_audit_of_a_tiny_model(folder: Path) -> None:
    done = decoder(
        "audit", "--target", str(folder), "--draft", str(folder), "--tokens", "40", "--prompts", "2", "--samples",
        "100", "--json",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert result["passed"]
    names = {"none", "draft-model", "ngram", "suffix", "prediction", "early-exit"}
    assert {g["proposer"] for g in result["greedy"]} == names
    assert all(g["verdict"] == "equal" for g in result["greedy"])
