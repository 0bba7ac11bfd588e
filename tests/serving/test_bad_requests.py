"""Mistakes of clients: the status, the type and the parameter of each error, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from runtime.pair import plain_engine
from serving.running import MODEL, TEXT, Running, serving, until

from amusd.serving.requests import MAX_BIASES, MAX_STOPS, CompletionRequest, RequestError, read

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": TEXT}
HEADERS = {"Content-Type": "application/json"}
INVALID = "invalid_request_error"
CONTEXT = 400


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch, serving(plain_engine(), mode="autoregressive") as running:
        patch.setattr("amusd.serving.app.MAX_BODY_BYTES", 80_000)
        yield running


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{**USER, **fields}]}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
MISTAKES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": [{"content": "a"}]}, "messages.0.role", "missing required parameter"),
    (message(content=5), "messages.0.content", "Expected `str | array | null`, got `int`"),
    (message(content=[IMAGE]), "messages.0.content.0.type", "Invalid enum value 'image_url'"),
    ({"stop": ["b"] * (MAX_STOPS + 1)}, "stop", f"of length <= {MAX_STOPS}"),
    ({"logit_bias": {str(id_): 1 for id_ in range(MAX_BIASES + 1)}}, "logit_bias", f"of length <= {MAX_BIASES}"),
    ({"tools": [TOOL]}, "tools", "not supported by this server"),
    ({"max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "not supported by this server"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "not supported by this server"),
    ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens", "not supported by this server"),
    (message(content="a" * 500), "messages", "leave no room in a context of 400"),
    (message(content="\ud800"), None, r"the body is not JSON: \ud800 is half of a surrogate pair"),
    ({"max_tokens": 4.5}, "max_tokens", "got `float`"),
    ({"m" * 50_000: 1}, "m" * 200 + "...", "is not known"),
    ({"prompt": [5000]}, "prompt", "token ids must be in [0, 50)"),
    ({"prompt": ["a", 1]}, "prompt", "both token ids and prompts"),
    ({"prompt": ["a"] * 69}, "prompt", "69 answers are more than this server takes, 68"),
    ({"n": 10**12}, "n", "1000000000000 answers are more than this server takes, 68"),
    ({"prompt": [1] * (CONTEXT + 1)}, "prompt", "leave no room"),
]


def check(response: httpx.Response, status: int, param: str | None, text: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (INVALID, param)
    assert text in error["message"]


def post(server: Running, fields: dict[str, Any]) -> httpx.Response:
    path, body = (TEXTS, {"model": MODEL}) if "prompt" in fields else (CHAT, server.chat())
    # httpx would refuse half a surrogate pair itself
    return server.http.post(path, content=json.dumps({**body, **fields}), headers=HEADERS)


@pytest.mark.parametrize(("fields", "param", "text"), MISTAKES, ids=[str(row[0])[:60] for row in MISTAKES])
def test_a_mistake_in_a_request_is_named(server: Running, fields: dict[str, Any], param: str, text: str) -> None:
    check(post(server, fields), 400, param, text)
    assert server.lines == []  # nothing of a request is told to the operator


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "text"),
    [
        ("POST", CHAT, b"{", 400, "the body is not JSON"),
        ("POST", CHAT, b'{"model": "' + b"a" * 80_000 + b'"}', 413, "larger than 80000 bytes"),
        ("GET", CHAT, b"", 405, "GET /v1/chat/completions: Method Not Allowed"),
        ("POST", "/v1/embeddings", b"{}", 404, "POST /v1/embeddings: Not Found"),
    ],
)
def test_what_is_no_request_gets_the_same_shape(
    server: Running, method: str, path: str, content: bytes, status: int, text: str
) -> None:
    check(server.http.request(method, path, content=content, headers=HEADERS), status, None, text)


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; charset=json", "multipart/form-data; boundary=json"])
def test_a_body_that_the_page_of_another_site_could_send_is_refused(server: Running, kind: str) -> None:
    """A browser asks no server before it sends these types, whatever their parameters."""
    content = json.dumps(server.chat(max_tokens=1))
    refused = server.http.post(CHAT, content=content, headers={"Content-Type": kind})
    check(refused, 400, None, "must be sent as Content-Type: application/json")
    taken = server.http.post(CHAT, content=content, headers={"Content-Type": "Application/JSON; charset=utf-8"})
    assert taken.status_code == 200


def test_a_body_without_a_length_is_cut_off_too(server: Running) -> None:
    body = (b" " * 1_000 for _ in range(81))
    check(server.http.post(CHAT, content=body, headers=HEADERS), 413, None, "larger than 80000 bytes")


def test_a_body_of_a_type_that_another_sites_page_can_send_is_refused(server: Running) -> None:
    sent = server.http.post(CHAT, content=json.dumps(server.chat()), headers={"Content-Type": "text/plain"})
    check(sent, 400, None, "the body must be sent as Content-Type: application/json")


def test_another_model_is_not_found(server: Running) -> None:
    for response in (post(server, {"model": "org/gpt-9"}), server.get("/v1/models/org/gpt-9")):
        check(response, 404, "model", "the model 'org/gpt-9' does not exist; this server has 'table'")


@pytest.mark.parametrize("values", ["[],", "{},"])
def test_a_body_of_more_values_than_can_be_read_at_once_is_refused(values: str) -> None:
    content = b'{"prompt": [' + values.encode() * 300_000 + b"0]}"
    with pytest.raises(RequestError, match="too many values"):
        read(CompletionRequest, content)
    text = json.dumps({"prompt": values * 300_000}).encode()  # a text may hold as many
    assert len(read(CompletionRequest, text).prompts) == 1


WITHOUT_EFFECT = {
    "tool_choice": "none", "tools": [TOOL], "function_call": "none", "functions": [TOOL["function"]],
    "modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium", "response_format": {"type": "text"},
    "seed": 1.0, "n": 1.0, "min_tokens": 0, "priority": 3, "model": None, "stop": None, "user": "ann", "echo": False,
    "skip_special_tokens": True, "add_special_tokens": False,
    "stream_options": {"include_usage": True, "include_obfuscation": None},
}  # fmt: skip


def test_fields_that_change_nothing_are_taken(server: Running) -> None:
    response = post(server, {**WITHOUT_EFFECT, "max_tokens": 3.0})
    assert response.status_code == 200, response.text
    again = {**response.json()["choices"][0]["message"], "annotations": [], "audio": None, "tool_calls": None}
    parts = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]
    turns = [USER, again, {"role": "developer", "content": parts}]
    assert post(server, {"messages": turns, "max_tokens": 2}).status_code == 200


def test_a_bug_is_an_error_in_openais_shape_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain_engine(), mode="autoregressive") as own:
        monkeypatch.setattr("amusd.serving.service.sampling_params", lambda *_: 1 / 0)
        response = own.post(CHAT, own.chat())
        assert response.status_code == 500
        told = {"message": "internal error", "type": "server_error", "param": None, "code": None}
        assert response.json() == {"error": told}
        until(lambda: own.lines)  # told after the answer
    (line,) = own.lines
    assert line.startswith(f"{CHAT}: ZeroDivisionError in ")
