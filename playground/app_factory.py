"""Builds the page: header, tabs, addresses, interface for programs. ``app.py`` serves it."""

from __future__ import annotations

from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from playground import api
from playground.deeplinks import parse_view
from playground.header import Header
from playground.headers import SelfContained
from playground.listening import JS_ONLY, LIGHT
from playground.page_assets import head
from playground.service import ModelService
from playground.shell import Shell, find_tabs
from playground.theme import redline_theme
from storage import Store
from storage.transfer import MAX_BYTES

MAX_UPLOAD = MAX_BYTES
"""Bytes of an upload: as many as an import reads, so that whatever the page exports comes back."""


def build_app(store: Store, service: ModelService, *, target: str, signed_in: bool = False) -> gr.Blocks:
    """The whole page. ``signed_in`` says that visitors come with a name of their own."""
    shell = Shell(store, service, target, signed_in)
    shell.specs = find_tabs()
    with gr.Blocks(title="Redline", analytics_enabled=False, fill_width=True, delete_cache=(3600, 3600)) as demo:
        shell.demo = demo
        shell.header = Header(service.status, signed_in=signed_in)
        with gr.Tabs(selected=shell.specs[0].id, elem_id="rl-tabs") as shell.tabs:
            for spec in shell.specs:
                shell.built[spec.id] = spec.make(shell)
                with gr.Tab(spec.title, id=spec.id, elem_id=f"rl-tab-{spec.id}") as shell.panes[spec.id]:
                    shell.built[spec.id].build()
        shell.header.wire(demo, lambda: service.status)
        for spec in shell.specs:
            shell.built[spec.id].wire()
        _wire_addresses(shell)
        demo.unload(_leave(service))
        api.register(shell)
    demo.queue(default_concurrency_limit=None, max_size=200)
    return demo


def _leave(service: ModelService) -> Any:
    def leave(request: gr.Request) -> None:
        session = request.session_hash or ""
        service.forget(session)
        service.forget("compare " + session)

    return leave


def _wire_addresses(shell: Shell) -> None:
    """On opening a page: choose the tab that its address names and fill each tab."""
    ids = [spec.id for spec in shell.specs]
    told = gr.Textbox("", visible="hidden", elem_id="rl-opened-tab")
    outputs = [shell.tabs, told, *(out for name in ids for out in shell.built[name].load_outputs)]

    def load(request: gr.Request) -> list[Any]:
        view = parse_view(dict(request.query_params), ids)
        filled = [value for name in ids for value in shell.built[name].on_load(view)]
        return [gr.Tabs(selected=view.tab), view.tab, *filled]

    opened = shell.demo.load(load, None, outputs, **LIGHT)
    opened.then(None, told, None, js="(tab) => { window.RedlineShell.opened(tab); return []; }", **JS_ONLY)


def launch_options() -> dict[str, Any]:
    """What ``Blocks.launch`` is told beside host, port and sign-in: nothing leaves the page, no folder is served."""
    return {
        "theme": redline_theme(),
        "head": head(),
        "footer_links": ["api"],
        "run_history": False,
        "share": False,
        "pwa": False,
        "mcp_server": False,
        "ssr_mode": False,
        "enable_monitoring": False,
        "max_file_size": MAX_UPLOAD,
        "app_kwargs": {"middleware": [Middleware(SelfContained)], "docs_url": None, "redoc_url": None},
        "quiet": True,
        "show_error": False,
    }
