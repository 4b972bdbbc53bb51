"""The errors that a person can cause and mend. Each carries one sentence that says what is wrong and what
would be right; the command line prints it and exits with 2, the playground shows it beside the control."""

from __future__ import annotations


class RedlineError(ValueError):
    """Base of all errors whose text is meant for a person."""


class RequestError(RedlineError):
    """A request that cannot be run as it stands (empty prompt, k < 1, prompt longer than the context)."""


class ModelError(RedlineError):
    """A model that is unknown, unreadable, unsafe to load, or lacks what the request asks of it."""


class IncompatibleError(ModelError):
    """A draft that does not fit its target; the text names what differs."""


class TraceError(RedlineError):
    """A trace (JSON) that is not a Run of a known schema; ``path`` is the field, e.g. ``steps[3].drafts[0].u``."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}" if path else problem)
