"""What a client gets wrong: the status, the type and the parameter of every mistake, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from serving.running import MODEL, TEXT, Running, plain_engine, serving

from amusd.types import Mode

CHAT, TEXTS, CARDS = "/v1/chat/completions", "/v1/completions", "/v1/models"
USER = {"role": "user", "content": TEXT}
JSON = "application/json"
INVALID = "invalid_request_error"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(plain_engine(), mode=Mode.AUTOREGRESSIVE, max_body_bytes=20_000) as running:
        yield running


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{**USER, **fields}]}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT_MISTAKES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": 5}, "model", "model: should be a valid string"),
    ({"messages": None}, "messages", "messages: should be a valid list"),
    ({"messages": []}, "messages", "messages: List should have at least 1 item"),
    ({"messages": "hello"}, "messages", "valid list"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing required parameter"),
    ({"messages": [{"content": "a"}]}, "messages.0.role", "missing required parameter"),
    ({"messages": [USER, {"role": "narrator", "content": "a"}]}, "messages.1.role", "'assistant'"),
    (message(content=5), "messages.0.content", "valid string"),
    (message(content=None), "messages.0.content", "missing required parameter"),
    (message(content=[IMAGE]), "messages.0.content", "parts of type 'image_url' are not supported"),
    (message(content=[{"type": "text", "text": "a", "x": 1}]), "messages.0.content.x", "unrecognized request argument"),
    (message(audio={"id": "1"}), "messages.0.audio", "is not supported by this server"),
    (message(name=5), "messages.0.name", "valid string"),
    (message(colour="red"), "messages.0.colour", "unrecognized request argument"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": 1e9}, "temperature", "must be between"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differs from max_completion_tokens"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 100}, "n", "more than this server takes"),
    ({"seed": "one"}, "seed", "valid integer"),
    ({"stop": ""}, "stop", "must not be empty"),
    ({"stop": [1]}, "stop", "valid string"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "no such token"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "unrecognized request argument"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"mode": "fast"}, "mode", "'asynchronous'"),
    ({"num_speculative_tokens": 100}, "num_speculative_tokens", "this server takes 7"),
    ({"tools": [TOOL]}, "tools", "is not supported by this server"),
    ({"tool_choice": "required"}, "tool_choice", "should be 'none' or 'auto'"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tools", "is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "is not supported"),
    ({"min_tokens": 1}, "min_tokens", "needs ignore_eos=true, no stop"),
    ({"min_tokens": 1, "ignore_eos": True, "stop": "a"}, "min_tokens", "needs ignore_eos=true, no stop"),
    ({"min_tokens": 3, "ignore_eos": True, "max_tokens": 2}, "min_tokens", "max_tokens that are not fewer"),
    ({"add_special_tokens": True}, "add_special_tokens", "is always false here"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "is not supported"),
    ({"guided_json": {"type": "object"}}, "guided_json", "is not supported"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "is not supported"),
    ({"logits_processors": ["a"]}, "logits_processors", "is not supported"),
    ({"use_beam_search": True}, "use_beam_search", "is not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "is not supported"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "is not supported"),
    ({"best_of": 2}, "best_of", "is not supported"),
    ({"max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
    ({"min_token": 1}, "min_token", "did you mean 'min_tokens'?"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ({"messages": [{**USER, "content": "a" * 500}]}, "messages", "leave no room in a context of 400"),
    ({"messages": [{**USER, "content": "\ud800"}]}, "messages", "half of a surrogate pair"),
    ({"\ud800": 1}, None, "the body: "),
]
TEXT_MISTAKES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "valid string"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": ""}, "prompt", "has no tokens"),
    ({"prompt": ["a", 5]}, "prompt", "valid"),
    ({"prompt": [5000]}, "prompt", "token ids must be in [0, 50)"),
    ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
    ({"prompt": {"text": "a"}}, "prompt", "valid"),
    ({"prompt": ["a"] * 69}, "prompt", "69 answers are more than this server takes, 68"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"suffix": "and so on"}, "suffix", "is not supported"),
    ({"best_of": 3}, "best_of", "is not supported"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"messages": [USER]}, "messages", "unrecognized request argument"),
    ({"echo": True}, "echo", "is not supported"),
]


def check(response: httpx.Response, status: int, param: str | None, text: str, kind: str = INVALID) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (kind, param)
    assert text in error["message"]


@pytest.mark.parametrize(("fields", "param", "text"), CHAT_MISTAKES, ids=[str(row[0])[:60] for row in CHAT_MISTAKES])
def test_a_mistake_in_a_chat_request_is_named(server: Running, fields: dict[str, Any], param: str, text: str) -> None:
    body = json.dumps({**server.chat(), **fields})  # httpx would refuse half a surrogate pair itself
    headers = {"Content-Type": JSON}
    check(server.http.post(CHAT, content=body, headers=headers), 400, param, text)


@pytest.mark.parametrize(("fields", "param", "text"), TEXT_MISTAKES, ids=[str(row[0])[:60] for row in TEXT_MISTAKES])
def test_a_mistake_in_a_completion_request_is_named(
    server: Running, fields: dict[str, Any], param: str, text: str
) -> None:
    check(server.post(TEXTS, {"model": MODEL, "prompt": TEXT, **fields}), 400, param, text)


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "text"),
    [
        ("POST", CHAT, b"{", {}, 400, "the body is not JSON"),
        ("POST", CHAT, b"", {}, 400, "must be a JSON object"),
        ("POST", CHAT, b"[]", {}, 400, "must be a JSON object"),
        ("POST", CHAT, b"{}", {"Content-Type": "text/plain"}, 400, "Content-Type: application/json"),
        ("POST", CHAT, b"\xff\xfe{}", {}, 400, ""),
        ("POST", CHAT, b"[" * 10_000, {}, 400, ""),
        ("POST", CHAT, b'{"a": ' + b"1" * 5_000 + b"}", {}, 400, ""),
        ("POST", CHAT, b'{"model": "' + b"a" * 30_000 + b'"}', {}, 413, "larger than 20000 bytes"),
        ("GET", CHAT, b"", {}, 405, "GET is not allowed here"),
        ("POST", "/v1/models", b"{}", {}, 405, "POST is not allowed here"),
        ("POST", "/v1/embeddings", b"{}", {}, 404, "unknown route: POST /v1/embeddings"),
        ("GET", "/nothing", b"", {}, 404, "unknown route: GET /nothing"),
    ],
)
def test_what_is_no_request_gets_the_same_shape(
    server: Running, method: str, path: str, content: bytes, headers: dict[str, str], status: int, text: str
) -> None:
    given = {"Content-Type": JSON, **headers}
    response = server.http.request(method, path, content=content, headers=given)
    check(response, status, None, text)
    if status == 405:
        assert response.headers["allow"]


def test_a_body_without_a_length_is_cut_off_too(server: Running) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1_000

    headers = {"Content-Type": JSON}
    check(server.http.post(CHAT, content=body(), headers=headers), 413, None, "larger than 20000 bytes")


def test_another_model_is_not_found(server: Running) -> None:
    odd = server.http.post(CHAT, content=json.dumps(server.chat(model="\ud800")), headers={"Content-Type": JSON})
    check(odd, 404, "model", "the model '?' does not exist")
    response = server.post(CHAT, server.chat(model="gpt-9"))
    check(response, 404, "model", "the model 'gpt-9' does not exist; this server has 'table'")
    assert response.json()["error"]["code"] == "model_not_found"
    check(server.get(f"{CARDS}/gpt-9"), 404, "model", "does not exist")


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(server: Running) -> None:
    response = server.post(TEXTS, {"model": MODEL, "prompt": [1] * 400})
    check(response, 400, "prompt", "400 tokens leave no room in a context of 400")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_the_official_client_raises_what_it_raises_elsewhere(server: Running) -> None:
    with server.client() as client:
        with pytest.raises(BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=[], max_tokens=5)
        assert (bad.value.param, bad.value.type) == ("messages", INVALID)
        with pytest.raises(NotFoundError) as missing:
            client.models.retrieve("nothing")
        assert missing.value.code == "model_not_found"
        with pytest.raises(BadRequestError, match="tools: is not supported"):
            client.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL])  # type: ignore[list-item]


NEUTRAL = {
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "function_call": "none",
    "bad_words": [],
    "use_beam_search": False,
    "skip_special_tokens": True,
    "thinking_token_budget": -1,
    "best_of": 1,
    "echo": False,
    "add_special_tokens": False,
    "min_tokens": 0,
    "model": None,
    "logit_bias": None,
    "stop": None,
    "n": None,
    "stream": None,
    "store": False,
}
DROPPED = {
    "user": "ann",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "parallel_tool_calls": True,
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "priority": 3,
    "request_id": "1",
    "cache_salt": "z",
    "stream_interval": 2,
    "spaces_between_special_tokens": True,
    "messages": [{**USER, "content": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]}],
}


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    before = len(server.lines)
    response = server.post(CHAT, server.chat(**NEUTRAL, max_tokens=3))
    assert response.status_code == 200, response.text
    again = {**response.json()["choices"][0]["message"], "annotations": [], "audio": None, "tool_calls": None}
    body = server.chat(max_tokens=2)
    body["messages"] += [again, {"role": "developer", "content": [{"type": "text", "text": TEXT}]}]
    assert server.post(CHAT, body).status_code == 200
    assert server.lines[before:] == []


@pytest.mark.parametrize(("name", "value"), DROPPED.items(), ids=[*DROPPED])
def test_a_field_without_a_meaning_here_is_dropped_and_told_once(server: Running, name: str, value: Any) -> None:
    for _ in range(2):
        response = server.post(CHAT, server.chat(**{name: value}, max_tokens=2))
        assert response.status_code == 200, response.text
    field = "cache_control" if name == "messages" else name
    assert server.lines.count(f"request field {field}: has no meaning here and is ignored") == 1


def test_what_is_no_text_is_quoted_all_the_same(server: Running) -> None:
    """Half of a surrogate pair passes JSON, and UTF-8 has no bytes for it."""
    body = json.dumps({**server.chat(), "model": "\ud800"})
    response = server.http.post(CHAT, content=body, headers={"Content-Type": JSON})
    assert response.status_code == 404
    assert "the model '?' does not exist" in json.loads(response.content)["error"]["message"]


def test_a_bug_is_an_error_in_openais_shape_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain_engine(), mode=Mode.AUTOREGRESSIVE) as own:
        monkeypatch.setattr("amusd.serving.app.plan_chat", lambda *_: 1 / 0)
        response = own.post(CHAT, own.chat())
        assert response.status_code == 500
        told = {"message": "internal error", "type": "server_error", "param": None, "code": None}
        assert response.json() == {"error": told}
    (line,) = own.lines  # told behind the answer
    assert line.startswith(f"{CHAT}: ZeroDivisionError in ")


def test_nothing_of_a_request_is_told_to_the_operator(server: Running) -> None:
    for fields, _, _ in CHAT_MISTAKES:
        body = json.dumps({**server.chat(), **fields})
        server.http.post(CHAT, content=body, headers={"Content-Type": JSON})
    assert all(line.endswith("has no meaning here and is ignored") for line in server.lines)
    assert server.figures()['amusd:requests_refused_total{,status="400"}'] > 30
