"""The routes, and the checks before them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import traceback
from collections.abc import Callable
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from amusd import __version__
from amusd.serving.requests import ChatRequest, CompletionRequest, ErrorBody, RequestError, validation_error
from amusd.serving.service import EventStream, Service
from amusd.serving.timeline import listen

OPEN = frozenset({"/", "/health"})
MAX_BODY_BYTES = 4 << 20
"""A larger request body is refused with 413."""
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "One object, or with `stream` server-sent events.", "content": {"text/event-stream": {}}},
    "default": {"description": "An error; `error.param` names the field.", "model": ErrorBody},
}


def make_app(service: Service) -> FastAPI:
    """The routes of a server."""
    app = FastAPI(title="amusd", version=__version__, docs_url=None, redoc_url=None, exception_handlers=_HANDLERS)

    @app.post("/v1/chat/completions", responses=_RESPONSES)
    async def chat_completions(body: ChatRequest) -> Response:
        return service.respond(body)

    @app.post("/v1/completions", responses=_RESPONSES)
    async def completions(body: CompletionRequest) -> Response:
        return service.respond(body)

    card = {"id": service.model, "object": "model", "created": service.began, "owned_by": "amusd"}
    card["max_model_len"] = service.max_length

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", responses={"default": _RESPONSES["default"]})
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card

    @app.get("/health", responses={503: {"description": "No token can be made now."}})
    async def health() -> JSONResponse:
        status, document = await service.health()
        return JSONResponse(document, status)

    _add_page(app, service)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _add_page(app: FastAPI, service: Service) -> None:
    html = files("amusd.serving").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _page_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/timeline", include_in_schema=False)
    async def timeline() -> Response:
        return EventStream(listen(service.engine.engine.worker.recorder, lambda: service.is_closing))


def _page_policy(html: str) -> str:
    own = "".join(
        f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'; "
        for name, text in re.findall(r"<(style|script)>(.*?)</\1>", html, re.DOTALL)
    )
    return (
        f"default-src 'none'; {own}connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(RequestError(message, status=error.status_code, headers=error.headers))


def error_response(error: RequestError) -> Response:
    """An error in OpenAI's shape. Half surrogate pairs, which a client's name may hold, are escaped."""
    return Response(json.dumps(error.body), error.status, error.headers, "application/json")


_HANDLERS: dict[Any, Any] = {
    RequestError: lambda _request, error: error_response(error),
    RequestValidationError: lambda _request, error: error_response(validation_error(error.errors())),
    HTTPException: _http_error,
    Exception: lambda *_: error_response(RequestError("internal error", status=500)),  # and goes on to `Gate`
}


class Gate:
    """Checks every request before the routes.

    An unexpected exception becomes status 500, and one line for the operator without anything of the request.
    """

    def __init__(self, app: ASGIApp, service: Service, tell: Callable[[str], None]) -> None:
        self._app = app
        self.service = service
        self._tell = tell
        self._key = service.config.api_key
        self._checks_host = self._key is None and _is_loopback(service.config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it to the routes."""
        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - told here; uvicorn would print the message, which may be of a request
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._tell(f"{scope['path']}: {type(error).__name__} in {frame.filename}:{frame.lineno} ({frame.name})")

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = _host_name(headers.get(b"host", b"localhost"))
        if self._checks_host and not _is_loopback(host) and host not in self.service.config.allowed_hosts:
            message = f"this server is not called '{host[:200]}': serve.allowed_hosts can add it"
            raise RequestError(message, status=403, code="host_not_allowed")
        if self._key is not None and scope["path"] not in OPEN:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key.encode()):
                message = "the API key is missing or wrong: Authorization: Bearer KEY"
                challenge = {"WWW-Authenticate": "Bearer"}
                raise RequestError(message, status=401, code="invalid_api_key", headers=challenge)

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, which raises once the body is larger than allowed."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:  # FastAPI lets no other exception pass
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes", {"Connection": "close"})
            return message

        return limited


def _host_name(header: bytes) -> str:
    """Return the name in a `Host` header, in lower case and without its port; empty if there is none."""
    try:
        return (urlsplit(f"//{header.decode('latin-1')}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
