"""Decoding with compiled steps, for one row on the CPU.

A runner asks for a ``StepSet``: the widths it needs, as recipes. It decodes eagerly until all of them are built and
``take_up`` is called, which only ever happens between runs: the path of a run never changes on its way. Where nothing
can be built, ``note`` says why.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoder import builder, packages
from decoder.errors import ModelError
from decoder.fused import FusedRunner, Weights
from decoder.loading import LoadedModel, pick_dtype
from decoder.packages import Library, Recipe, Step
from decoder.steps import DRAFT_WIDTHS, FEWEST_SEEN, REACH, tapped
from decoder.target import tree_mask

EAGER, COMPILED, KERNEL = "eager, fused", "compiled", "compiled kernel"


class StepSet:
    """The steps of one module, by width: all of them, or none yet. ``blocked`` says why none will ever be built,
    ``command`` is what a person types to build them, ``reach`` how many tokens of text they know."""

    def __init__(
        self, recipes: Sequence[Library], blocked: str | None = None, command: str = "", reach: int = REACH
    ) -> None:
        self.reach = reach
        self.recipes = {recipe.width: recipe for recipe in recipes}
        self.blocked = blocked
        self.command = command
        self.steps: dict[int, Any] = {}
        with _lock:
            _sets.add(self)
        self.take_up()

    def missing(self) -> list[Library]:
        """What has yet to be built, narrowest first; nothing where building is not possible or has failed."""
        if self.blocked or self.steps or any(recipe.path in failures for recipe in self.recipes.values()):
            return []
        return [recipe for recipe in self.recipes.values() if not recipe.built]

    def take_up(self) -> bool:
        """Load the steps if all are built; True when that changed the path. Never while anything is decoded."""
        if self.steps or not self.recipes or packages.switched_off():
            return False
        if not all(recipe.built for recipe in self.recipes.values()):
            return False
        steps = {width: self._open(recipe) for width, recipe in self.recipes.items()}
        if all(step is not None for step in steps.values()):
            self.steps = steps
        return bool(self.steps)

    def _open(self, recipe: Library) -> Any:
        """What a built library computes, or None where it cannot be used."""
        return _load(recipe.path)

    def settle(self) -> None:
        """Build what is missing now, and take it up; what cannot be built is noted, and runs eagerly."""
        for recipe in self.missing():
            try:
                packages.build_apart(recipe)
            except ModelError as error:
                failures[recipe.path] = str(error)
                return
        self.take_up()

    def note(self) -> str:
        """Why these steps are not compiled, or "" when they are."""
        if self.steps:
            return ""
        if self.blocked:
            return self.blocked
        failed = [failures[recipe.path] for recipe in self.recipes.values() if recipe.path in failures]
        if failed:
            return f"compiling failed: {failed[0]}"
        if not builder.active():
            return "its steps are not compiled" + (f": {self.command}" if self.command else "")
        return _progress_words()


failures: dict[Path, str] = {}
"""Builds that failed in this process, and why; they are not tried again."""
_sets: weakref.WeakSet[StepSet] = weakref.WeakSet()
_loaded: weakref.WeakValueDictionary[Path, Step] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _load(path: Path) -> Step | None:
    """A step, shared by all that use the same library."""
    with _lock:
        step = _loaded.get(path) or packages.load(path)
        if step is not None:
            _loaded[path] = step
        return step


def sets() -> list[StepSet]:
    """Those of every runner that is alive."""
    with _lock:
        return list(_sets)


def missing() -> list[Library]:
    """What the runners of this process lack."""
    found = {recipe.path: recipe for held in sets() for recipe in held.missing()}
    return list(found.values())


def failed(recipe: Library, code: int, errors: str) -> None:
    """A build ended with ``code`` and this on stderr: those steps stay eager in this process."""
    failures[recipe.path] = packages.failure(code, errors)


def progress() -> tuple[int, int]:
    """(steps that are built, steps that the runners of this process ask for)."""
    wanted = {recipe.path: recipe for held in sets() if not held.blocked for recipe in held.recipes.values()}
    return sum(recipe.built for recipe in wanted.values()), len(wanted)


def words() -> str:
    """What the background builder has to say: how far it is, else what went wrong; "" when all is done."""
    if missing():
        return _progress_words()
    return f"compiling failed: {next(iter(failures.values()))}" if failures else ""


def _progress_words() -> str:
    ready, total = progress()
    return f"compiling in the background, {ready} of {total} steps ready"


def take_up() -> bool:
    """Load what has been built since; True when a path changed. Only between runs, on the thread that decodes."""
    changed = [held.take_up() for held in sets()]
    return any(changed)


def model_steps(loaded: LoadedModel, widths: Sequence[int], layers: int = 0) -> StepSet:
    """The compiled steps of a model, or of its first ``layers`` layers."""
    size = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    reach = min(loaded.context, REACH)
    options: dict[str, object] = {"reach": reach, **({"layers": layers} if layers else {})}
    blocked = "compiling is switched off (REDLINE_COMPILE=0)" if packages.switched_off() else None
    if loaded.folder is None:
        # From the Hub: the builder finds the same revision among the downloaded ones.
        options["revision"] = loaded.revision
        if not _COMMIT.fullmatch(loaded.revision):
            blocked = "its weights are only in memory"
    recipes = [
        Recipe(
            maker="decoder.steps:target_step",
            source=str(loaded.folder or loaded.name),
            dtype=loaded.dtype,
            width=width,
            fingerprint=loaded.fingerprint,
            name=loaded.name,
            size=size,
            options=options,
        )
        for width in widths
    ]
    if not all(recipe.built for recipe in recipes):
        in_use = sum(len(held.steps) * recipe.size for held in sets() for recipe in list(held.recipes.values())[:1])
        blocked = blocked or packages.why_no_build(size, len(recipes), in_use)
    command = f"python -m decoder models --compile {loaded.name}"
    if layers:
        command += f" --layers {layers}"
    elif set(widths) == set(DRAFT_WIDTHS):
        command += " --role draft"
    if loaded.dtype != pick_dtype("auto", "cpu"):
        command += f" --dtype {loaded.dtype}"
    return StepSet(recipes, blocked, command, reach)


class CompiledRunner(FusedRunner):
    """The lean path, with compiled steps once there are some; what they do not cover runs eagerly as before.

    ``steps_of(layers)`` gives the steps of the early exit's short model.
    """

    def __init__(
        self,
        weights: Weights,
        steps: StepSet,
        steps_of: Callable[[int], StepSet],
        *,
        context: int,
        device: str,
        owner: CompiledRunner | None = None,
        layers: int | None = None,
    ) -> None:
        buffers = owner.buffers if owner else None
        super().__init__(weights, context=context, device=device, buffers=buffers, layers=layers)
        self.steps = steps
        self.taps = tapped(self.layers)
        self.reach = min(context, steps.reach)
        """Tokens up to which steps are used."""
        self._steps_of = steps_of
        self._short: CompiledRunner | None = None
        self._views: tuple[Tensor, list[Tensor]] | None = None

    compiled_path = COMPILED

    @property
    def path(self) -> str:  # type: ignore[override]
        """Which implementation computes the passes; changes only with ``StepSet.take_up``."""
        return self.compiled_path if self.steps.steps else EAGER

    def path_note(self) -> str:
        """Why it is not compiled, or ""."""
        return self.steps.note()

    def settle(self) -> None:
        """Compile now, before something is measured, what would be compiled behind the runs."""
        self.steps.settle()

    def short(self, layers: int) -> CompiledRunner:
        # The last one is kept: its steps are built behind the runs, and it is asked for again by the next one.
        if self._short is None or self._short.layers != layers:
            full = super().short(layers)
            self._short = type(self)(
                self.weights,
                self._steps_of(layers),
                self._steps_of,
                context=self.context,
                device=self.device,
                owner=self,
                layers=full.layers,
            )
        return self._short

    def _pass(self, ids: Tensor, counts: list[int], last: bool, parents: Sequence[int | None] | None) -> Tensor:
        batch, width = ids.shape
        padded = min((w for w in self.steps.steps if w >= width), default=0)
        start = max(self.lengths)
        end = start + padded
        # A row that is left of a batch goes on as it began: the path of a run never changes on its way.
        alone = batch == 1 and not self.buffers.narrowed
        fits = padded and end >= FEWEST_SEEN and start + width <= self.reach and set(self.capture) <= set(self.taps)
        if not alone or not fits:
            return super()._pass(ids, counts, last, parents)
        self.buffers.reserve(1, end)
        if padded > width:
            # What is written behind the real tokens is overwritten before anything sees it, as after a rollback.
            ids = torch.cat([ids, ids.new_zeros(1, padded - width)], 1)
        slots = torch.arange(start, end)
        mask = torch.arange(end) <= slots[:, None]
        positions = slots
        if parents is not None:
            depths, sees = tree_mask(start, width, parents, "cpu")
            mask[:width, start:] = False
            mask[:width, : start + width] = sees[0, 0]
            positions = torch.cat([depths[0], slots[width:]])
        mask = mask.repeat(self.weights.heads // self.weights.kv_heads, 1)
        logits, *states = self.steps.steps[padded]([ids, positions, slots, mask, *self._keys_and_values()])
        by_layer = dict(zip(self.taps, states, strict=True))
        self.captured = torch.cat([by_layer[i][:, :width] for i in self.capture], -1) if self.capture else None
        return logits[:, counts[0] - 1 : counts[0]] if last else logits[:, :width]

    def _keys_and_values(self) -> list[Tensor]:
        """The buffers as a step takes them: [1, kv_heads, capacity, d] for each layer, keys and then values."""
        keys, values = self.buffers.keys, self.buffers.values
        assert keys is not None
        assert values is not None
        if self._views is None or self._views[0] is not keys:
            self._views = (keys, [*keys[: self.layers].unbind(0), *values[: self.layers].unbind(0)])
        return self._views[1]
