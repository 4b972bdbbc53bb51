"""The speculative decoder: pure torch and transformers, no interface, no database."""

from decoder.errors import IncompatibleError, ModelError, RedlineError, RequestError, TraceError
from decoder.request import PROPOSERS, GenerationRequest, SamplingParams
from decoder.trace import (
    DraftToken,
    Emitted,
    FinishReason,
    Run,
    Source,
    Step,
    TopToken,
    Verdict,
)

__version__ = "0.1.0"

__all__ = [
    "PROPOSERS",
    "DraftToken",
    "Emitted",
    "FinishReason",
    "GenerationRequest",
    "IncompatibleError",
    "ModelError",
    "RedlineError",
    "RequestError",
    "Run",
    "SamplingParams",
    "Source",
    "Step",
    "TopToken",
    "TraceError",
    "Verdict",
]
