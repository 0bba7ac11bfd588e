"""What is larger than any answer needs is refused before work is put into it: other requests would wait for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx", reason="httpx is not installed: pip install httpx")
pytest.importorskip("fastapi", reason="the server is not installed: pip install 'amusd[serve]'")

from amusd.serving.requests import CHARACTERS_PER_TOKEN, MAX_BIASES, MAX_STOPS, STOP_CHARACTERS
from amusd.types import Mode
from tests.serving.running import MODEL, Running, plain_engine, serving

CONTEXT = 400
"""Tokens of the table model's context."""
CHARACTERS = CONTEXT * CHARACTERS_PER_TOKEN


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(plain_engine(), mode=Mode.AUTOREGRESSIVE) as running:
        yield running


@pytest.fixture
def encoded(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that were taken apart."""
    found: list[Any] = []
    encode = server.engine.encode

    def keep(prompt: Any, **options: Any) -> Any:
        found.append(prompt)
        return encode(prompt, **options)

    monkeypatch.setattr(server.engine, "encode", keep)
    return found


def messages(number: int, text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}] * number


@pytest.mark.parametrize(
    ("body", "param", "size"),
    [
        ({"prompt": "a" * (CHARACTERS + 1)}, "prompt", f"{CHARACTERS + 1} characters"),
        ({"prompt": ["a", "a" * (CHARACTERS + 1)]}, "prompt", f"{CHARACTERS + 1} characters"),
        ({"prompt": [1] * (CONTEXT + 1)}, "prompt", f"{CONTEXT + 1} tokens"),
        ({"messages": messages(CONTEXT + 1, "a")}, "messages", f"{CONTEXT + 1} messages"),
        ({"messages": messages(1, "a" * (CHARACTERS + 1))}, "messages", f"{CHARACTERS + 1} characters"),
        ({"prompt": "a", "stop": ["b"] * (MAX_STOPS + 1)}, "stop", "at most 64 strings"),
        ({"prompt": "a", "stop": "b" * (STOP_CHARACTERS + 1)}, "stop", "at most 64 strings"),
        ({"prompt": "a", "logit_bias": {str(id_): 1 for id_ in range(MAX_BIASES + 1)}}, "logit_bias", "at most 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_too_large_is_refused_before_it_is_taken_apart(
    server: Running, encoded: list[Any], body: dict[str, Any], param: str, size: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.post(path, {"model": MODEL, "max_tokens": 2, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"].startswith(f"{param}: {size}")
    is_text = param in ("prompt", "messages")
    assert response.json()["error"]["code"] == ("context_length_exceeded" if is_text else None)
    assert encoded == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "stop": [f"{number:0{STOP_CHARACTERS}d}" for number in range(MAX_STOPS)]},
        {"prompt": [1] * (CONTEXT - 3)},
        {"messages": messages(CONTEXT - 3, "a")},
    ],
    ids=["stop", "tokens", "messages"],
)
def test_what_just_fits_is_answered(server: Running, encoded: list[Any], body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.post(path, {"model": MODEL, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    assert encoded


@pytest.mark.parametrize("prompt", ["a" * CHARACTERS, [1] * CONTEXT], ids=["characters", "tokens"])
def test_the_rest_is_for_the_engine_to_refuse(server: Running, encoded: list[Any], prompt: Any) -> None:
    response = server.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2})
    assert response.status_code == 400
    assert "leave no room in a context of 400" in response.json()["error"]["message"]
    assert encoded
