"""The stage: where a run is shown. One hidden feed hands the NDJSON to the browser; the views subscribe to it there."""

from __future__ import annotations

import gradio as gr

from playground import components


class Stage:
    """Centre and right column. ``feed`` is the output that everything is shown through."""

    feed: gr.HTML

    def build_centre(self) -> None:
        """Answer, numbers, ladder with its scrubber; and the feed."""
        self.feed = components.feed()
        components.answer()
        components.numbers()
        components.scrubber()
        components.ladder()

    def build_right(self) -> None:
        """The selected token explained, and the race."""
        components.why()
        components.race()
