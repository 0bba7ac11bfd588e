"""The page at `/` and its timeline. The page is one file, and its policy lets a browser load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse

from amusd.serving.service import EventStream, Service
from amusd.serving.timeline import listen


def add_page(app: FastAPI, service: Service) -> None:
    """Add the routes `/` and `/timeline`. They are for people, and not in the OpenAPI document."""
    html = files("amusd.serving").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(html),
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


def policy(html: str) -> str:
    """The content security policy of a page: its own style and script, its own server, and nothing else."""

    def source(element: str) -> str:
        found = re.search(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
        assert found is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {source('style')}; script-src {source('script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
