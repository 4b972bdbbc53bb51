"""A stand-in for vLLM's and llama.cpp's servers: /health, and three chunks of 1, 2 and 3 tokens for any prompt."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [0]:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such prompt")
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/completions":
            assert body["temperature"] == 0
            if not body["stream"]:
                self.wfile.write(json.dumps(counted(body)).encode())
                return
            assert body["stream_options"]["include_usage"]
            events = [{"choices": [{"text": "x"}], "usage": {"completion_tokens": n}} for n in (1, 3, 6)]
            events.append({"choices": [], "usage": {"completion_tokens": 6}})
        else:
            assert body["cache_prompt"] is False
            events = [{"content": "x", "tokens": [1] * n, "stop": False} for n in (1, 2, 3)]
            events.append({"content": "", "tokens": [], "stop": True})
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


def counted(body: dict[str, Any]) -> dict[str, Any]:
    """An answer with what vLLM counts per request: three steps of two drafts; nothing drafted for the prompt [1]."""
    metrics: dict[str, Any] = {"num_spec_steps": 3, "per_step_accepted": [2, 0, 1], "per_step_drafted": [2, 2, 2]}
    if body["prompt"] == [1]:
        metrics = {"num_spec_steps": 0, "per_step_accepted": None, "per_step_drafted": None}
    if body["prompt"] == [2]:
        metrics = {"num_spec_steps": 3, "per_step_accepted": None, "per_step_drafted": None}
    return {"choices": [{"token_ids": [5, 6, 7]}], "metrics": {"speculative_decoding": metrics}}


if __name__ == "__main__":
    if "--dead" in sys.argv:
        print("starting\nValueError: no such model")
        sys.exit(1)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
