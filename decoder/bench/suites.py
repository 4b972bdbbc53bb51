"""The prompts of the bench: one JSON file per kind of work in ``assets/suites``, ten prompts each, our own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoder.errors import RequestError

SUITES_DIR = Path(__file__).resolve().parents[2] / "assets" / "suites"
SUITES = ("chat", "code", "edit", "summarise", "translate", "arithmetic")
"""In the order in which tables show them."""


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """One prompt; ``prediction`` is the answer that a caller would expect, where a caller could know it (edits)."""

    id: str
    prompt: str
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts of one kind."""

    name: str
    description: str
    prompts: tuple[SuitePrompt, ...]


def load_suite(name: str, folder: Path = SUITES_DIR) -> Suite:
    """Read and check one suite. RequestError, in one sentence, for an unknown name or a file that is not a suite."""
    if folder == SUITES_DIR and name not in SUITES:
        raise RequestError(f"unknown suite {name!r}: choose from {', '.join(SUITES)}")
    path = folder / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read the suite {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RequestError(f"the suite {path} is not JSON: {error}") from None
    return _checked(data, path)


def _checked(data: Any, path: Path) -> Suite:
    def fault(what: str) -> RequestError:
        return RequestError(f"the suite {path.name} is not sound: {what}")

    if not isinstance(data, dict) or set(data) != {"name", "description", "prompts"}:
        raise fault("it must be an object of name, description and prompts")
    if data["name"] != path.stem or not isinstance(data["description"], str) or not data["description"].strip():
        raise fault("its name must be that of its file, and it needs a description")
    if not isinstance(data["prompts"], list) or not data["prompts"]:
        raise fault("it has no prompts")
    prompts = []
    for entry in data["prompts"]:
        if not isinstance(entry, dict) or not {"id", "prompt"} <= set(entry) <= {"id", "prompt", "prediction"}:
            raise fault("a prompt must have id and prompt, and may have a prediction, nothing else")
        if not all(isinstance(value, str) and value.strip() for value in entry.values()):
            raise fault(f"prompt {entry['id']!r} has an empty text")
        prompts.append(SuitePrompt(**entry))
    if len({p.id for p in prompts}) < len(prompts) or len({p.prompt for p in prompts}) < len(prompts):
        raise fault("two prompts are the same")
    return Suite(data["name"], data["description"], tuple(prompts))
