"""What the tabs share, and what a tab is.

A tab is one file ``playground/tab_NAME.py`` with a module constant ``TAB = TabSpec(...)``; nothing else needs to know
of it. ``build`` makes its components; ``wire`` connects them once every tab has been built, so that a tab may lead to
another through ``Shell.built``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import gradio as gr

from playground.deeplinks import View

if TYPE_CHECKING:
    from playground.header import Header
    from playground.service import ModelService
    from storage import Store


@dataclass(frozen=True, slots=True)
class TabSpec:
    """A tab. ``id`` is its name in addresses (``/?tab=id``); ``order`` sorts the tabs from left to right."""

    id: str
    title: str
    order: int
    make: Callable[[Shell], Tab]


class Tab(Protocol):
    """A tab that is being built. Its handlers are methods: Gradio reads their type hints."""

    load_outputs: list[Any]
    """What ``on_load`` fills."""

    def build(self) -> None:
        """Make the components."""

    def wire(self) -> None:
        """Connect them, once every tab has been built."""

    def on_load(self, view: View) -> list[Any]:
        """Values for ``load_outputs`` when a page is opened at an address."""


@dataclass(repr=False)
class Shell:
    """One application: its store, its models, its page."""

    store: Store
    service: ModelService
    default_target: str
    signed_in: bool = False
    built: dict[str, Any] = field(default_factory=dict)
    """The tabs by their id: how one tab leads to another."""
    demo: gr.Blocks = None  # type: ignore[assignment]
    tabs: gr.Tabs = None  # type: ignore[assignment]
    panes: dict[str, gr.Tab] = field(default_factory=dict)
    header: Header = None  # type: ignore[assignment]
    specs: tuple[TabSpec, ...] = ()


def find_tabs() -> tuple[TabSpec, ...]:
    """Every ``tab_*`` module's ``TAB``, in order."""
    import playground

    names = sorted(m.name for m in pkgutil.iter_modules(playground.__path__) if m.name.startswith("tab_"))
    specs = [importlib.import_module(f"playground.{name}").TAB for name in names]
    return tuple(sorted(specs, key=lambda spec: spec.order))
