"""How many people are before a visitor in Gradio's queue for model work.

This reads Gradio's own queue, the one truth about who waits. It is the only place that touches its internals; the
version is pinned, and tests/playground/test_queue_position.py fails when they change.
"""

from __future__ import annotations

import gradio as gr

MODEL = "model"
"""The concurrency id that every event with model work carries, with limit 1."""


def people_ahead(blocks: gr.Blocks, session: str | None) -> int | None:
    """Runs that are going on or wait before ``session``'s; None when it does not wait."""
    queue = blocks._queue.event_queue_per_concurrency_id.get(MODEL)
    if queue is None or session is None:
        return None
    waiting = list(queue.queue)
    place = next((i for i, event in enumerate(waiting) if event.session_hash == session), None)
    return None if place is None else place + queue.current_concurrency
