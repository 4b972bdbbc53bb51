"""The list of runs on the page: its filters, its table, its pages. What is done with runs is in ``tab_history``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from decoder.errors import RedlineError
from playground.history_table import history_table, table_value
from playground.history_view import (
    ANY,
    ARCHIVED,
    PAGE_SIZE,
    clamp_offset,
    page_line,
    read_filter,
    read_order,
    row,
    zone,
)
from playground.listening import QUICK
from playground.notes import note
from storage import Page, RunFilter, Store

FILTERS = ("text", "target", "proposer", "k", "tag", "author", "since", "until", "archived")
NO_FILTER = ["", *[ANY] * 5, "", "", "active"]
START = {"offset": 0, "sort": "created_at", "descending": True, "asked": NO_FILTER}


class RunList:
    """Filters and table are built where ``build_filters`` and ``build_table`` are called."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def build_filters(self) -> None:
        """The row of filters, and the note beside them."""
        with gr.Row(elem_id="rl-filters", elem_classes="rl-filters"):
            self.text = gr.Textbox(
                label="Search", placeholder="name, note, prompt or answer", min_width=180, scale=3, elem_id="rl-search"
            )
            any_of = [("any", ANY)]
            self.target = gr.Dropdown(any_of, value=ANY, label="Target", min_width=120)
            self.proposer = gr.Dropdown(any_of, value=ANY, label="Proposer", min_width=120, elem_id="rl-by-proposer")
            self.k = gr.Dropdown(any_of, value=ANY, label="k", min_width=70)
            self.tag = gr.Dropdown(any_of, value=ANY, label="Tag", min_width=100)
            self.author = gr.Dropdown(any_of, value=ANY, label="Author", min_width=110)
            days = zone()
            self.since = gr.Textbox(
                label=f"From ({days})", placeholder="2025-01-31", max_length=10, min_width=120, elem_id="rl-since"
            )
            self.until = gr.Textbox(
                label=f"To ({days})", placeholder="2025-12-31", max_length=10, min_width=120, elem_id="rl-until"
            )
            self.kept = gr.Dropdown(list(ARCHIVED), value="active", label="Show", min_width=100, elem_id="rl-kept")

    def build_table(self) -> None:
        """The table and what turns its pages."""
        self.table = history_table()
        with gr.Row(elem_classes="rl-pager"):
            self.back = gr.Button("← Newer", size="sm", interactive=False, elem_id="rl-page-back")
            self.pages = gr.HTML("", elem_id="rl-pages")
            self.forth = gr.Button("Older →", size="sm", interactive=False, elem_id="rl-page-forth")
        self.view = gr.State(dict(START))

    @property
    def filters(self) -> list[Any]:
        """The filter controls, in the order of ``FILTERS``."""
        return [
            self.text,
            self.target,
            self.proposer,
            self.k,
            self.tag,
            self.author,
            self.since,
            self.until,
            self.kept,
        ]

    @property
    def inputs(self) -> list[Any]:
        """What every listing is made from: the view (page and order) and the filters."""
        return [self.view, *self.filters]

    def outputs(self, note_line: gr.HTML) -> list[Any]:
        """The outputs of ``listing``."""
        return [self.table, self.pages, self.back, self.forth, self.view, note_line]

    @property
    def offered(self) -> list[Any]:
        """The outputs of ``offers``."""
        return [self.target, self.proposer, self.k, self.tag, self.author]

    def wire(self, note_line: gr.HTML, seen: Sequence[Any]) -> None:
        """Connect filters, headings and pages. ``seen`` are the triggers that show the list anew as it stands.

        All that lists by the filters is one event: while one answer is awaited the next question waits for it, so that
        an older answer never replaces a newer one.
        """
        listed = self.outputs(note_line)
        dates = [trigger for box in (self.since, self.until) for trigger in (box.submit, box.blur)]
        chosen = [choice.input for choice in (*self.offered, self.kept)]
        gr.on(
            [self.text.change, *dates, *chosen, *seen],
            self.filtered,
            self.inputs,
            listed,
            trigger_mode="always_last",
            **QUICK,
        )
        gr.on(seen, self.offers, None, self.offered, **QUICK)
        self.back.click(self.newer, self.inputs, listed, **QUICK)
        self.forth.click(self.older, self.inputs, listed, **QUICK)
        self.table.order(self.ordered, self.inputs, listed, **QUICK)

    def listing(
        self, view: dict[str, Any], values: Sequence[Any], *, keep: Sequence[str] | None = None, said: Any = ""
    ) -> list[Any]:
        """Values for the list's outputs. ``said`` is the note beside it; a wrong filter says so instead.

        Filters other than those of the list on show (``view["asked"]``) start at the first page.
        """
        try:
            wanted = read_filter(dict(zip(FILTERS, values, strict=True)))
            if view["asked"] != list(values):
                view = {**view, "offset": 0, "asked": list(values)}
            page = self._page(wanted, view, view["offset"])
            offset = clamp_offset(view["offset"], page.total)
            if offset != view["offset"]:
                page = self._page(wanted, view, offset)
        except RedlineError as error:
            return [gr.skip()] * 4 + [view, note(str(error), "error")]
        empty = "No run yet: what you run in the Playground is kept here."
        if wanted != RunFilter():
            empty = "No run matches these filters."
        table = table_value(
            [row(summary) for summary in page.rows],
            sort=view["sort"],
            descending=view["descending"],
            empty=empty,
            keep=keep,
        )
        return [
            table,
            page_line(offset, len(page.rows), page.total),
            gr.update(interactive=offset > 0),
            gr.update(interactive=offset + PAGE_SIZE < page.total),
            {**view, "offset": offset},
            said,
        ]

    def _page(self, wanted: RunFilter, view: dict[str, Any], offset: int) -> Page:
        return self.store.summaries(
            wanted, sort=view["sort"], descending=view["descending"], limit=PAGE_SIZE, offset=offset
        )

    def filtered(self, view: dict[str, Any], *values: Any) -> list[Any]:
        """The runs that the filters leave."""
        return self.listing(view, values)

    def newer(self, view: dict[str, Any], *values: Any) -> list[Any]:
        """One page back."""
        return self.listing({**view, "offset": max(0, view["offset"] - PAGE_SIZE)}, values)

    def older(self, view: dict[str, Any], *values: Any) -> list[Any]:
        """One page on."""
        return self.listing({**view, "offset": view["offset"] + PAGE_SIZE}, values)

    def ordered(self, event: gr.EventData, view: dict[str, Any], *values: Any) -> list[Any]:
        """A click on a heading: sort by it, or turn the order round."""
        try:
            key = read_order(event._data)
        except RedlineError as error:
            return [*[gr.skip()] * 5, note(str(error), "error")]
        same = view["sort"] == key
        descending = not view["descending"] if same else key not in ("name", "target", "proposer", "author")
        return self.listing({**view, "offset": 0, "sort": key, "descending": descending}, values)

    def offers(self) -> list[Any]:
        """Choices of the filters."""
        try:
            found = self.store.facets()
        except RedlineError:
            return [gr.skip()] * 5
        lists: list[Sequence[Any]] = [found.targets, found.proposers, found.ks, found.tags, found.authors]
        return [gr.update(choices=[("any", ANY), *((str(v), str(v)) for v in values)]) for values in lists]
