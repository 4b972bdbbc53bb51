"""Redline's own engine as variants of the bench: plain, and every proposer at every k."""

from __future__ import annotations

import time

from decoder import catalog
from decoder.bench.measure import Case, Sample, Variant, VariantName
from decoder.bench.plan import BenchPlan
from decoder.bench.round_times import rounds_of
from decoder.engine import RunStream, SpeculativeDecoder
from decoder.errors import RequestError
from decoder.heads.layout import HEADS
from decoder.request import GenerationRequest


def settle(decoder: SpeculativeDecoder) -> None:
    """Compile now what would be compiled behind the first run, where a runner has something to (``settle()``)."""
    for owner in (decoder.target, decoder.proposer):
        runner = getattr(owner, "runner", None)
        wait = getattr(runner, "settle", None)
        if callable(wait):
            wait()


class OurVariant(Variant):
    """One proposer at one k on our engine. ``decoder`` may be given (tests, synthetic models); else it is loaded."""

    def __init__(
        self,
        proposer: str,
        k: int,
        *,
        draft: str | None = None,
        exit_layer: int = 0,
        decoder: SpeculativeDecoder | None = None,
        label: str = "",
    ) -> None:
        super().__init__(VariantName("redline", label or proposer, k if proposer != "none" else 0))
        self.proposer, self.k, self.draft, self.exit_layer = proposer, k, draft, exit_layer
        self._decoder = decoder
        self._own = decoder is None

    def takes(self, case: Case) -> bool:
        return self.proposer != "prediction" or bool(case.request.prediction)

    def request(self, case: Case) -> GenerationRequest:
        """The case's request with this variant's proposer."""
        return case.request.replace(
            proposer=self.proposer,
            k=max(1, self.k),
            draft=self.draft if self.proposer == "draft-model" else None,
            exit_layer=self.exit_layer,
            prediction=case.request.prediction if self.proposer == "prediction" else None,
        )

    def warm_up(self, case: Case) -> None:
        super().warm_up(case)
        assert self._decoder is not None
        settle(self._decoder)
        if self._own:
            # What was compiled changed the path: the record of a run says which it was.
            self._decoder = SpeculativeDecoder.load(self.request(case))
            # Its text repeats, so that look-ups find something and passes of k + 1 tokens are warm as well.
            self._decoder.warm_up(self.request(case))
        super().warm_up(case)

    def measure(self, case: Case, repeat: int) -> Sample:
        request = self.request(case)
        if self._decoder is None:
            self._decoder = SpeculativeDecoder.load(request)
        if self._decoder.not_speculating and self.proposer != "none":
            raise RequestError(self._decoder.not_speculating)
        stream = self._decoder.stream(request)
        wall_ms = drain(stream)
        run = stream.run
        if run.error:
            raise RequestError(run.error)
        if repeat >= 0:
            self.rounds += rounds_of(run.steps)
        m = run.metrics
        return Sample(
            variant=self.name.key,
            suite=case.suite,
            prompt=case.id,
            repeat=repeat,
            tokens=m["num_decode_tokens"],
            decode_ms=m["decode_ms"],
            wall_ms=wall_ms,
            ttft_ms=run.ttft_ms,
            rounds=m["num_decode_steps"],
            draft_ms=m["draft_ms"],
            verify_ms=m["verify_ms"],
            overhead_ms=m["overhead_ms"],
            spec_steps=m["num_spec_steps"],
            drafted=m["num_draft_tokens"],
            accepted=m["num_accepted_draft_tokens"],
            path=" + ".join(
                p for p in (run.versions.get("target_path"), run.versions.get("draft_path")) if p is not None
            ),
        )


def drain(stream: RunStream) -> float:
    """Decode to the end; ms on the wall clock from the first step's arrival to the last one's."""
    first = last = None
    for _ in stream:
        last = time.perf_counter()
        first = last if first is None else first
    return 0.0 if first is None or last is None else 1000 * (last - first)


def our_variants(plan: BenchPlan, exit_layer: int) -> list[OurVariant]:
    """Plain first, then every proposer at every k; one that has no head here has one row, which says so."""
    found = [OurVariant("none", 0)]
    for proposer in plan.proposers:
        if proposer == "none":
            continue
        nothing = proposer in HEADS and catalog.default_draft(plan.target, proposer) is None
        for k in (plan.their_k,) if nothing else plan.ks:
            found.append(OurVariant(proposer, k, draft=plan.draft, exit_layer=exit_layer))
    return found
