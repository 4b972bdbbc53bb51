"""Broken, foreign, huge and hostile files: refused as a whole, in one sentence that says where."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import ImportRefused, RunFilter, StorageError, Store, open_store
from storage.strict_json import parse
from tests.storage.factories import keep, make_run, make_start

GOOD = make_run(3, run_id="rgood").to_json()
META = {
    "name": "",
    "tags": [],
    "note": "",
    "author": "ann",
    "created_at": "2026-01-31T12:00:00+00:00",
    "state": "done",
    "archived": False,
}


def refusal(store: Store, data: str | bytes, **options: Any) -> str:
    """The sentence; and nothing was stored."""
    with pytest.raises(StorageError) as caught:
        store.import_json(data, **options)
    assert store.summaries().total == 0
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 700
    return message


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good run with one field set; ``path`` as errors write it."""
    run = copy.deepcopy(GOOD)
    target: Any = run
    *way, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
    for key in way:
        target = target[key]
    target[last] = value
    return run


def envelope(run: Any = GOOD, **meta: Any) -> str:
    return json.dumps({"redline": "runs", "schema": 1, "runs": [{"run": run, "meta": {**META, **meta}}]})


def nested(text: str, depth: int) -> str:
    return "[" * depth + text + "]" * depth


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("", "the file is empty"),
        (b"\xef\xbb\xbf \n", "the file is empty"),
        ('{\n "a": 1,\n "b" 2\n}', "line 3, column 6"),
        ('{"a": 1', "line 1, column 8"),
        ("[1, 2,, 3]", "line 1, column 7"),
        ("[1] trailing", "line 1, column 5"),
        ('{"a": "un\nended"}', "line 1, column 10"),
        ("<html>no</html>", "line 1, column 1"),
        ("id,name\n1,2\n", "line 1, column 1"),
        (b"PK\x03\x04\x00\x00", "line 1, column 1"),
        (b'{\n"a": "\xff"}', "not UTF-8: bad byte at line 2, column 7"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8: bad byte at line 1, column 1"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        ('{"NaN": "NaN",\n "x": NaN}', "NaN is not JSON (line 2, column 7)"),
        ('["\\"Infinity", -Infinity]', "-Infinity is not JSON (line 1, column 16)"),
        ("[" + "9" * 401 + "]", "401 digits is too large (line 1, column 2)"),
        ("[" + "9" * 5000 + "]", "5,000 digits"),
        ("[0." + "9" * 5000 + "]", "5,002 characters"),
        ('{"id": "a", "id": "b"}', "the field 'id' stands twice"),
        (nested("", 100_000), "nested too deeply"),
        ('{"schema": ' * 100_000, "nested too deeply"),
    ],
    ids=range(21),
)
def test_broken_json_is_refused_with_line_and_column(store: Store, data: str | bytes, sentence: str) -> None:
    assert sentence in refusal(store, data)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("null", "neither an export of Redline nor a run"),
        ("7", "neither an export of Redline nor a run"),
        ('"run"', "neither an export of Redline nor a run"),
        ("{}", "neither an export of Redline nor a run"),
        ('{"model": "gpt", "choices": []}', "neither an export of Redline nor a run"),
        ("[7]", "[0]: expected an object, found a number"),
        ("[[]]", "[0]: expected an object, found a list"),
        ("[{}]", "[0].schema: this program reads schema 1, found none"),
        ('{"redline": "sweeps", "schema": 1, "runs": []}', "redline: expected 'runs'"),
        ('{"redline": "runs", "schema": 2, "runs": []}', "schema: this program reads exports of schema 1"),
        ('{"redline": "runs", "schema": true, "runs": []}', "schema: this program reads"),
        ('{"redline": "runs", "runs": []}', "schema: missing"),
        ('{"redline": "runs", "schema": 1}', "runs: missing"),
        ('{"redline": "runs", "schema": 1, "runs": {}}', "runs: expected a list"),
        ('{"redline": "runs", "schema": 1, "runs": [], "more": 1}', "more: unknown field"),
        ('{"redline": "runs", "schema": 1, "runs": [7]}', "runs[0]: expected an object"),
        ('{"redline": "runs", "schema": 1, "runs": [{"meta": null}]}', "runs[0].run: missing"),
        (json.dumps({**GOOD, "schema": 2}), "schema: this program reads schema 1, found 2"),
        (json.dumps({**GOOD, "__class__": "os.system"}), "__class__: unknown field"),
        (json.dumps({key: GOOD[key] for key in GOOD if key != "dtype"}), "dtype: missing"),
    ],
    ids=range(20),
)
def test_foreign_json_is_refused_with_its_field(store: Store, data: str, sentence: str) -> None:
    assert sentence in refusal(store, data)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("id", "../../etc/passwd", "an id is made of letters"),
        ("id", "", "an id is made of letters"),
        ("id", "x" * 65, "longer than 64"),
        ("id", "<script>", "an id is made of letters"),
        ("k", -1, "not between"),
        ("k", 1e400, "expected a whole number"),
        ("seed", 2**63, "not between"),
        ("seed", 10**300, "not between"),
        ("text", "\ud800", "half of a surrogate pair"),
        ("text", None, "expected a string"),
        ("request.prompt", "\udfff", "half of a surrogate pair"),
        ("request", {"\ud800": 1}, "surrogate"),
        ("metrics.x", 1e400, "not a finite number"),
        ("prefill_ms", 1e400, "not a finite number"),
        ("prefill_ms", -1, "not between"),
        ("prompt_ids[0]", 2**31, "not between"),
        ("prompt_ids[0]", True, "expected a whole number"),
        ("finish_reason", "tired", "is not one of eos"),
        ("steps[1].drafts[0].q", 1.5, "not between"),
        ("steps[1].drafts[0].verdict", "maybe", "is not one of accepted"),
        ("steps[1].drafts[0].top_q[0].probability", "1", "expected a number"),
        ("steps[1].emitted[0].p", -0.5, "not between"),
        ("steps[2].index", 7, "the trace contradicts itself"),
        ("output_ids[0]", 5, "the trace contradicts itself"),
        ("decode_ms", 1.0, "the trace contradicts itself"),
        ("versions.torch", 2, "expected a string"),
    ],
)
def test_a_wrong_field_is_named(store: Store, path: str, value: Any, problem: str) -> None:
    run = changed(path, value)
    named = path if "contradicts" not in problem else ""
    for prefix, data in (("", json.dumps(run)), ("[0].", json.dumps([run])), ("runs[0].run.", envelope(run))):
        message = refusal(store, data.replace("Infinity", "1e400"))  # JSON, and more than a float holds
        assert problem in message
        if named:
            assert f"{prefix}{named}: " in message


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({"name": "x" * 201}, "meta.name: the name has 201 characters"),
        ({"name": None}, "meta.name: the name must be text, not NoneType"),
        ({"note": "\ud800"}, "meta.note: the note holds half of a surrogate pair"),
        ({"tags": "a,b"}, "meta.tags: expected a list"),
        ({"tags": ["a", 7]}, "meta.tags: the tag must be text"),
        ({"tags": [" "]}, "meta.tags: a tag must not be empty"),
        ({"tags": [str(i) for i in range(51)]}, "meta.tags: 51 tags"),
        ({"author": ["ann"]}, "meta.author: the author must be text"),
        ({"created_at": "yesterday"}, "meta.created_at: expected a date"),
        ({"created_at": "2026-01-31T12:00:00"}, "meta.created_at: the time zone is missing"),
        ({"created_at": "0001-01-01T00:00:00+14:00"}, "meta.created_at: expected a date"),
        ({"created_at": 5}, "meta.created_at: expected a date"),
        ({"state": "running"}, "meta.state: expected 'done'"),
        ({"state": "failed"}, "meta.state: expected 'done'"),
        ({"archived": 1}, "meta.archived: expected true or false"),
        ({"is_admin": True}, "meta.is_admin: unknown field"),
    ],
    ids=range(16),
)
def test_a_wrong_meta_is_named(store: Store, meta: dict[str, Any], problem: str) -> None:
    assert "runs[0]." + problem in refusal(store, envelope(**meta))


def test_a_missing_meta_field_is_named(store: Store) -> None:
    for field in META:
        meta = {key: value for key, value in META.items() if key != field}
        data = json.dumps({"redline": "runs", "schema": 1, "runs": [{"run": GOOD, "meta": meta}]})
        assert f"runs[0].meta.{field}: missing" in refusal(store, data)


def test_one_bad_run_keeps_all_out(store: Store) -> None:
    runs = [make_run().to_json() for _ in range(4)]
    runs[3]["steps"][2]["drafts"][0]["u"] = "high"
    assert "[3].steps[2].drafts[0].u" in refusal(store, json.dumps(runs))


def test_the_same_id_twice_in_a_file(store: Store) -> None:
    assert "the id 'rgood' stands twice in this file (first at [0])" in refusal(store, json.dumps([GOOD, GOOD]))


def test_another_run_of_the_same_id_is_never_replaced(store: Store) -> None:
    ours = keep(store, make_run(), name="ours")
    theirs = make_run(5, run_id=ours.id, seed=9)
    with pytest.raises(ImportRefused, match=f"there is another run '{ours.id}' in this database; nothing was imported"):
        store.import_json(json.dumps([make_run().to_json(), theirs.to_json()]))
    assert store.summaries().total == 1
    assert store.get_run(ours.id).run == ours


def test_a_run_that_is_being_written_is_not_replaced(store: Store) -> None:
    run = make_run()
    writer = store.start_run(make_start(run_id=run.id))
    with pytest.raises(ImportRefused, match="there is another run"):
        store.import_json(json.dumps(run.to_json()))
    writer.finish(run)
    assert store.import_json(json.dumps(run.to_json())).known == [run.id]


def test_a_failure_in_the_middle_of_storing_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from storage import transfer

    insert, calls = transfer.insert_run, []

    def fails_at_the_third(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise StorageError("the disk is full")
        insert(*args)

    monkeypatch.setattr(transfer, "insert_run", fails_at_the_third)
    assert "the disk is full" in refusal(store, json.dumps([make_run().to_json() for _ in range(4)]))


@pytest.mark.parametrize("kind", [str, bytes])
def test_size_is_refused_before_anything_is_read(store: Store, kind: Callable[[Any], Any]) -> None:
    huge = "[" * 30_000_000  # would be refused for its depth, had it been read
    data = huge if kind is str else huge.encode()
    started = time.process_time()
    assert "larger than 20 MB" in refusal(store, data, max_bytes=20_000_000)
    assert time.process_time() - started < 5


def test_the_limit_is_the_callers(store: Store) -> None:
    text = json.dumps(GOOD)
    assert "larger than" in refusal(store, text, max_bytes=len(text) - 1)
    assert store.import_json(text, max_bytes=len(text)) == ["rgood"]


def test_hostile_keys_cannot_break_the_sentence(store: Store) -> None:
    run = {**GOOD, "x\n\x1b[31m\u202e" + "y" * 10_000: 1}
    message = refusal(store, json.dumps(run))
    assert "unknown field" in message
    assert "\\n" in message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_stands_in_a_field_it_is_stored_or_refused_in_a_sentence(data: st.DataObject) -> None:
    """Anything in any field: never another exception than StorageError, and never half of a file."""
    entry = {"run": copy.deepcopy(GOOD), "meta": dict(META)}
    spot: Any = {"redline": "runs", "schema": 1, "exported_at": None, "runs": [entry]}
    whole = spot
    while True:
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        below = spot[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.integers(0, 5)) == 0:
            spot[key] = data.draw(json_values)
            break
        spot = below
    with open_store("sqlite://") as store:
        try:
            ids = store.import_json(json.dumps(whole))
        except StorageError as error:
            problem = str(error)
            assert problem.isprintable()
            assert store.summaries(RunFilter(archived=None)).total == 0
        else:
            for run_id in ids:
                store.get_run(run_id)
            again = store.export_json(ids)
            assert store.import_json(again).known == ids


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(st.characters(), max_size=200))
def test_any_bytes_and_any_text_are_refused_in_a_sentence(data: bytes | str) -> None:
    try:
        parse(data, max_bytes=1000)
    except ImportRefused as error:
        problem = str(error)
        assert problem.isprintable()
