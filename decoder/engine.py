"""A target with a proposer, and what is asked of them: decode one request or many.

The loop is in ``rounds``, verdicts in ``judge``, one request's state in ``rows``, and who iterates in ``stream``.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers

from decoder.errors import RequestError
from decoder.proposers.base import Proposer
from decoder.request import GenerationRequest
from decoder.stream import BatchStream, RunStream
from decoder.target import Runner
from decoder.text import TokenText, encode_prompt
from decoder.trace import Run, Step

__all__ = ["BatchStream", "RunStream", "SpeculativeDecoder", "Target", "library_versions", "new_id"]


@dataclass(frozen=True)
class Target:
    """The model that decides, with what the engine must know of it. Tests build it around a table."""

    runner: Runner
    tokenizer: Any
    name: str
    eos_ids: frozenset[int]
    dtype: str = "float32"
    fingerprint: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    context_note: str = ""


def new_id() -> str:
    """A fresh run id."""
    return "r" + secrets.token_hex(6)


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """What computed a run."""
    from decoder import __version__

    return {
        "redline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class SpeculativeDecoder:
    """A target with a proposer (None decodes plainly: the baseline)."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        *,
        draft: str | None = None,
        not_speculating: str | None = None,
        versions: dict[str, str] | None = None,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.draft = draft
        self.not_speculating = not_speculating
        self.tokens = TokenText(target.tokenizer)
        self._versions = dict(versions or {})

    @classmethod
    def load(
        cls, request: GenerationRequest, progress: Callable[[float, str], None] | None = None
    ) -> SpeculativeDecoder:
        """Load what ``request`` names (from this process's cache where it is there).

        ``progress(fraction, message)`` is told how far it is. Raises RedlineError subclasses with one sentence.
        """
        from decoder.assemble import assemble

        return assemble(request, progress)

    def stream(self, request: GenerationRequest) -> RunStream:
        """Check and tokenise ``request``; the result yields one Step per round. Raises RequestError before any work."""
        return RunStream(self, request)

    def run(self, request: GenerationRequest) -> Run:
        """Decode to the end."""
        stream = self.stream(request)
        for _ in stream:
            pass
        return stream.run

    def remember(self, runs: Sequence[Sequence[int]]) -> None:
        """Token ids of earlier runs, for a request with ``suffix_earlier``; what is kept of them is recorded."""
        kept = self.proposer.remember(runs) if self.proposer is not None else ""
        if kept:
            self._versions["earlier_runs"] = kept

    def batch(self, requests: Sequence[GenerationRequest]) -> BatchStream:
        """Check and tokenise 1 to 32 ``requests`` that decode together; the result yields each round's steps.

        All ask for the same models and the same proposer; each has its own prompt, sampling, seed, draft length,
        length limit and stops. Raises RequestError before any work.
        """
        return BatchStream(self, requests)

    def generate(
        self, requests: Sequence[GenerationRequest], on_step: Callable[[int, Step], None] | None = None
    ) -> list[Run]:
        """Decode ``requests`` together (see ``batch``) and return their Runs in the same order.

        Each Run is what the request gives alone: in float32 token for token, and when sampling with the same seed by
        the same draws (not so with draft length ``auto``, which goes by time: exact when greedy, and exact in
        distribution). Its times are those of the rounds it took part in, shared with its neighbours: see
        ``BatchStream``. ``on_step(index, step)`` is told every step, off the clock. An error in one row ends that row;
        running out of memory ends all of them, with the steps they have.
        """
        stream = self.batch(requests)
        for steps in stream:
            if on_step is not None:
                for index, step in steps.items():
                    on_step(index, step)
        return stream.runs

    def warm_up(self, request: GenerationRequest) -> None:
        """Decode a few tokens and forget them, so that no measured run pays for a first time."""
        short = request.replace(max_new_tokens=max(4, min(2 * (request.k + 1), 16)), ignore_eos=True)
        for _ in self.stream(short.replace(prompt="Hello, hello, hello.", stop=(), stop_ids=())):
            pass

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Token ids of the request's prompt; raises RequestError where it does not fit the context."""
        ids = encode_prompt(request, self.target.tokenizer, self.target.name)
        context = self.target.runner.context
        if len(ids) >= context:
            note = f" ({self.target.context_note})" if self.target.context_note else ""
            raise RequestError(
                f"the prompt has {len(ids):,} tokens and {self.target.name} takes at most {context - 1:,}{note}: "
                f"shorten it by {len(ids) - context + 1:,} tokens"
            )
        return ids

    def header(self, request: GenerationRequest, prompt_ids: Sequence[int], batch: int = 1) -> Run:
        """The Run as it is known before the first token; ``batch`` requests decode together."""
        versions = {**library_versions(), **self.target.versions, **self._versions}
        if self.proposer is not None and self.proposer.path():
            versions["draft_path"] = self.proposer.path()
        if batch > 1:
            versions["batch"] = str(batch)
        return Run(
            id=new_id(),
            request=request.to_json(),
            target=self.target.name,
            proposer=request.proposer,
            draft=self.draft,
            k=request.k,
            seed=request.sampling.seed,
            dtype=self.target.dtype,
            device=self.target.runner.device,
            versions=versions,
            fingerprint=self.target.fingerprint,
            prompt_ids=tuple(prompt_ids),
        )
