"""Does a head fit a target, and exactly why not. Reads configs, headers and vocabulary maps, never the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.heads.expect import (
    Expected,
    TargetFacts,
    eagle3_settings,
    eagle3_tensors,
    eagle_tensors,
    medusa_shape,
    medusa_tensors,
    mtp_tensors,
)
from decoder.heads.files import HeadFiles
from decoder.heads.layout import Layout
from decoder.heads.names import canonical
from decoder.heads.sizes import Sizes, layer_config, read_sizes


def problems(files: HeadFiles, layout: Layout, target: TargetFacts) -> list[str]:
    """Why the head does not fit, as sentences; empty when it does. Raises ModelError for an unreadable config."""
    found = _verifier(files.config, target) + _vocabulary(files.config, target)
    if layout.proposer == "medusa":
        if "hidden_size" in files.config and files.config["hidden_size"] != target.hidden:
            found.append(_width("its hidden size", files.config["hidden_size"], target))
    else:
        sizes = read_sizes(files.name, files.config)
        found += sizes.problems
        found += _config(files, layout, sizes, target)
    if not files.shapes:
        return found
    names = canonical(files.shapes, layout)
    if not found:  # else a table of shapes would only repeat the reason many times
        shapes = {name: files.shapes[own] for name, own in names.items()}
        found += expected(files, layout, target, shapes).problems(shapes, names)
        found += _pairs(shapes)
    if not found:
        found += _kinds(files, names) or _maps(files, names, layout, target)
    return found


def expected(files: HeadFiles, layout: Layout, target: TargetFacts, shapes: Mapping[str, tuple[int, ...]]) -> Expected:
    """The tensors that the head must hold; ``shapes`` are its own, by canonical name."""
    if layout.proposer == "medusa":
        return medusa_tensors(medusa_shape(shapes, files.config), shapes, files.config, target)
    sizes = read_sizes(files.name, files.config)
    if layout.proposer == "eagle3":
        return eagle3_tensors(sizes, eagle3_settings(files.config, sizes, target), target)
    if layout.proposer == "eagle":
        return eagle_tensors(sizes, target)
    return mtp_tensors(sizes, layout.style)


def _config(files: HeadFiles, layout: Layout, sizes: Sizes, target: TargetFacts) -> list[str]:
    """What the config and the width of fc say, for the heads with layers."""
    found: list[str] = []
    if layout.proposer == "eagle3":
        settings = eagle3_settings(files.config, sizes, target)
        found += settings.problems
        wanted = files.config.get("target_hidden_size") or sizes.hidden
        if wanted != target.hidden:
            found.append(_width("the target hidden size in its config.json", wanted, target))
        read = len(settings.aux) * target.hidden
        found += _fc(files, sizes.hidden, read, f"{len(settings.aux)} states of {target.hidden:,}", target, "eagle3")
        return found
    if sizes.hidden != target.hidden:
        found.append(_width("its hidden size", sizes.hidden, target))
    if layout.proposer == "eagle":
        read = 2 * target.hidden
        found += _fc(files, sizes.hidden, read, f"embedding and state of {target.hidden:,}", target, "eagle")
        if files.config.get("layernorms"):
            found.append("its extra norms (layernorms) are not supported")
    elif str(files.config.get("model_type", "")).startswith(("qwen3_next", "qwen3_5")):
        found.append("a Qwen3-Next MTP layer is read from the target's own checkpoint: name no draft")
    elif layout.style == "deepseek":
        found.append("a DeepSeek MTP layer is read from the target's own checkpoint: name no draft")
    return found


def _fc(files: HeadFiles, hidden: int, read: int, of: str, target: TargetFacts, proposer: str) -> list[str]:
    """The width that fc reads tells the generations of EAGLE apart."""
    own = next((files.shapes[n] for n in files.shapes if n.endswith(("fc.weight", "fusion_fc.weight"))), None)
    if own is None or len(own) != 2 or own[1] == read:
        return []
    width, other = own[1], {"eagle3": 2, "eagle": 3}[proposer]
    if width == other * target.hidden:
        is_, use = {"eagle3": ("EAGLE-1/2", "eagle"), "eagle": ("EAGLE-3", "eagle3")}[proposer]
        return [
            f"fc.weight reads {width:,} values, {other} times the target's hidden size: it is an {is_} head, use {use}"
        ]
    return [f"fc.weight reads {width:,} values, and {target.name} gives {read:,} ({of})"]


def _width(what: str, value: Any, target: TargetFacts) -> str:
    return f"{what} is {value}, and the hidden size of {target.name} is {target.hidden}"


def _verifier(config: Mapping[str, Any], target: TargetFacts) -> list[str]:
    """speculators configs name the architecture that they were made for."""
    about = config.get("speculators_config")
    verifier = about.get("verifier") if isinstance(about, Mapping) else None
    wanted = verifier.get("architectures") if isinstance(verifier, Mapping) else None
    if not wanted or not target.architectures or set(wanted) & set(target.architectures):
        return []
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    made_for = f"{wanted[0]}" + (f" ({named})" if named else "")
    return [f"it was made for {made_for}, and {target.name} is {target.architectures[0]}"]


def _vocabulary(config: Mapping[str, Any], target: TargetFacts) -> list[str]:
    size = layer_config(config).get("vocab_size", config.get("vocab_size"))
    if size is None or size == target.vocab_size:
        return []
    if isinstance(size, bool) or not isinstance(size, int):
        return [f"its config.json says vocab_size = {size!r}"]
    return [f"its vocabulary has {size:,} entries, that of {target.name} {target.vocab_size:,}"]


def _pairs(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Optional tensors that only make sense together."""
    found = []
    for group in (("q_proj.bias", "k_proj.bias", "v_proj.bias"), ("q_norm.weight", "k_norm.weight")):
        for name in [name for name in shapes if name.endswith(group[0])]:
            others = [name.removesuffix(group[0]) + other for other in group[1:]]
            found += [f"missing: {other} (there is {name})" for other in others if other not in shapes]
    return found


def _kinds(files: HeadFiles, names: Mapping[str, str]) -> list[str]:
    """Quantised weights would be read as numbers that they are not."""
    strange = files.not_floats(own for name, own in names.items() if name not in ("d2t", "t2d", "token_map"))
    if strange:
        return [f"{strange[0]} is stored as {files.kinds[strange[0]]}; only plain float weights are read"]
    return []


def _maps(files: HeadFiles, names: Mapping[str, str], layout: Layout, target: TargetFacts) -> list[str]:
    """The draft vocabulary: ids in range, each once, and t2d saying the same."""
    import numpy as np

    found: list[str] = []
    key = "token_map" if layout.proposer == "medusa" else "d2t"
    if key not in names:
        return found
    for name in (key, "t2d"):
        if name in names and files.kinds[names[name]] not in ("I64", "I32", "BOOL"):
            return [f"{name} is stored as {files.kinds[names[name]]}; whole numbers are needed"]
    arrays = files.arrays([names[n] for n in (key, "t2d") if n in names])
    values = arrays[names[key]].astype(np.int64)
    ids = values if key == "token_map" else values + np.arange(len(values))
    outside = np.flatnonzero((ids < 0) | (ids >= target.vocab_size))
    if len(outside):
        i = int(outside[0])
        found.append(f"{key} maps draft id {i:,} to {int(ids[i]):,}, outside the target's {target.vocab_size:,} ids")
    unique, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        twice = int(unique[counts > 1][0])
        found.append(f"{key} maps two draft ids to the same target id {twice:,}")
    if not found and key == "d2t" and "t2d" in names:
        marked = np.flatnonzero(arrays[names["t2d"]].astype(bool))
        if not np.array_equal(np.sort(ids), marked):
            differ = np.setxor1d(ids, marked)
            found.append(f"d2t and t2d disagree, first about target id {int(differ[0]):,}")
    return found
