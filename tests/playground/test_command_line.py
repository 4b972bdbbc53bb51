"""``python app.py``: every mistake is one line on stderr and exit code 2; nothing heavy is imported for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from playground import auth, command_line
from playground.command_line import is_loopback

ROOT = Path(__file__).resolve().parents[2]


def app(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run app.py to its end."""
    return subprocess.run(
        [sys.executable, "app.py", *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "99999999"], "--port must be from 1 to 65535"),
        (["--port", "many"], "valid integer"),
        (["--colour", "red"], "--colour"),
        (["--host", "no such host"], "is not an address"),
        (["--db", "nonsense"], "nonsense"),
        (["--db", "sqlite:////nowhere/at/all/x.db"], "/nowhere/at/all"),
        (["--auth", "/nowhere"], "cannot be read"),
        (["hash-password", "a:b"], "colon"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], sentence: str) -> None:
    ended = app(*arguments)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line]
    assert len(lines) == 1
    assert sentence in lines[0]
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = app("--port", str(taken.getsockname()[1]))
    assert ended.returncode == 2
    assert "is in use" in ended.stderr


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk " * 1000)
    ended = app("--db", f"sqlite:///{tmp_path / 'notes.txt'}")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


def test_hash_password_makes_a_line_that_is_accepted(tmp_path: Path) -> None:
    ended = app("hash-password", "ada", stdin="secret\n")
    assert ended.returncode == 0
    assert ended.stdout.startswith("ada:$argon2id$")
    file = tmp_path / "users"
    file.write_text(ended.stdout)
    assert auth.verifier(auth.read_password_file(file))("ada", "secret")
    alone = app("hash-password", stdin="secret\n")
    assert alone.stdout.startswith("$argon2id$")
    assert "secret" not in ended.stdout + alone.stdout


def test_prompts_stay_out_of_the_password_file(tmp_path: Path) -> None:
    """At a terminal with stdout redirected, as in ``hash-password >> users``."""
    code = (
        "import sys, getpass; from playground import command_line; sys.stdin.isatty = lambda: True; "
        "getpass.getpass = lambda words: 'secret'; command_line.main(['hash-password'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input="ada\n", capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.startswith("Name")
    file = tmp_path / "users"
    file.write_text(ended.stdout)
    assert auth.verifier(auth.read_password_file(file))("ada", "secret")


def test_help_says_what_a_nameless_password_gives() -> None:
    assert "prints only the hash" in " ".join(app("hash-password", "--help").stdout.split())


@pytest.mark.parametrize("arguments", [["-m", "not browser"], ["-x", "-m", "not (browser or model)"]])
def test_without_browser_tests_no_browser_is_needed(arguments: list[str]) -> None:
    for given, code in ((arguments, 0), ([], 1)):
        ended = subprocess.run(
            ["/bin/sh", "tests/chromium.sh", *given], cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True
        )
        assert ended.returncode == code


def test_an_empty_password_is_refused() -> None:
    ended = app("hash-password", "ada", stdin="\n")
    assert ended.returncode == 2
    assert "the password is empty" in ended.stderr


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("192.168.1.4", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys; import playground.command_line; "
        "print(sorted(m for m in ('gradio', 'torch', 'sqlalchemy', 'plotly', 'pandas') if m in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(("flags", "expected"), [([], "1"), (["--no-compile"], "0")])
def test_compiling_can_be_switched_off(flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_COMPILE", "1")
    monkeypatch.setattr(command_line, "check_address", lambda host, port: None)
    seen: list[str] = []
    monkeypatch.setattr(command_line, "run_server", lambda *_: seen.append(os.environ["REDLINE_COMPILE"]))
    with pytest.raises(SystemExit) as ended:
        command_line.main(flags)
    assert ended.value.code == 0
    assert seen == [expected]
