"""What a bench measures: the choices of the command line, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from decoder.bench.suites import SUITES
from decoder.catalog import DEFAULT_TARGET
from decoder.errors import RequestError
from decoder.request import MAX_K, PROPOSERS

PEERS = ("vllm", "llamacpp")
SYNTHETIC_SHAPES = ("1b", "8b", "tiny")
PREFERRED_K = 4
"""The draft length at which other engines are measured, where it is among the ks."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """``prompts`` per suite, ``tokens`` per run, every measurement ``repeats`` times; ``batch`` empty and ``memory`` 0
    leave those tables out; ``peers`` are (engine, path) pairs; ``exit_layer`` 0 takes 8 layers, or a quarter of a
    model that has no more than 8."""

    target: str = DEFAULT_TARGET
    draft: str | None = None
    suites: tuple[str, ...] = SUITES
    prompts: int = 3
    tokens: int = 64
    repeats: int = 2
    ks: tuple[int, ...] = (1, 2, 4, 8)
    proposers: tuple[str, ...] = PROPOSERS
    exit_layer: int = 0
    transformers: bool = True
    peers: tuple[tuple[str, str], ...] = ()
    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    memory: int = 0
    width_rounds: int = 30
    dtype: str = "auto"
    device: str = "auto"
    synthetic: bool = False
    shapes: tuple[str, ...] = ()
    """Of the synthetic models; empty: what the device can run in minutes."""

    @property
    def their_k(self) -> int:
        """The k of transformers' and the batch table's rows."""
        return PREFERRED_K if PREFERRED_K in self.ks else max(self.ks)

    def validate(self) -> None:
        """Raise RequestError, in one sentence, on the first choice that cannot be measured."""
        for name in self.suites:
            if name not in SUITES:
                raise RequestError(f"unknown suite {name!r}: choose from {', '.join(SUITES)}")
        for name in self.proposers:
            if name not in PROPOSERS:
                raise RequestError(f"unknown proposer {name!r}: choose from {', '.join(PROPOSERS)}")
        for name, value, low, high in (
            ("prompts", self.prompts, 1, 1000),
            ("tokens", self.tokens, 2, 4096),
            ("repeats", self.repeats, 1, 1000),
            ("exit-layer", self.exit_layer, 0, 10_000),
            *(("k", k, 1, MAX_K) for k in self.ks),
            *(("batch", b, 1, 32) for b in self.batch),
        ):
            if not low <= value <= high:
                raise RequestError(f"{name} must be between {low} and {high:,}, not {value:,}")
        if self.memory and not 6 <= self.memory <= 100_000:
            raise RequestError("memory compares run 5 with a later one: give a number of runs of at least 6, or 0")
        if not self.ks:
            raise RequestError("k is empty: give draft lengths, for example 1,2,4,8")
        for shape in self.shapes:
            if shape not in SYNTHETIC_SHAPES:
                raise RequestError(f"unknown shape {shape!r}: choose from {', '.join(SYNTHETIC_SHAPES)}")
        for engine, path in self.peers:
            if engine not in PEERS:
                raise RequestError(f"unknown peer {engine!r}: vllm=PYTHON or llamacpp=SERVER")
            if not Path(path).expanduser().is_file():
                raise RequestError(f"the peer {engine} needs a program, and {path!r} is not a file")

    def quick(self) -> BenchPlan:
        """The shortest bench that still shows every part: to see that it works, not to decide anything."""
        return replace(
            self,
            prompts=1,
            tokens=min(self.tokens, 32),
            repeats=1,
            ks=(self.their_k,),
            batch=self.batch and (1, 4),
            width_rounds=10,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict; ``from_json`` reads it back."""
        raw = asdict(self)
        return {name: _lists(value) for name, value in raw.items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BenchPlan:
        """Read what ``to_json`` wrote."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in data.items() if name in known
        }
        values["peers"] = tuple((engine, path) for engine, path in values.get("peers", ()))
        return cls(**values)


def _lists(value: Any) -> Any:
    return [_lists(v) for v in value] if isinstance(value, tuple | list) else value


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """``1,2,4`` -> (1, 2, 4), without repetitions; ``0`` or nothing -> ()."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RequestError(f"{name} takes numbers with commas between them, for example 1,2,4, not {text!r}") from None
    return () if numbers == [0] else tuple(dict.fromkeys(numbers))


def parse_peer(text: str) -> tuple[str, str]:
    """``vllm=PYTHON`` or ``llamacpp=SERVER``."""
    engine, found, path = text.partition("=")
    if not found or not path:
        raise RequestError(f"--peer takes vllm=PYTHON or llamacpp=SERVER, not {text!r}")
    return engine, path
