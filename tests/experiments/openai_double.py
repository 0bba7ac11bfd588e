"""A server that speaks as much of OpenAI's protocol as a load generator needs, and breaks it as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import Self

Body = dict[str, Any]


def events(*values: Any) -> bytes:
    lines = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def chat_chunk(text: str, **more: Any) -> Body:
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


def usage(num_tokens: int) -> Body:
    return {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens},
    }


def answer(body: Body) -> bytes:
    begin = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    pieces = [chat_chunk(f"{body['seed']} ") for _ in range(3)]
    return events(begin, *pieces, chat_chunk("end", finish_reason="stop"), usage(8), "[DONE]")


class OpenAIDouble(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, reply: Callable[[Body], bytes | tuple[int, str]] = answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
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
        self._send(200, json.dumps({"data": [{"id": "a model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        reply = self.server.reply(body)
        if isinstance(reply, bytes):
            self._send(200, reply)
        else:
            self._send(reply[0], reply[1].encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""
