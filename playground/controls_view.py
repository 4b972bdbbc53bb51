"""The left column: the controls as Gradio components, and what greys them out.

Names and order are those of ``controls.CONTROLS``; what may be combined with what is decided there, not here. Numbers
have no bounds of their own: a value that cannot be run is answered by ``to_request`` with a sentence.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import gradio as gr

from decoder import catalog
from decoder.request import GenerationRequest
from playground.controls import CONTROLS, excluded, from_request
from playground.draft_cards import card
from playground.example_prompts import EXAMPLES, Example
from playground.length_picker import length_value, settle_length, shape_value
from playground.pairs import WITH_DRAFT, draft_options, standings
from playground.picker_view import Picker
from playground.proposer_picker import draft_value, proposer_value

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")
MODES = (("chat", "chat"), ("raw text", "raw"))
SYSTEM_MODES = (("the model's own default", "default"), ("an empty one", "empty"), ("my own", "own"))
_GATED = (
    "system_mode",
    "system_prompt",
    "draft",
    "k",
    "draft_length",
    "confidence",
    "tree",
    "tree_nodes",
    "tree_width",
    "ngram_min",
    "ngram_max",
    "suffix_depth",
    "suffix_factor",
    "suffix_min_prob",
    "suffix_earlier",
    "prediction",
    "exit_layer",
    "top_k",
    "top_p",
    "min_p",
    "baseline",
)
"""Controls that others can exclude, in the order of ``gate``'s updates."""
_LABELS = {
    "system_mode": "System prompt",
    "system_prompt": "My system prompt",
    "k": "Draft length k",
    "confidence": "Least confidence",
    "tree_nodes": "Tokens in a tree, at most",
    "tree_width": "Tokens for one place, at most",
    "ngram_min": "Shortest n-gram",
    "ngram_max": "Longest n-gram",
    "suffix_depth": "Match and draft, at most",
    "suffix_factor": "Draft per matched token",
    "suffix_min_prob": "Least probability",
    "suffix_earlier": "Also draft from earlier runs",
    "prediction": "Expected text",
    "exit_layer": "Exit layer (0: a quarter of the layers)",
    "top_k": "Top-k (0: off)",
    "top_p": "Top-p (1: off)",
    "min_p": "Min-p (0: off)",
    "baseline": "Also run the baseline",
}
_PICKERS = ("draft", "draft_length", "tree")
"""They say themselves what cannot be chosen; here they are only shown or not."""
_HIDDEN_UNLESS_USED = {
    "confidence",
    "tree_nodes",
    "tree_width",
    "ngram_min",
    "ngram_max",
    "suffix_depth",
    "suffix_factor",
    "suffix_min_prob",
    "suffix_earlier",
    "prediction",
    "exit_layer",
}
"""Only one proposer uses these: they are shown with it and nowhere else."""


def proposer_sentence(name: Any) -> str:
    """One sentence on a proposer, and what it needs."""
    entry = next((e for e in catalog.proposers() if e.name == name), None)
    if entry is None:
        return ""
    needs = "" if entry.needs in ("", "nothing") else f" Needs {entry.needs}."
    return f"{entry.sentence}{needs}"


def target_choices() -> list[tuple[str, str]]:
    """Named targets with their size; a target that is not here says how it comes."""
    return [
        (entry.name if entry.present else f"{entry.name} (download, {entry.size_mb:,} MB)", entry.name)
        for entry in catalog.targets()
    ]


class ControlsView:
    """Builds the controls where it is called; ``parts`` maps their names to the components."""

    def __init__(self, initial: GenerationRequest) -> None:
        values = from_request(initial)
        self.parts: dict[str, Any] = {}
        self._build_prompt(values)
        self._build_proposer(values)
        self._build_sampling(values)

    @property
    def ordered(self) -> list[Any]:
        """Components in the order of ``CONTROLS``."""
        return [self.parts[name] for name in CONTROLS]

    @property
    def gated(self) -> list[Any]:
        """Outputs of ``gate``."""
        return [*(self.parts[name] for name in _GATED), self.proposer_line, self.lengths.offers]

    def _build_prompt(self, values: Mapping[str, Any]) -> None:
        put = self.parts
        put["prompt"] = gr.Textbox(
            values["prompt"], label="Prompt", lines=4, max_lines=14, elem_id="rl-prompt", placeholder="Ask something"
        )
        with gr.Row(elem_classes="rl-chip-row"):
            self.examples: list[tuple[gr.Button, Example]] = [
                (gr.Button(e.title, size="sm", elem_classes="rl-chip-button", min_width=40), e) for e in EXAMPLES
            ]
        put["target"] = gr.Dropdown(
            target_choices(),
            value=values["target"],
            label="Target",
            info="Pick one, or type a Hugging Face id, a folder or a .gguf file.",
            allow_custom_value=True,
            elem_id="rl-target",
        )

    def _build_proposer(self, values: Mapping[str, Any]) -> None:
        put = self.parts
        target, proposer, draft = values["target"], values["proposer"], values["draft"] or ""
        # Nothing is read for the first page: what fits is looked up as soon as it is open.
        offers = proposer_value(target, standings(target, read=False))
        self.proposers = Picker("proposer", "Proposer: who drafts", proposer, offers)
        put["proposer"] = self.proposers.part
        self.proposer_line = gr.HTML(
            _help(proposer_sentence(proposer)), elem_classes="rl-help", elem_id="rl-proposer-line"
        )
        first = excluded(values)

        def gate(name: str) -> dict[str, Any]:
            return _gate_settings(name, first)

        offers = draft_value(target, proposer, draft, draft_options(target, proposer, read=False))
        self.drafts = Picker("draft", "Draft", draft, offers, **gate("draft"))
        put["draft"] = self.drafts.part
        self.draft_line = gr.HTML("", elem_classes="rl-note-line", elem_id="rl-draft-note")
        self.card = gr.HTML(card(draft) if proposer in WITH_DRAFT else "", elem_id="rl-draft-card")
        with gr.Row():
            put["ngram_min"] = gr.Number(values["ngram_min"], precision=0, **gate("ngram_min"))
            put["ngram_max"] = gr.Number(values["ngram_max"], precision=0, **gate("ngram_max"))
        with gr.Row():
            put["suffix_depth"] = gr.Number(values["suffix_depth"], precision=0, **gate("suffix_depth"))
            put["suffix_factor"] = gr.Number(values["suffix_factor"], step=0.5, **gate("suffix_factor"))
            put["suffix_min_prob"] = gr.Number(values["suffix_min_prob"], step=0.05, **gate("suffix_min_prob"))
        put["suffix_earlier"] = gr.Checkbox(
            values["suffix_earlier"], elem_id="rl-suffix-earlier", **gate("suffix_earlier")
        )
        put["prediction"] = gr.Textbox(
            values["prediction"], lines=4, max_lines=12, elem_id="rl-prediction", **gate("prediction")
        )
        put["exit_layer"] = gr.Number(values["exit_layer"], precision=0, **gate("exit_layer"))
        put["k"] = gr.Slider(1, max(16, values["k"]), values["k"], step=1, elem_id="rl-k", **gate("k"))
        self.lengths = Picker(
            "length",
            "Who decides the length",
            values["draft_length"],
            length_value(proposer, values["tree"]),
            **gate("draft_length"),
        )
        put["draft_length"] = self.lengths.part
        put["confidence"] = gr.Number(values["confidence"], step=0.05, elem_id="rl-confidence", **gate("confidence"))
        self.shapes = Picker("tree", "Shape of the draft", values["tree"], shape_value(), **gate("tree"))
        put["tree"] = self.shapes.part
        with gr.Row():
            put["tree_nodes"] = gr.Number(values["tree_nodes"], precision=0, **gate("tree_nodes"))
            put["tree_width"] = gr.Number(values["tree_width"], precision=0, **gate("tree_width"))

    def _build_sampling(self, values: Mapping[str, Any]) -> None:
        put = self.parts
        first = excluded(values)

        def gate(name: str) -> dict[str, Any]:
            return _gate_settings(name, first)

        put["temperature"] = gr.Slider(
            0, 2, values["temperature"], step=0.05, label="Temperature (0: greedy)", elem_id="rl-temperature"
        )
        with gr.Row():
            put["max_new_tokens"] = gr.Number(
                values["max_new_tokens"], label="Max new tokens", precision=0, elem_id="rl-max-tokens"
            )
            put["seed"] = gr.Number(values["seed"], label="Seed", precision=0, elem_id="rl-seed")
        with gr.Accordion("More settings", open=False, elem_id="rl-more"):
            put["mode"] = gr.Radio(MODES, value=values["mode"], label="The prompt is", elem_id="rl-mode")
            put["system_mode"] = gr.Dropdown(SYSTEM_MODES, value=values["system_mode"], **gate("system_mode"))
            put["system_prompt"] = gr.Textbox(values["system_prompt"], lines=2, max_lines=8, **gate("system_prompt"))
            with gr.Row():
                put["top_k"] = gr.Number(values["top_k"], precision=0, **gate("top_k"))
                put["top_p"] = gr.Number(values["top_p"], step=0.05, **gate("top_p"))
                put["min_p"] = gr.Number(values["min_p"], step=0.05, **gate("min_p"))
            with gr.Row():
                put["repetition_penalty"] = gr.Number(
                    values["repetition_penalty"], label="Repetition penalty (1: off)", step=0.1
                )
                put["presence_penalty"] = gr.Number(
                    values["presence_penalty"], label="Presence penalty (0: off)", step=0.1
                )
                put["frequency_penalty"] = gr.Number(
                    values["frequency_penalty"], label="Frequency penalty (0: off)", step=0.1
                )
            put["stop"] = gr.Textbox(
                values["stop"], label="Stop strings", info="One a line; \\n is a new line.", lines=1, max_lines=6
            )
            put["stop_ids"] = gr.Textbox(values["stop_ids"], label="Stop token ids", lines=1, max_lines=2)
            put["logit_bias"] = gr.Textbox(
                values["logit_bias"], label="Logit bias", info="One “token id: bias” a line.", lines=1, max_lines=6
            )
            put["ignore_eos"] = gr.Checkbox(values["ignore_eos"], label="Go on behind the end-of-text token")
            with gr.Row():
                put["dtype"] = gr.Dropdown(
                    list(DTYPES), value=values["dtype"], label="Number format", info="float32 for exact comparisons."
                )
                put["device"] = gr.Dropdown(list(DEVICES), value=values["device"], label="Device")
        put["baseline"] = gr.Checkbox(values["baseline"], elem_id="rl-baseline", **gate("baseline"))


def gate(values: Mapping[str, Any]) -> list[Any]:
    """Updates for ``ControlsView.gated`` after a control changed."""
    proposer, tree = values.get("proposer"), values.get("tree")
    held = dict(values)
    length = settle_length(held.get("draft_length"), proposer, tree)
    reasons = excluded({**held, "draft_length": length})
    updates: list[Any] = [_gate_settings(name, reasons) for name in _GATED]
    if length != held.get("draft_length"):
        updates[_GATED.index("draft_length")]["value"] = length
    return [
        *(gr.update(**update) for update in updates),
        _help(proposer_sentence(proposer)),
        length_value(proposer, tree),
    ]


def _gate_settings(name: str, reasons: Mapping[str, str | None]) -> dict[str, Any]:
    reason = reasons.get(name)
    if name in _PICKERS:
        return {"visible": reason is None}
    settings: dict[str, Any] = {
        "label": _LABELS[name] if name != "baseline" or not reason else f"{_LABELS[name]} ({reason})",
        "interactive": reason is None,
    }
    if name != "baseline":
        settings["info"] = _sentence(reason) if reason else _INFO.get(name, "")
    if name in _HIDDEN_UNLESS_USED:
        settings["visible"] = not (reason or "").startswith("only for")
    return settings


_INFO = {
    "k": "Tokens written ahead in each step, or the most of them; the depth of a tree.",
    "confidence": "A draft ends before a token whose likeliest choice has less than this probability.",
    "prediction": "The text that you expect the answer to contain.",
    "suffix_earlier": "The outputs of stored runs of this target are counted too. A prompt that was asked before then "
    "looks magically fast; the run says so.",
}


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _help(text: str) -> str:
    return html.escape(text)
