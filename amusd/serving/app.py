"""The routes of the server, and the checks before them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from amusd.config import ServeConfig
from amusd.logs import logger
from amusd.serving.requests import ChatRequest, CompletionRequest, RequestError, read
from amusd.serving.service import Service, event_stream, place_of
from amusd.serving.timeline import listen
from amusd.transport.addresses import is_loopback

OPEN = frozenset({"/", "/health"})
MAX_BODY_BYTES = 4 << 20
"""A larger request body is refused with 413."""


def _routes(service: Service) -> Starlette:
    html = files("amusd.serving").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _page_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    card: dict[str, Any] = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "amusd"}
    card["max_model_len"] = service.max_length
    models = {"object": "list", "data": [card]}

    async def answer(kind: Any, request: Request) -> ASGIApp:
        return service.respond(read(kind, await _body(request)))

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(card)

    async def health(_request: Request) -> Response:
        status, document = await service.health()
        return JSONResponse(document, status)

    async def metrics(_request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def timeline(_request: Request) -> Response:
        return event_stream(listen(service.engine.engine.worker.recorder, lambda: service.is_closing))

    routes = [
        Route("/v1/chat/completions", partial(answer, ChatRequest), methods=["POST"]),
        Route("/v1/completions", partial(answer, CompletionRequest), methods=["POST"]),
        Route("/v1/models", JSONResponse(models), methods=["GET"]),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/", HTMLResponse(html, headers=headers), methods=["GET"]),
        Route("/timeline", timeline),
    ]
    return Starlette(routes=routes, exception_handlers=_HANDLERS)


async def _body(request: Request) -> bytes:
    """A request's body. Raises `RequestError` if it is too large, or of a type that another site's page could send."""
    where, content = f"{request.method} {request.url.path}", bytearray()
    kind = request.headers.get("content-type", "").partition(";")[0]
    if not kind.strip().lower().endswith("json"):
        raise RequestError(f"{where}: the body must be sent as Content-Type: application/json")
    try:
        async for part in request.stream():
            content += part
            if len(content) > MAX_BODY_BYTES:
                message = f"{where}: the body is larger than {MAX_BODY_BYTES} bytes"
                raise RequestError(message, status=413, headers={"Connection": "close"})
    except ClientDisconnect:
        raise RequestError(f"{where}: the client has left") from None
    return bytes(content)


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
    """An error in OpenAI's shape."""
    return JSONResponse(error.body, error.status, error.headers)


_HANDLERS: dict[Any, Any] = {
    RequestError: lambda _request, error: error_response(error),
    HTTPException: _http_error,
    Exception: lambda *_: error_response(RequestError("internal error", status=500)),  # Starlette raises it again
}


def make_app(service: Service) -> ASGIApp:
    """The server as an ASGI application: checks every request before the routes.

    An unexpected exception becomes status 500, and one line for the operator without the request's content.
    """
    routes = _routes(service)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check(scope, service.config)
            await routes(scope, receive, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - uvicorn would print its message, which may quote a request
            logger.error("%s: %s", scope["path"], place_of(error))

    return app


def _check(scope: Scope, config: ServeConfig) -> None:
    """Raise `RequestError` for a wrong or missing key; without a key on loopback, for another host name."""
    headers, key = dict(scope["headers"]), config.api_key
    name = re.sub(r":\d*$", "", headers.get(b"host", b"localhost").decode("latin-1"))
    host = name.strip("[]").rstrip(".").lower()
    is_own = is_here(host) or host in {name.lower() for name in config.allowed_hosts}
    if key is None and is_here(config.host) and not is_own:
        message = f"this server is not called '{host[:200]}': serve.allowed_hosts can add it"
        raise RequestError(message, status=403, code="host_not_allowed")
    if key is not None and scope["path"] not in OPEN:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
            message = "the API key is missing or wrong: Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def is_here(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host == "localhost" or host.endswith(".localhost") or is_loopback(host)
