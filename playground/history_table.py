"""The table of runs: a Gradio component whose rows are drawn in the browser by ``assets/js/history-table.js``.

Its value is JSON that is only ever set with ``textContent``. The browser keeps the selection, as ids, so that it
survives paging and sorting; it comes back in events and is checked by ``deeplinks.read_ids``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

from playground.history_view import SORTS

_ON_LOAD = """
window.RedlineShell.historyTable(element, props, watch, (name, data) => trigger(name, data));
/* events: 'pick' {selected: [id]}, 'open_run' {id}, 'order' {key} */
"""


def table_value(
    rows: Sequence[dict[str, Any]], *, sort: str, descending: bool, empty: str, keep: Sequence[str] | None = None
) -> str:
    """The table's value. ``keep`` replaces the selection (None leaves it to the browser)."""
    value = {
        "columns": SORTS,
        "rows": list(rows),
        "sort": sort,
        "descending": descending,
        "empty": empty,
        "keep": None if keep is None else list(keep),
    }
    return json.dumps(value).replace("<", "\\u003c")


def history_table(**kwargs: Any) -> gr.HTML:
    """The component; listen with ``.pick``, ``.open_run`` and ``.order``."""
    return gr.HTML(
        value=table_value([], sort="created_at", descending=True, empty="Loading…"),
        html_template="<div class='rl-table-host'></div>",
        js_on_load=_ON_LOAD,
        apply_default_css=False,
        elem_id="rl-history-table",
        **kwargs,
    )
