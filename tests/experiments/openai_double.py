"""A server that speaks as much of OpenAI's protocol as a load generator needs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import Self

Body = dict[str, Any]


def answer(body: Body) -> bytes:
    """Four chunks of text for eight tokens."""
    pieces = ("", *[f"{body['seed']} "] * 3, "end")
    chunks: list[Body] = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    chunks.append({"choices": [], "usage": {"completion_tokens": 8}})
    return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, chunks), "[DONE]")).encode()


class OpenAIDouble(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[Body] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIDouble

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "a model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self._send(answer(body))

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""
