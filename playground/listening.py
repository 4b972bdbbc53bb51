"""How the page's events are listened to: keyword arguments for Gradio's listeners."""

from __future__ import annotations

from typing import Any

from playground.queue_position import MODEL

JS_ONLY: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
"""No overlay, not part of the public interface. At every message of an event the page copies all properties of what
shows its progress, hidden or not, with everything inside, and keeps a clock running for it at every picture: a third of
a core while a run streams. So nothing shows progress."""

QUICK: dict[str, Any] = {"queue": False, **JS_ONLY}
"""For events that answer at once: never queued behind model work."""

LIGHT: dict[str, Any] = {"concurrency_limit": None, **JS_ONLY}
"""For events that change a ``gr.State`` to which others listen, or that read the address: only queued events do."""

MODEL_WORK: dict[str, Any] = {"concurrency_id": MODEL, "concurrency_limit": 1, **JS_ONLY}
"""For every event that uses a model: one queue for the whole process."""
