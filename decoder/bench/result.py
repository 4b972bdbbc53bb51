"""What a bench found, as one object that is kept as JSON. Rows and goals are derived; samples are the record."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decoder.bench.batches import BatchRow, BatchSample, batch_rows
from decoder.bench.floor import Floor
from decoder.bench.measure import Sample
from decoder.bench.memory import Memory
from decoder.bench.plan import BenchPlan
from decoder.bench.summary import RowSummary, rows
from decoder.bench.synthetic import Synthetic
from decoder.bench.widths import Width
from decoder.errors import RequestError

SCHEMA = 1


@dataclass(frozen=True)
class BenchResult:
    """One bench. ``variants`` keeps the order of the rows, ``errors`` why one is empty."""

    plan: BenchPlan
    created: str
    machine: Mapping[str, Any]
    variants: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    floor: Floor | None = None
    widths: tuple[Width, ...] = ()
    batches: tuple[BatchSample, ...] = ()
    batch_errors: Mapping[tuple[str, int], str] = field(default_factory=dict)
    memory: Memory | None = None
    synthetic: tuple[Synthetic, ...] = ()

    def rows(self) -> list[RowSummary]:
        """Rows by suite, then over all suites."""
        floor_ms = self.floor.ms if self.floor else None
        return rows(self.samples, self.variants, self.errors, self.plan.suites, floor_ms)

    def batch_rows(self) -> list[BatchRow]:
        """The batch table."""
        return batch_rows(self.batches, self.batch_errors)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict. ``rows`` and ``batch_rows`` are there for readers that do not want to derive them."""
        from decoder.bench.goals import goals

        return clean(
            {
                "schema": SCHEMA,
                "created": self.created,
                "machine": dict(self.machine),
                "plan": self.plan.to_json(),
                "variants": list(self.variants),
                "errors": dict(self.errors),
                "floor": self.floor.to_json() if self.floor else None,
                "rows": [row.to_json() for row in self.rows()],
                "goals": [asdict(goal) for goal in goals(self)],
                "widths": [width.to_json() for width in self.widths],
                "batch_rows": [row.to_json() for row in self.batch_rows()],
                "batches": [asdict(sample) for sample in self.batches],
                "batch_errors": [[variant, size, text] for (variant, size), text in self.batch_errors.items()],
                "memory": self.memory.to_json() if self.memory else None,
                "synthetic": [s.to_json() for s in self.synthetic],
                "samples": [sample.to_json() for sample in self.samples],
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchResult:
        """Read what ``to_json`` wrote. RequestError when it is something else."""
        try:
            if data["schema"] != SCHEMA:
                raise RequestError(f"this bench has schema {data['schema']}, and this version reads {SCHEMA}")
            memory = data["memory"]
            return cls(
                plan=BenchPlan.from_json(data["plan"]),
                created=data["created"],
                machine=data["machine"],
                variants=tuple(data["variants"]),
                samples=tuple(Sample(**sample) for sample in data["samples"]),
                errors=data["errors"],
                floor=Floor.from_json(data["floor"]) if data["floor"] else None,
                widths=tuple(Width.from_json(width) for width in data["widths"]),
                batches=tuple(BatchSample(**sample) for sample in data["batches"]),
                batch_errors={(variant, size): text for variant, size, text in data["batch_errors"]},
                memory=Memory(memory["runs"], memory["first_mb"], memory["last_mb"]) if memory else None,
                synthetic=tuple(Synthetic.from_json(s) for s in data["synthetic"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"this is not a bench that Redline wrote ({type(error).__name__}: {error})") from None


def clean(value: Any) -> Any:
    """Numbers that JSON does not know become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: clean(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


def now() -> str:
    """The time of a bench: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine(device: str, dtype: str) -> dict[str, Any]:
    """What the numbers depend on, so that a table can say it."""
    import torch
    import transformers

    from decoder import __version__

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()
    return {
        "device": device,
        "device_name": name,
        "dtype": dtype,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "redline": __version__,
    }


def load_average() -> float | None:
    """Programs that ran or wanted to, over the last minute; None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def processor_name() -> str:
    """The processor's model name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def save(result: BenchResult, out: Path | None = None) -> Path:
    """Keep ``result`` as JSON in ``out``, or under the user's cache folder by date. RequestError: cannot be written."""
    from decoder.loading import cache_dir

    path = out or cache_dir() / "bench" / f"{result.created.replace(':', '').replace('-', '')}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write the bench to {path}: {error.strerror or error}") from None
    return path


def read(path: Path) -> BenchResult:
    """A bench that was kept. RequestError when there is none in ``path``."""
    try:
        return BenchResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(f"cannot read the bench {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}") from None
