"""What a person sees of a run: Gradio containers, drawn by assets/js from one feed.

Every view brings its own card; ``scrubber()`` stands directly before ``ladder()`` and shares its card. Mount ``feed()``
once per page, pass ``head_html()`` to ``launch(head=...)``, set the feed's value to text made by ``playground.feed``.
"""

from playground.components.assets import head_html
from playground.components.stage import answer, compare, feed, ladder, numbers, race, scrubber, why

__all__ = [
    "answer",
    "compare",
    "feed",
    "head_html",
    "ladder",
    "numbers",
    "race",
    "scrubber",
    "why",
]
