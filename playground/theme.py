"""The Gradio theme: system fonts only, so that no font is ever fetched from elsewhere; colours come from assets/css."""

from __future__ import annotations

import gradio as gr

SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace")


def redline_theme() -> gr.themes.Base:
    """A plain base theme with neutral hues and the mark's red as the one accent."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.red,
        secondary_hue=gr.themes.colors.stone,
        neutral_hue=gr.themes.colors.stone,
        font=list(SANS),
        font_mono=list(MONO),
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
        text_size=gr.themes.sizes.text_md,
    )
