"""Other engines as variants, over HTTP: vLLM and llama.cpp's server, started for the bench and stopped with it.

They get the same prompt ids, greedily, one request at a time, and are timed as all are: from the first emission to
the last, as a client sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from decoder import catalog, loading
from decoder.bench.measure import Case, Report, Sample, Variant, VariantName
from decoder.bench.plan import BenchPlan
from decoder.errors import ModelError, RedlineError

START_SECONDS = 300.0
STOP_SECONDS = 20.0


class PeerError(RedlineError):
    """A peer could not be started or did not answer; one sentence."""


class Server:
    """A process that serves HTTP on a free local port. What it writes goes to a file whose end explains a failure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, command: list[str], environment: dict[str, str], report: Report) -> None:
        """Run ``command`` (``{port}`` is replaced) and wait until /health answers. Raises PeerError."""
        self.port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        try:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # A group of its own: its workers are stopped with it, and Ctrl-C reaches it through us only.
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"{self.name} cannot be started: {error.strerror or error}") from None
        self._wait(report)

    def _wait(self, report: Report) -> None:
        import httpx

        assert self._process is not None
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self._process.poll() is not None:
                raise PeerError(f"{self.name} ended while it started: {self.last_words()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            report(0.0, f"waiting for {self.name}, {time.monotonic() - begin:.0f} s")
            time.sleep(0.5)
        raise PeerError(f"{self.name} was not ready after {START_SECONDS:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        """The last line that says something of what the server wrote."""
        if self._log is None:
            return "it wrote nothing"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        lines = [line.strip() for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()]
        return (telling or lines or ["it wrote nothing"])[-1][:200]

    def stop(self) -> None:
        """Interrupt it, and end it when it does not go by itself."""
        process, self._process = self._process, None
        if process is not None:
            for kind in (signal.SIGINT, signal.SIGKILL):
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, kind)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_SECONDS)
        if self._log is not None:
            self._log.close()
            self._log = None


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class PeerVariant(Variant):
    """A served engine. Subclasses say how to start it, what to ask and how to count the tokens of an event."""

    title = ""
    route = ""

    def __init__(self, group: str, program: str, plan: BenchPlan, note: str = "") -> None:
        super().__init__(VariantName(group, "plain"), note)
        self.program = str(Path(program).expanduser())
        self.plan = plan
        self.server = Server(self.title)

    def stop(self) -> None:
        self.server.stop()

    def body(self, case: Case) -> dict[str, Any]:
        """The request's JSON."""
        raise NotImplementedError

    def total(self, event: dict[str, Any], before: int) -> int:
        """Tokens emitted up to and with ``event``; ``before`` it there were that many."""
        raise NotImplementedError

    def measure(self, case: Case, repeat: int) -> Sample:
        import httpx

        begin = time.perf_counter()
        arrivals: list[tuple[float, int]] = []
        count = 0
        try:
            with httpx.stream("POST", f"{self.server.url}{self.route}", json=self.body(case), timeout=600) as response:
                if response.status_code != 200:
                    text = " ".join(response.read().decode("utf-8", "replace").split())[:200]
                    raise PeerError(f"{self.title} answered {response.status_code}: {text}")
                for event in events(response.iter_lines()):
                    total = self.total(event, count)
                    if total > count:
                        arrivals.append((time.perf_counter(), total))
                        count = total
        except httpx.HTTPError as error:
            raise PeerError(f"{self.title} did not answer: {error}") from None
        if not arrivals:
            raise PeerError(f"{self.title} sent no token")
        (first, had), (last, all_of_it) = arrivals[0], arrivals[-1]
        ms = 1000 * (last - first)
        return Sample(
            variant=self.name.key,
            suite=case.suite,
            prompt=case.id,
            repeat=repeat,
            tokens=all_of_it - had,
            decode_ms=ms,
            wall_ms=ms,
            ttft_ms=1000 * (first - begin),
            path=self.note,
        )


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. PeerError for what is not JSON."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise PeerError(f"the stream holds something that is not JSON: {data[:80]!r}") from None
        if isinstance(event, dict):
            yield event


class VllmVariant(PeerVariant):
    """vLLM's OpenAI server on the target's folder, in the plan's dtype."""

    title = "vLLM"
    route = "/v1/completions"

    def __init__(self, program: str, plan: BenchPlan, extra: tuple[str, ...] = ()) -> None:
        """``extra``: further arguments of the server."""
        super().__init__("vllm", program, plan)
        self.extra = extra

    def start(self, report: Report) -> None:
        place = loading.locate(self.plan.target, report)
        device = loading.pick_device(self.plan.device)
        dtype = loading.pick_dtype(self.plan.dtype, device)
        self.note = f"{dtype}, over HTTP"
        self.server.start(
            [
                *(self.program, "-m", "vllm.entrypoints.openai.api_server", "--model", place.where),
                *("--served-model-name", "target", "--dtype", dtype, "--max-model-len", "2048"),
                *("--host", "127.0.0.1", "--port", "{port}"),
                *self.extra,
            ],
            {
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
            report,
        )

    def body(self, case: Case) -> dict[str, Any]:
        return {
            "model": "target",
            "prompt": list(case.ids),
            "max_tokens": case.tokens,
            "temperature": 0,
            "ignore_eos": case.request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def total(self, event: dict[str, Any], before: int) -> int:
        # Chunks are not tokens: only the usage counts. The last event repeats it without a choice.
        if event.get("error"):
            raise PeerError(f"{self.title}: {str(event['error'])[:200]}")
        return int((event.get("usage") or {}).get("completion_tokens") or before)


class LlamaCppVariant(PeerVariant):
    """llama.cpp's server on a GGUF: the embedded one (four-bit weights), or the plan's target where it is a file."""

    title = "llama.cpp"
    route = "/completion"

    def __init__(self, program: str, plan: BenchPlan) -> None:
        super().__init__("llamacpp", program, plan)

    def start(self, report: Report) -> None:
        gguf = gguf_of(self.plan.target)
        self.note = f"{gguf.name.removesuffix('.gguf').rpartition('.')[2] or 'GGUF'} weights, over HTTP"
        self.server.start(
            [
                *(self.program, "-m", str(gguf), "-c", "4096", "-t", str(torch.get_num_threads())),
                *("--host", "127.0.0.1", "--port", "{port}"),
            ],
            {},
            report,
        )

    def body(self, case: Case) -> dict[str, Any]:
        return {
            "prompt": list(case.ids),
            "n_predict": case.tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": case.request.ignore_eos,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }

    def total(self, event: dict[str, Any], before: int) -> int:
        if event.get("error"):
            raise PeerError(f"{self.title}: {str(event['error'])[:200]}")
        if event.get("stop"):
            return before
        return before + len(event.get("tokens") or ([0] if event.get("content") else []))


def gguf_of(target: str) -> Path:
    """The GGUF file of a target. ModelError where it is none."""
    if target == catalog.DEFAULT_TARGET:
        path = catalog.embedded_gguf()
        if path is None:
            raise ModelError("the embedded model's GGUF is not installed: run `make setup`")
        return path
    path = Path(target).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    raise ModelError(f"llama.cpp needs a .gguf, and the target {target} is none")


def peer_variants(plan: BenchPlan) -> list[PeerVariant]:
    """The peers that the plan names."""
    kinds: dict[str, type[VllmVariant] | type[LlamaCppVariant]] = {"vllm": VllmVariant, "llamacpp": LlamaCppVariant}
    return [kinds[engine](path, plan) for engine, path in plan.peers]
