"""Gradio's queue is read in one place: this fails when its insides change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import gradio as gr
from gradio.queueing import EventQueue

from playground.queue_position import MODEL, people_ahead


def test_people_ahead_counts_who_runs_and_who_waits() -> None:
    queue = EventQueue(MODEL, 1)
    assert queue.current_concurrency == 0
    queue.current_concurrency = 1
    queue.queue = [cast(Any, SimpleNamespace(session_hash=name)) for name in ("b", "c")]
    blocks = cast(gr.Blocks, SimpleNamespace(_queue=SimpleNamespace(event_queue_per_concurrency_id={MODEL: queue})))
    assert people_ahead(blocks, "b") == 1
    assert people_ahead(blocks, "c") == 2
    assert people_ahead(blocks, "nobody") is None
    assert people_ahead(blocks, None) is None


def test_blocks_have_that_queue() -> None:
    with gr.Blocks() as demo:
        gr.Textbox()
    assert demo._queue.event_queue_per_concurrency_id == {}
    assert people_ahead(demo, "x") is None
