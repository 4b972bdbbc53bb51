"""The five prompts behind the chips: one for each kind of work on which speculation fares differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """A chip. ``settings`` are further controls that it sets."""

    title: str
    prompt: str
    settings: dict[str, Any] = field(default_factory=dict)


_CODE = """class Basket:
    def __init__(self):
        self.items = []

    def add(self, item, price):
        self.items.append((item, price))

    def total(self):
        total = 0
        for item, price in self.items:
            total = total + price
        return total
"""

_ARTICLE = """The city of Bergen will open a new tram line along the harbour next spring. The line is nine kilometres \
long, has fourteen stops and replaces two bus routes. The city expects twenty thousand passengers a day. Building it \
took four years and cost two hundred million euros, a tenth less than planned, because an old railway bridge could be \
used again. Shop owners along the harbour had feared that they would lose customers during the work. Most of them now \
say that trade has grown since the street was closed to cars."""

EXAMPLES: tuple[Example, ...] = (
    Example("chat", "Explain in three sentences why the sky is blue."),
    Example("code", "Write a Python function that returns the n-th Fibonacci number, with a short docstring."),
    Example(
        "edit a file",
        "Rename the class to ShoppingCart and leave everything else as it is. Answer with the whole file only.\n\n"
        f"```python\n{_CODE}```",
        {"prediction": f"```python\n{_CODE}```"},
    ),
    Example("summarise", f"Summarise this text in two sentences:\n\n{_ARTICLE}"),
    Example("translate", "Translate into French: The train to the coast leaves at half past seven tomorrow morning."),
)
