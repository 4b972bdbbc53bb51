"""``python -m storage``: what a person types, and what a script reads."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage import Store, open_store
from storage.__main__ import main
from tests.storage.factories import keep, make_run

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    """What a call left: as ``subprocess.run`` would tell it."""

    returncode: int
    stdout: bytes
    stderr: bytes


Caller = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Caller:
    """Call the command line in this process, from a given working folder: quick."""

    def run(folder: Path, *arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsysbinary.readouterr()
        code = main(list(arguments))
        out, errors = capsysbinary.readouterr()
        return Done(code, out, errors)

    return run


@pytest.fixture
def good(call: Caller) -> Callable[..., str]:
    """Call what must succeed; its output."""

    def run(folder: Path, *arguments: str, stdin: bytes = b"") -> str:
        done = call(folder, *arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    return run


def process(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Call it as a shell does."""
    return subprocess.run(
        [sys.executable, "-m", "storage", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with three runs in redline.db."""
    with open_store(f"sqlite:///{tmp_path}/redline.db") as store:
        keep(store, make_run(3, run_id="ra", prompt="The sky"), name="first\x1b[31m\nline", author="ann", tags=["x"])
        keep(store, make_run(3, run_id="rb", proposer="none"), author="bob")
        keep(store, make_run(3, run_id="rc", text="\0<b>[bold]\u202e"))
        store.archive(["rc"])
    return tmp_path


@pytest.fixture
def reader(folder: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{folder}/redline.db") as store:
        yield store


def test_list_is_for_people(folder: Path, good: Callable[..., str]) -> None:
    out = good(folder, "list")
    lines = out.splitlines()
    assert lines[-1] == "1 to 2 of 2"
    assert "rb" in lines[2]
    assert "first\\x1b[31m\\nline" in lines[3]
    assert all(line.isprintable() for line in lines)
    assert len(good(folder, "list", "--all").splitlines()) == 6
    assert "rc" in good(folder, "list", "--archived")
    assert good(folder, "list", "--author", "carl") == "no runs\n"


def test_list_json_is_for_scripts(folder: Path, good: Callable[..., str]) -> None:
    def ids(*arguments: str) -> list[str]:
        page = json.loads(good(folder, "list", "--json", *arguments))
        assert page["total"] >= len(page["rows"])
        return [row["id"] for row in page["rows"]]

    assert ids() == ["rb", "ra"]
    assert ids("--ascending", "--sort", "id") == ["ra", "rb"]
    assert ids("--text", "FIRST") == ["ra"]
    assert ids("--tag", "x", "--author", "ann", "-k", "4", "--proposer", "draft-model") == ["ra"]
    assert ids("--limit", "1", "--offset", "1") == ["ra"]
    assert ids("--since", "2020-01-01", "--until", "2020-12-31") == []
    assert ids("--since", "2020-01-01") == ["rb", "ra"]
    assert ids("--state", "done", "--target", "smollm2-135m") == ["rb", "ra"]


def test_show(folder: Path, good: Callable[..., str]) -> None:
    out = good(folder, "show", "ra", "--steps")
    assert "first\\x1b[31m\\nline" in out
    assert "step 2" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert (
        json.loads(good(folder, "show", "rc", "--json")) == make_run(3, run_id="rc", text="\0<b>[bold]\u202e").to_json()
    )


def test_export_and_import_again(
    folder: Path, good: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    good(folder, "export", "--all", "--output", "out.json")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert good(elsewhere, "import", str(folder / "out.json")) == "3 runs imported\n"
    assert good(elsewhere, "import", str(folder / "out.json")) == "0 runs imported, 3 already here\n"
    ours = json.loads(good(folder, "export", "ra", "rb", "rc"))["runs"]
    theirs = json.loads(good(elsewhere, "export", "ra", "rb", "rc"))["runs"]
    assert theirs == ours
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "redline.db"]  # no half file beside it


def test_export_csv_and_an_url_of_another_place(
    folder: Path, good: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    out = good(elsewhere, "export", "ra", "--format", "csv", "--db", f"sqlite:///{folder}/redline.db")
    assert [row["id"] for row in csv.DictReader(io.StringIO(out, newline=""))] == ["ra"]
    assert list(elsewhere.iterdir()) == []


def test_import_takes_what_the_decoder_prints_from_stdin(folder: Path, good: Callable[..., str], reader: Store) -> None:
    run = make_run(3, run_id="rnew")
    out = good(folder, "import", "-", "--author", "carl", "--json", stdin=json.dumps(run.to_json()).encode())
    assert json.loads(out) == {"new": ["rnew"], "known": []}
    assert reader.get_run("rnew").run == run
    assert (reader.get_run("rnew").meta.author, reader.get_run("rnew").meta.imported_from) == ("carl", "stdin")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Missing command"),
        (("frobnicate",), "No such command"),
        (("list", "--frob"), "No such option"),
        (("list", "--limit", "many"), "--limit"),
        (("list", "--limit", "-1"), "limit must be a whole number"),
        (("list", "--sort", "beauty"), "cannot be sorted by 'beauty'"),
        (("list", "--state", "asleep"), "unknown state 'asleep'"),
        (("list", "--since", "yesterday"), "--since 'yesterday' is not a date"),
        (("list", "--db", "redline.db"), "is not a database URL: write for example sqlite:///redline.db"),
        (("list", "--db", "sqlite:///absent.db"), "there is no database at"),
        (("show",), "Missing argument 'ID'"),
        (("show", "nope"), "there is no run 'nope'"),
        (("show", "a\nb\x1b"), "there is no run"),
        (("export",), "say which runs"),
        (("export", "ra", "--all"), "not both"),
        (("export", "ra", "nope"), "there is no run 'nope'"),
        (("export", "ra", "--format", "xml"), "unknown format 'xml'"),
        (("export", "ra", "-o", "no/such/file"), "cannot be written: No such file"),
        (("export", "ra", "-o", "."), "cannot be written"),
        (("import",), "Missing argument"),
        (("import", "absent.json"), "absent.json cannot be read: No such file"),
        (("import", "."), "cannot be read: Is a directory"),
        (("import", "redline.db"), "redline.db: "),
        (("import", "-"), "stdin: the file is empty"),
        (("import", "redline.db", "--max-mb", "0.001"), "redline.db: the file is larger than 0.001 MB"),
        (("import", "redline.db", "--max-mb", "nan"), "--max-mb must be above 0"),
    ],
    ids=range(26),
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, call: Caller, arguments: tuple[str, ...], sentence: str
) -> None:
    before = (folder / "redline.db").read_bytes()
    done = call(folder, *arguments)
    errors = done.stderr.decode()
    assert done.returncode == 2, errors
    assert errors.count("\n") == 1
    assert errors.endswith("\n")
    assert errors.rstrip("\n").isprintable()
    assert sentence in errors
    assert done.stdout == b""
    assert (folder / "redline.db").read_bytes() == before


def test_a_refused_file_among_good_ones_is_named(folder: Path, call: Caller, reader: Store) -> None:
    (folder / "good.json").write_text(json.dumps(make_run(1, run_id="rgood").to_json()))
    (folder / "bad.json").write_text('[{"schema": 7}]')
    done = call(folder, "import", "good.json", "bad.json")
    assert done.returncode == 2
    assert b"bad.json: this file was refused: [0].schema" in done.stderr
    assert b"the files before it were imported" in done.stderr
    assert reader.get_run("rgood").meta.imported_from == "good.json"


def test_a_shell_sees_the_same(folder: Path) -> None:
    done = process(folder, "show", "nope")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"error: there is no run 'nope' in this database\n"
    done = process(folder, "list", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["total"] == 2


def test_any_locale_will_do(folder: Path) -> None:
    done = process(folder, "show", "rc", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    failed = process(folder, "show", "ünknown", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert failed.returncode == 2
    assert failed.stderr.count(b"\n") == 1


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    with open_store(f"sqlite:///{folder}/redline.db") as store:
        keep(store, make_run(2, run_id="rbig", text="x" * 200_000))
    child = subprocess.Popen(
        [sys.executable, "-m", "storage", "export", "--all"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.wait(60)
    child.stderr.close()
