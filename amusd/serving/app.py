"""The routes, and the gate before them: who may come in, with how large a body, and what an error looks like."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import re
import traceback
from collections.abc import Callable
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from amusd import __version__
from amusd.serving.requests import (
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    Plan,
    RequestError,
    plan_chat,
    plan_completion,
    validation_error,
)
from amusd.serving.service import EventStream, Service, closing_error
from amusd.serving.timeline import listen

OPEN = frozenset({"/", "/health", "/version"})
"""Paths that need no key."""
_ANSWER: dict[str, Any] = {
    "description": "One object, or with `stream` server-sent events.",
    "content": {"text/event-stream": {}},
}
_INTERNAL = RequestError("internal error", status=500)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorBody}
    for status, text in {
        400: "A field is wrong, unknown or not supported; `error.param` names it.",
        401: "The API key is missing or wrong.",
        403: "The server does not have the name that `Host` says.",
        404: "No such model.",
        413: "The body is too large.",
        429: "The queue is full.",
        500: "The engine failed at this answer.",
        503: "The server is shutting down.",
    }.items()
}


def make_app(service: Service, tell: Callable[[str], None]) -> FastAPI:
    """The routes of a server. `tell` gets a line for each field that is dropped, once."""
    tell = functools.cache(tell)
    app = FastAPI(title="amusd", version=__version__, docs_url=None, redoc_url=None)

    app.openapi = lambda: _document(app)  # type: ignore[method-assign]  # as FastAPI has it changed

    def check_model(name: str | None) -> None:
        if name is not None and name != service.model:
            message = f"the model '{name[:200]}' does not exist; this server has '{service.model}'"
            raise RequestError(message, param="model", code="model_not_found", status=404)

    @app.post("/v1/chat/completions", responses={200: _ANSWER, **_ERRORS})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(body.model)
        return await _answered(service, plan_chat(body, service.decoding, service.limits), request, tell)

    @app.post("/v1/completions", responses={200: _ANSWER, **_ERRORS})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model)
        return await _answered(service, plan_completion(body, service.decoding, service.limits), request, tell)

    def model_card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": service.began,
            "owned_by": "amusd",
            "max_model_len": service.limits.max_length,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}", responses={404: _ERRORS[404]})
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return model_card()

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"description": "No token can be made now."}})
    async def health() -> JSONResponse:
        status, document = await service.health()
        return JSONResponse(document, status)

    _add_page(app, service)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    _shape_errors(app)
    return app


async def _answered(service: Service, plan: Plan, request: Request, tell: Callable[[str], None]) -> Response:
    for name in sorted(plan.dropped):
        tell(f"request field {name}: has no meaning here and is ignored")
    return await service.respond(plan, request.receive)


def _add_page(app: FastAPI, service: Service) -> None:
    """Add the routes `/`, a page that is one file, and `/timeline`: for people, and not in the OpenAPI document."""
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
        events = listen(service.engine.engine.worker.recorder, lambda: service.is_closing)
        return EventStream(events, cancel=lambda: None, tell_gone=lambda: None)


def _page_policy(html: str) -> str:
    """The content security policy of a page: its own style and script, its own server, and nothing else."""

    def source(element: str) -> str:
        found = re.search(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
        assert found is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {source('style')}; script-src {source('script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without FastAPI's own answer to a wrong body, which is never sent."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema


def _shape_errors(app: FastAPI) -> None:
    """Have every error answered in OpenAI's shape."""

    @app.exception_handler(RequestError)
    async def on_mistake(_request: Request, error: RequestError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        model = ChatRequest if request.url.path.endswith("chat/completions") else CompletionRequest
        return error_response(validation_error(error.errors(), lambda: [*model.model_fields]))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"unknown route: {request.method} {request.url.path[:200]}",
            405: f"{request.method} is not allowed here",
        }
        message = messages.get(error.status_code, str(error.detail))
        return error_response(RequestError(message, status=error.status_code, headers=error.headers))

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, _error: Exception) -> JSONResponse:  # which goes on to `Gate`
        return error_response(_INTERNAL)


def error_response(error: RequestError) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse(error.body, error.status, headers=error.headers)


class Gate:
    """The ASGI application before the routes. Checks what every request has to pass, and counts those that are inside.

    An exception that no route expected becomes an answer with status 500, and one line for the operator that holds
    nothing of the request.
    """

    def __init__(self, app: ASGIApp, service: Service, tell: Callable[[str], None]) -> None:
        self._app = app
        self.service = service
        self._tell = tell
        self._key = _digest(service.config.api_key)
        self._checks_host = self._key is None and _is_loopback(service.config.host)
        self.num_inside = 0
        """Requests for answers that are not answered yet."""
        self.is_empty = asyncio.Event()
        """There are none."""
        self.is_empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it to the routes."""
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope: {scope['type']}")
        is_begun = False

        async def send_on(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                if message["status"] >= 400:
                    self.service.metrics.refused(message["status"])
            await send(message)

        counts = scope["method"] == "POST"
        self._count(counts)
        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), send_on)
        except RequestError as error:
            await error_response(error)(scope, receive, send_on)
        except Exception as error:  # noqa: BLE001 - told here; uvicorn would print the message, which may be of a request
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._tell(f"{scope['path']}: {type(error).__name__} in {frame.filename}:{frame.lineno} ({frame.name})")
            if not is_begun:
                await error_response(_INTERNAL)(scope, receive, send_on)
        finally:
            self._count(-counts)

    def _count(self, number: int) -> None:
        self.num_inside += number
        if self.num_inside:
            self.is_empty.clear()
        else:
            self.is_empty.set()

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = _host_name(headers.get(b"host", b"localhost"))
        if self._checks_host and not _is_loopback(host) and host not in self.service.config.allowed_hosts:
            message = f"this server is not called '{host[:200]}': serve.allowed_hosts can add it"
            raise RequestError(message, status=403, code="host_not_allowed")
        if self._key is not None and scope["path"] not in OPEN:
            keys = [value for name, value in scope["headers"] if name == b"authorization"]
            kind, _, key = keys[0].partition(b" ") if len(keys) == 1 else (b"", b"", b"")
            if kind.lower() != b"bearer" or not hmac.compare_digest(_digest(key.strip()) or b"", self._key):
                message = "the API key is missing or wrong: Authorization: Bearer KEY"
                challenge = {"WWW-Authenticate": "Bearer"}
                raise RequestError(message, status=401, code="invalid_api_key", headers=challenge)
        if self.service.is_closing and scope["method"] == "POST":
            raise closing_error()
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.service.config.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, which raises once the body is larger than allowed."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.service.config.max_body_bytes:
                error = self._too_large()
                raise HTTPException(error.status, error.message, error.headers)  # FastAPI lets no other one pass
            return message

        return limited

    def _too_large(self) -> RequestError:
        limit = self.service.config.max_body_bytes
        return RequestError(f"the body is larger than {limit} bytes", status=413, headers={"Connection": "close"})


def _host_name(header: bytes) -> str:
    """Return the name in a `Host` header, in lower case and without its port; empty if there is none."""
    try:
        return (urlsplit(f"//{header.decode('latin-1')}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    """Whether a name or address can only mean the machine that it is said on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _digest(key: str | bytes | None) -> bytes | None:
    """A hash of equal length for all keys, so that comparing two says nothing about theirs."""
    if key is None:
        return None
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
