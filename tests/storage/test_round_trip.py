"""What is stored is read back equal: every text a token can hold, every bit of every float."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.trace import FinishReason, Run, violations
from storage import Store, open_store
from storage.codec import dump
from tests.storage.factories import complete, keep, make_id, make_run, make_start, make_step

HOSTILE = [
    "",
    "\0",
    "a\0b\0",
    "\u202egnp.exe\u2066\u2069\u200f",
    "<script>alert(1)</script>",
    "${1+1} `x` {{x}} {% y %}",
    "'; DROP TABLE runs; --",
    "\\u0000 \\ \" '' %s :name ?",
    "\ufeff\ufffe\uffff\ufdd0",
    "e\u0301 é ß İ ı ﬁ",
    "👩‍👩‍👧‍👦 字 \U0010ffff",
    "\r\n\t\v\f\x1b[31m\x7f\x85\u2028\u2029",
    "x" * 10_000,
]

texts = st.one_of(st.text(max_size=40), st.sampled_from(HOSTILE))
probabilities = st.floats(0, 1, allow_subnormal=True)
times = st.just(0.0) | st.floats(1e-9, 1e7)  # shorter ones make speeds infinite
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Sound runs with any text and any float in every place that holds one."""
    k = draw(st.integers(0, 3))
    reason = draw(st.sampled_from(list(FinishReason)))
    steps = []
    for index in range(draw(st.integers(0, 4))):
        step = make_step(index, k=k, seed=draw(st.integers(0, 99)), text=draw(texts))
        tops = tuple(top.__class__(top.id, draw(texts), draw(probabilities)) for top in step.residual_top)
        drafts = tuple(
            type(d)(
                id=d.id, text=d.text, parent=d.parent, p=d.p and draw(probabilities), q=draw(probabilities),
                accept_prob=d.accept_prob and draw(probabilities), u=d.u and draw(probabilities), verdict=d.verdict,
                top_p=d.top_p, top_q=tops,
            )
            for d in step.drafts
        )  # fmt: skip
        steps.append(
            type(step)(
                index, k, drafts, step.emitted, tops,
                *((0.0, 0.0, 0.0) if index == 0 else (draw(times), draw(times), draw(times))),
            )
        )  # fmt: skip
    start = make_start(run_id=make_id(), prompt=draw(texts), k=k, seed=draw(st.integers(0, 2**63 - 1)))
    request = {**start.request, "system_prompt": draw(texts), "extra": draw(values)}
    run = complete(start.replace(request=request), tuple(steps), reason)
    return run.replace(
        target=draw(texts)[:1000],
        draft=draw(st.none() | texts.map(lambda text: text[:1000])),
        error=draw(st.none() | texts),
        versions={"torch": draw(texts)[:1000]},
        prefill_ms=draw(times),
        ttft_ms=draw(times),
        metrics={**run.metrics, "more": draw(values)},
    )


@lru_cache(maxsize=1)
def _pair() -> tuple[Store, Store]:
    """Two databases for all examples; every run has an id of its own."""
    return open_store("sqlite://"), open_store("sqlite://")


@settings(max_examples=60, deadline=None)
@given(
    run=runs(), name=texts.filter(lambda t: len(t) <= 200), note=texts, tag=texts.map(lambda t: t[:50].strip() or "t")
)
def test_any_run_comes_back_as_it_was_and_survives_export_and_import(run: Run, name: str, note: str, tag: str) -> None:
    assert violations(run) == []
    store, other = _pair()
    keep(store, run, name=name, note=note, tags=[tag])
    stored = store.get_run(run.id)
    assert stored.run == run
    assert dump(stored.run.to_json()) == dump(run.to_json())  # tells 0.0 from -0.0 and 1 from 1.0, unlike ==
    assert (stored.meta.name, stored.meta.note, stored.meta.tags) == (name, note, (tag,))

    export = store.export_json([run.id])
    other.import_json(export)
    assert other.get_run(run.id).run == run
    assert json.loads(other.export_json([run.id]))["runs"] == json.loads(export)["runs"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_in_every_place_comes_back_from_a_file(store: Store, url: str, text: str) -> None:
    run = make_run(text=text, prompt=text).replace(
        error=text, versions={text[:900]: text[:900]}, fingerprint=text[:900]
    )
    name, tag = text[:200], text[:100].strip() or "tag"
    keep(store, run, name=name, note=text, tags=[tag], author=text[:100])
    store.close()
    with open_store(url) as again:
        stored = again.get_run(run.id)
        row = again.summaries().rows[0]
    assert stored.run == run
    assert (stored.meta.name, stored.meta.note, stored.meta.tags) == (name, text, (tag,))
    assert stored.meta.author == (text[:100].strip() or "anonymous")
    assert row.prompt_preview == text[:200].replace("\0", "\u2400")


def test_a_huge_text_is_stored_and_its_preview_is_short(store: Store) -> None:
    run = make_run(3, text="字" * 300_000, prompt="p" * 1_000_000)
    keep(store, run)
    assert store.get_run(run.id).run == run
    row = store.summaries().rows[0]
    assert len(row.text_preview) == len(row.prompt_preview) == 200


@pytest.mark.parametrize("value", [5e-324, 2.2250738585072014e-308, 0.1 + 0.2, 1 / 3, 1 - 2**-53, 123456.78901234567])
def test_floats_are_kept_to_the_last_bit(store: Store, value: float) -> None:
    run = make_run(1).replace(prefill_ms=value, ttft_ms=-0.0)
    keep(store, run)
    back = store.get_run(run.id).run
    row = store.summaries().rows[0]
    assert back.prefill_ms.hex() == row.prefill_ms.hex() == value.hex()
    assert back.ttft_ms.hex() == "-0x0.0p+0"


def test_a_speed_that_is_no_number_is_left_out(store: Store) -> None:
    """Absurdly short steps make 1000 * tokens / ms infinite; a list must stay JSON."""
    first, second = make_step(0, k=0), make_step(1, k=0)
    short = type(second)(1, 0, (), second.emitted, (), 5e-324, 0.0, 0.0)
    run = keep(store, complete(make_start(proposer="none"), (first, short)).replace(metrics={}))
    row = store.summaries().rows[0]
    assert (row.id, row.tokens_per_second) == (run.id, None)
    json.dumps(row.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request": {"prompt": "\ud800"}}, "request.prompt"),
        ({"request": {"prompt": float("nan")}}, "request.prompt"),
        ({"target": "\udfff"}, "target"),
        ({"seed": -1}, "seed"),
        ({"request": {"stop": ("a",)}}, "JSON"),
        ({"versions": {"torch": 2}}, "versions.torch"),
    ],
)
def test_a_run_that_could_not_be_read_back_is_refused_at_once(store: Store, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        store.start_run(make_start().replace(**change))
    assert store.summaries().total == 0
