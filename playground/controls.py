"""What the controls of the Playground mean: their values to a GenerationRequest, back again, and what excludes what.

No Gradio here: everything a person can set is a plain dict keyed by ``CONTROLS``, so that a stored run fills the
controls exactly and the rules can be tested without a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from decoder.catalog import default_draft
from decoder.errors import RequestError
from decoder.heads.layout import HEADS
from decoder.request import GenerationRequest, SamplingParams
from playground.pairs import WITH_DRAFT, is_left_over

CONTROLS: tuple[str, ...] = (
    "prompt",
    "mode",
    "system_mode",
    "system_prompt",
    "target",
    "proposer",
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
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_new_tokens",
    "stop",
    "stop_ids",
    "logit_bias",
    "ignore_eos",
    "dtype",
    "device",
    "baseline",
)
"""Names of the controls, in the order in which the page hands them over."""

_FILTERS = ("top_k", "top_p", "min_p")
_TREE = ("tree_nodes", "tree_width")
_SUFFIX = ("suffix_depth", "suffix_factor", "suffix_min_prob", "suffix_earlier")


def to_request(values: Mapping[str, Any]) -> GenerationRequest:
    """A validated request; raises RequestError with one sentence on the first value that cannot be run.

    What the chosen proposer does not use is left out of the request, so that two runs that did the same thing have
    the same configuration.
    """
    proposer = _text(values, "proposer")
    own = values.get("system_mode") == "own"
    system = _text(values, "system_prompt") if own else "" if values.get("system_mode") == "empty" else None
    chat = values.get("mode") != "raw"
    target = _text(values, "target").strip()
    request = GenerationRequest(
        prompt=_text(values, "prompt"),
        chat=chat,
        system_prompt=system if chat else None,
        target=target,
        proposer=proposer,
        draft=_draft(target, proposer, _text(values, "draft").strip()) if proposer in WITH_DRAFT else None,
        k=_whole(values, "k", "k (draft length)"),
        **_length(values, proposer),
        max_new_tokens=_whole(values, "max_new_tokens", "max new tokens"),
        sampling=SamplingParams(
            temperature=_number(values, "temperature", "temperature"),
            top_k=_whole(values, "top_k", "top-k"),
            top_p=_number(values, "top_p", "top-p"),
            min_p=_number(values, "min_p", "min-p"),
            repetition_penalty=_number(values, "repetition_penalty", "repetition penalty"),
            presence_penalty=_number(values, "presence_penalty", "presence penalty"),
            frequency_penalty=_number(values, "frequency_penalty", "frequency penalty"),
            logit_bias=read_bias(_text(values, "logit_bias")),
            seed=_whole(values, "seed", "seed"),
        ),
        stop=read_stops(_text(values, "stop")),
        stop_ids=read_stop_ids(_text(values, "stop_ids")),
        ignore_eos=bool(values.get("ignore_eos")),
        ngram_min=_whole(values, "ngram_min", "n-gram minimum") if proposer == "ngram" else 1,
        ngram_max=_whole(values, "ngram_max", "n-gram maximum") if proposer == "ngram" else 4,
        **(_suffix(values) if proposer == "suffix" else {}),
        prediction=_text(values, "prediction") if proposer == "prediction" else None,
        exit_layer=_whole(values, "exit_layer", "exit layer") if proposer == "early-exit" else 0,
        dtype=_text(values, "dtype") or "auto",
        device=_text(values, "device") or "auto",
    )
    if not request.target:
        raise RequestError("no target is chosen: pick one, or type a Hugging Face id, a folder or a .gguf file")
    request.validate()
    return request


def _length(values: Mapping[str, Any], proposer: str) -> dict[str, Any]:
    """Who decides the draft's length, and its shape, as far as the proposer uses them."""
    found: dict[str, Any] = {}
    if proposer != "none":
        found["draft_length"] = _text(values, "draft_length") or "fixed"
    if found.get("draft_length") == "confidence":
        found["confidence"] = _number(values, "confidence", "confidence")
    if proposer in HEADS:
        found["tree"] = _text(values, "tree") or "chain"
    if found.get("tree", "chain") != "chain":
        found["tree_nodes"] = _whole(values, "tree_nodes", "tree nodes")
        found["tree_width"] = _whole(values, "tree_width", "tree width")
    return found


def _suffix(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "suffix_depth": _whole(values, "suffix_depth", "suffix depth"),
        "suffix_factor": _number(values, "suffix_factor", "suffix factor"),
        "suffix_min_prob": _number(values, "suffix_min_prob", "suffix least probability"),
        "suffix_earlier": bool(values.get("suffix_earlier")),
    }


def from_request(request: GenerationRequest, *, baseline: bool = True) -> dict[str, Any]:
    """The control values that lead back to ``request``."""
    s = request.sampling
    mode = "default" if request.system_prompt is None else "own" if request.system_prompt else "empty"
    return {
        "prompt": request.prompt,
        "mode": "chat" if request.chat else "raw",
        "system_mode": mode,
        "system_prompt": request.system_prompt or "",
        "target": request.target,
        "proposer": request.proposer,
        "draft": request.draft,
        "k": request.k,
        "draft_length": request.draft_length,
        "confidence": request.confidence,
        "tree": request.tree,
        "tree_nodes": request.tree_nodes,
        "tree_width": request.tree_width,
        "ngram_min": request.ngram_min,
        "ngram_max": request.ngram_max,
        "suffix_depth": request.suffix_depth,
        "suffix_factor": request.suffix_factor,
        "suffix_min_prob": request.suffix_min_prob,
        "suffix_earlier": request.suffix_earlier,
        "prediction": request.prediction or "",
        "exit_layer": request.exit_layer,
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "seed": s.seed,
        "max_new_tokens": request.max_new_tokens,
        "stop": write_stops(request.stop),
        "stop_ids": ", ".join(str(i) for i in request.stop_ids),
        "logit_bias": "\n".join(f"{token}: {bias!r}" for token, bias in s.logit_bias),
        "ignore_eos": request.ignore_eos,
        "dtype": request.dtype,
        "device": request.device,
        "baseline": baseline and request.proposer != "none",
    }


def excluded(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Which controls cannot be used together with the others, and why; None where a control can be used."""
    proposer = values.get("proposer")
    greedy = not values.get("temperature")
    raw = values.get("mode") == "raw"

    def only(name: str, title: str) -> str | None:
        return None if proposer == name else f"only for the proposer {title}"

    reasons: dict[str, str | None] = {
        "draft": None if proposer in WITH_DRAFT else "only for proposers with weights of their own",
        "k": "nothing is drafted without a proposer" if proposer == "none" else None,
        "draft_length": "only for what drafts" if proposer == "none" else None,
        "confidence": None
        if proposer != "none" and values.get("draft_length") == "confidence"
        else "only for drafts that end by confidence",
        "tree": None if proposer in HEADS else "only for heads",
        **dict.fromkeys(
            _TREE, None if proposer in HEADS and values.get("tree", "chain") != "chain" else "only for trees"
        ),
        "ngram_min": only("ngram", "n-gram"),
        "ngram_max": only("ngram", "n-gram"),
        **{name: only("suffix", "suffix decoding") for name in _SUFFIX},
        "prediction": only("prediction", "predicted output"),
        "exit_layer": only("early-exit", "early exit"),
        "baseline": "this run is the baseline: nothing is drafted" if proposer == "none" else None,
        "system_mode": "raw text goes to the target as it is" if raw else None,
        "system_prompt": "raw text goes to the target as it is" if raw else None,
    }
    if not raw and values.get("system_mode") != "own":
        reasons["system_prompt"] = "choose “my own” to write one"
    for name in _FILTERS:
        reasons[name] = "greedy: temperature 0 always takes the likeliest token" if greedy else None
    return reasons


# --- texts that hold lists ------------------------------------------------------------------------------------


def read_stops(text: str) -> tuple[str, ...]:
    r"""Stop strings, one a line; ``\n``, ``\t`` and ``\\`` stand for what cannot be typed in a line."""
    return tuple(_unescape(line) for line in text.split("\n") if line)


def write_stops(stops: tuple[str, ...]) -> str:
    """The text that ``read_stops`` reads back unchanged."""
    pairs = (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r"))
    lines = []
    for stop in stops:
        for plain, escaped in pairs:
            stop = stop.replace(plain, escaped)
        lines.append(stop)
    return "\n".join(lines)


def _unescape(line: str) -> str:
    out: list[str] = []
    characters = iter(line)
    for character in characters:
        if character != "\\":
            out.append(character)
            continue
        following = next(characters, "")
        out.append({"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}.get(following, "\\" + following))
    return "".join(out)


def read_stop_ids(text: str) -> tuple[int, ...]:
    """Token ids, separated by commas or spaces."""
    return tuple(_token_id(part, "stop token ids") for part in text.replace(",", " ").split())


def read_bias(text: str) -> tuple[tuple[int, float], ...]:
    """Logit biases, one ``token id: bias`` a line."""
    pairs = []
    for line in text.splitlines():
        if not line.strip():
            continue
        left, separator, right = line.partition(":")
        if not separator:
            raise RequestError(f"logit bias: write “token id: bias”, not {line.strip()[:40]!r}")
        try:
            bias = float(right)
        except ValueError:
            raise RequestError(f"logit bias: {right.strip()[:40]!r} is not a number") from None
        pairs.append((_token_id(left.strip(), "logit bias"), bias))
    return tuple(pairs)


def read_lengths(text: str, limit: int = 12) -> tuple[int, ...]:
    """Draft lengths to compare, separated by commas or spaces, in the order given and without repeats."""
    lengths = []
    for part in text.replace(",", " ").split():
        if not (part.isascii() and part.isdigit()) or not 1 <= int(part[:6]) <= 64:
            raise RequestError(f"draft lengths are whole numbers from 1 to 64, such as 1, 2, 4, 8; not {part[:20]!r}")
        lengths.append(int(part))
    found = tuple(dict.fromkeys(lengths))
    if not found:
        raise RequestError("name at least one draft length, such as 1, 2, 4, 8")
    if len(found) > limit:
        raise RequestError(f"{len(found)} draft lengths are too many for one comparison; {limit} fit")
    return found


def _token_id(part: str, name: str) -> int:
    if not (part.isascii() and part.isdigit()) or len(part) > 10:
        raise RequestError(f"{name}: {part[:40]!r} is not a token id")
    return int(part)


def _draft(target: str, proposer: str, held: str) -> str | None:
    """The draft that is chosen. Whoever clicks Run right behind the choice of a proposer still holds the last one's:
    the page is about to replace it with what is taken here."""
    if held and is_left_over(held, proposer):
        return default_draft(target, proposer) or held
    return held or None


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{name.replace('_', ' ')} must be text")
    return value


def _number(values: Mapping[str, Any], name: str, title: str) -> float:
    value = values.get(name)
    if value is None or value == "":
        raise RequestError(f"{title} is empty: give a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{title} must be a number, not {value!r}")
    return float(value)


def _whole(values: Mapping[str, Any], name: str, title: str) -> int:
    value = _number(values, name, title)
    if value != int(value):
        raise RequestError(f"{title} must be a whole number, not {value:g}")
    raw = values[name]
    return raw if isinstance(raw, int) else int(value)
