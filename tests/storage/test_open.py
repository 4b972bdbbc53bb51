"""Addresses and files that are no usable database: one sentence each, and the file is left as it was."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import DatabaseLocked, DatabaseReadOnly, DatabaseUnusable, StorageError, Store, open_store
from tests.storage.factories import keep, make_run

NOBODY = 65534


def refusal(url: str, **options: object) -> str:
    with pytest.raises(StorageError) as caught:
        open_store(url, busy_timeout=0.1, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "'' is not a database URL: write for example sqlite:///redline.db"),
        ("redline.db", "'redline.db' is not a database URL: write for example sqlite:///redline.db"),
        ("sqlite:/redline.db", "is not a database URL"),
        ("sqlite://redline.db", "three slashes"),
        ("sqlite:///a\0b", "NUL"),
        ("sqlite:///file:x?mode=ro&uri=true", "file: addresses are not supported"),
        ("nosuch://host/db", "no driver for 'nosuch' is installed"),
        ("postgresql+nosuchdriver://u:secret@host/db", "no driver for 'postgresql+nosuchdriver' is installed"),
        ("postgresql://u:secret@host:port/db", "is not a database URL"),
        ("\x1b[31m\n", "is not a database URL"),
    ],
)
def test_malformed_addresses(url: str, sentence: str) -> None:
    assert sentence in refusal(url)


def test_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "secret" not in refusal("postgresql+nosuchdriver://u:secret@host/db")


def test_a_folder(tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder: name a file in it" in refusal(f"sqlite:///{tmp_path}")


def test_a_missing_folder(tmp_path: Path) -> None:
    assert f"the folder {tmp_path}/no does not exist" in refusal(f"sqlite:///{tmp_path}/no/a.db")


def test_a_file_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert f"the folder {tmp_path}/f is not a folder" in refusal(f"sqlite:///{tmp_path}/f/a.db")


def test_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refusal(f"sqlite:///{tmp_path}/pipe")


def test_nothing_is_created_where_that_was_not_asked_for(tmp_path: Path) -> None:
    assert f"there is no database at {tmp_path}/a.db" in refusal(f"sqlite:///{tmp_path}/a.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"this is a letter\n" * 500, b"\x00" * 4096, b"SQLite format 3\x00" + b"\xff" * 5000]
)
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(content)
    message = refusal(f"sqlite:///{path}")
    assert "is not a database" in message or "is damaged" in message
    assert path.read_bytes() == content


def test_an_empty_file_is_a_fresh_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    with open_store(f"sqlite:///{tmp_path}/a.db") as store:
        assert store.summaries().total == 0


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE bookmarks (id)")
    before = path.read_bytes()
    assert "belongs to another program (it has a table 'bookmarks')" in refusal(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_newer_database_names_both_revisions(url: str) -> None:
    with open_store(url) as store:
        keep(store, make_run(2))
        path = store.database.url.database or ""
    with sqlite3.connect(path) as other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    message = refusal(url)
    assert "was written by a newer Redline: it is of revision '9999', this program knows up to '0003'" in message
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_a_damaged_database(url: str) -> None:
    with open_store(url) as store:
        for _ in range(5):
            keep(store, make_run(4))
        path = Path(store.database.url.database or "")
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"\xff" * 4096 * 10 + content[8192 + 4096 * 10 :])
    with pytest.raises(DatabaseUnusable, match="is damaged"), open_store(url) as store:
        store.export_json(store.ids())


def test_a_damaged_step_is_the_fault_of_one_run_only(store: Store) -> None:
    sound, broken = keep(store, make_run(3)), keep(store, make_run(3))
    with sqlite3.connect(store.database.url.database or "") as other:
        other.execute("UPDATE steps SET payload = '{}' WHERE run_id = ? AND step_index = 1", (broken.id,))
    with pytest.raises(StorageError, match=rf"run '{broken.id}': .*steps\[1\].index: missing"):
        store.get_run(broken.id)
    assert store.get_run(sound.id).run == sound
    assert store.summaries().total == 2
    assert store.delete([broken.id]) == 1


@pytest.mark.parametrize(
    "run_id", ["nope", "", "\0", "\ud800", "x" * 100_000, "a/../b", "<script>", "%", "' OR 1=1 --"]
)
def test_an_unknown_id_is_not_found_whatever_it_holds(store: Store, run_id: str) -> None:
    keep(store, make_run(1))
    for call in (store.get_run, lambda i: store.rename(i, "x"), lambda i: store.set_tags(i, ["x"])):
        with pytest.raises(StorageError, match="there is no run") as caught:
            call(run_id)
        assert str(caught.value).isprintable()
    assert store.delete([run_id]) == 0 if "\ud800" not in run_id else True


def test_a_locked_database_says_so_and_reading_goes_on(url: str) -> None:
    with open_store(url) as store:
        keep(store, make_run(2))
        other = sqlite3.connect(store.database.url.database or "", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with open_store(url, busy_timeout=0.1) as second:
            assert second.summaries().total == 1
            with pytest.raises(DatabaseLocked, match="locked by another process"):
                second.rename(second.ids()[0], "x")
        other.execute("ROLLBACK")
        other.close()


def test_a_database_that_is_held_alone_cannot_be_opened(url: str) -> None:
    with open_store(url) as store:
        path = store.database.url.database or ""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    assert "is locked by another process" in refusal(url)
    other.close()


def test_relative_paths_are_pinned_to_the_folder_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///here.db") as store:
        run = keep(store, make_run(2))
        store.database.engine.dispose()  # the next connection is a new one
        (tmp_path / "sub").mkdir()
        monkeypatch.chdir(tmp_path / "sub")
        assert store.get_run(run.id).run == run
    assert [path.name for path in tmp_path.iterdir()].count("here.db") == 1
    assert list((tmp_path / "sub").iterdir()) == []


def test_the_journal_mode_is_wal_and_keys_are_enforced(store: Store) -> None:
    with store.database.engine.connect() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        }
    assert values == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 1, "busy_timeout": 5000}


# --- without the right to write -------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may look into (pytest's own may not)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def as_nobody(check: Callable[[], None]) -> None:
    """Run ``check`` in a child without root's right to write everywhere."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "see the traceback above"


def make_database(path: Path) -> str:
    with open_store(f"sqlite:///{path}") as store:
        return keep(store, make_run(4, run_id="rkept"), name="kept").id


@pytest.mark.parametrize(
    ("file_mode", "folder_mode"), [(0o444, 0o555), (0o444, 0o777), (0o666, 0o555)], ids=["both", "file", "folder"]
)
def test_a_read_only_database_can_be_read(place: Path, file_mode: int, folder_mode: int) -> None:
    path = place / "a.db"
    run_id = make_database(path)
    path.chmod(file_mode)
    place.chmod(folder_mode)

    def check() -> None:
        with open_store(f"sqlite:///{path}") as store:
            assert store.read_only
            assert store.get_run(run_id).run == make_run(4, run_id=run_id)
            assert store.summaries().rows[0].name == "kept"
            assert store.export_csv([run_id])
            assert store.export_json([run_id])
            for write in (
                lambda: store.start_run(make_run(0)),
                lambda: store.rename(run_id, "x"),
                lambda: store.delete([run_id]),
                lambda: store.import_json("[]"),
            ):
                with pytest.raises(DatabaseReadOnly, match="is read-only: runs can be looked at, nothing can be"):
                    write()
            # Nothing is left behind that would be in the way of the owner.
            assert [p.name for p in place.iterdir()] == ["a.db"]

    as_nobody(check)
    with open_store(f"sqlite:///{path}") as store:
        assert store.get_run(run_id).meta.name == "kept"


def test_a_read_only_reader_sees_what_the_writer_writes_meanwhile(place: Path) -> None:
    path = place / "a.db"
    make_database(path)
    with open_store(f"sqlite:///{path}") as writer:
        keep(writer, make_run(2))  # in the journal, not in the file yet

        def check() -> None:
            with open_store(f"sqlite:///{path}") as store:
                assert store.read_only
                assert store.summaries().total == 2

        as_nobody(check)


def test_a_read_only_database_that_needs_an_upgrade_says_so(place: Path) -> None:
    path = place / "a.db"
    make_database(path)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE alembic_version SET version_num = '0002'")
    path.chmod(0o444)

    def check() -> None:
        with pytest.raises(DatabaseReadOnly, match="is read-only, and it is of revision 0002 while this program needs"):
            open_store(f"sqlite:///{path}")

    as_nobody(check)


def test_what_may_not_be_read_or_made_says_so(place: Path) -> None:
    path = place / "a.db"
    make_database(path)
    path.chmod(0o000)

    def unreadable() -> None:
        with pytest.raises(DatabaseUnusable, match="may not be read by this user"):
            open_store(f"sqlite:///{path}")

    def absent() -> None:
        with pytest.raises(DatabaseUnusable, match="cannot be created: the folder may not be written to"):
            open_store(f"sqlite:///{place}/b.db")

    as_nobody(unreadable)
    place.chmod(0o555)
    as_nobody(absent)
