"""OpenAI's own client against the server, and the protocol's rules for streams, choices, usage and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
from openai import APIStatusError, AuthenticationError, OpenAI, RateLimitError
from runtime.pair import PROMPT, oracle, pair, plain_engine
from serving.running import ANSWER, LONG, MODEL, SECONDS, TEXT, Paused, Running, events, serving, until

from amusd.config import DecodingConfig
from amusd.drafters.synthetic import right_with_probability
from amusd.policies.base import Decision, Policy, TargetView

BLOCKS = {"mode": "synchronous", "num_speculative_tokens": 4, "max_silence_seconds": 60.0}
"""Each pass waits for its candidates, so that counts do not depend on this machine."""
USER: Any = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """With a draft that is right nine times of ten, so that blocks of several tokens are accepted."""
    factories = {"oracle": oracle(LONG, right_with_probability(0.9, 1))}
    with pair(factories, max_num_seqs=4, pass_seconds=0.0) as (engine, _), serving(engine, **BLOCKS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.client() as found:
        yield found


def test_a_chat_answer_is_one_object_with_its_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=20, temperature=0)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == ANSWER[:20]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)
    assert answer.usage.model_extra["metrics"]["num_tokens"] == 20  # type: ignore[index]


def test_the_usage_says_how_much_of_a_prompt_was_not_computed_again(client: OpenAI) -> None:
    usages = [client.completions.create(model=MODEL, prompt=[7] * 9, max_tokens=1, n=2).usage for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 8]  # type: ignore[union-attr]


def test_a_chat_stream_has_a_role_its_text_an_end_and_its_usage(server: Running, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    first, *pieces, last, count = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER[:40]
    assert all(piece.choices[0].delta.content for piece in pieces)  # none without text
    assert len(pieces) < 40  # tokens that a pass brought together are sent together
    assert last.choices[0].finish_reason == "length"
    assert {piece.choices[0].finish_reason for piece in (first, *pieces)} == {None}
    assert count.choices == []
    assert (count.usage.prompt_tokens, count.usage.completion_tokens) == (5, 40)
    kinds = {(chunk.id, chunk.object) for chunk in (first, *pieces, last, count)}
    assert kinds == {(first.id, "chat.completion.chunk")}
    raw = server.post("/v1/chat/completions", server.chat(max_tokens=5, stream=True))
    assert all("usage" not in chunk for chunk in events(raw))


def acceptance(documents: list[Any]) -> Any:
    """The values that AIPerf 0.13 (`spec_decode/vllm_adapter.py`) reads in a response, with its checks."""
    (found,) = [told for one in documents if (told := (one.get("metrics") or {}).get("speculative_decoding"))]
    histogram, num_steps = found["acceptance_histogram"], found["num_spec_steps"]
    assert all(type(count) is int for count in histogram)
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert sum(histogram) == num_steps
    assert sum(j * count for j, count in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]
    accepted, drafted = found["num_accepted_draft_tokens"], found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + (accepted / num_steps if num_steps else 0.0)
    assert found["draft_acceptance_rate"] == (accepted / drafted if drafted else 0.0)
    return found


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_acceptance_is_told_once_where_benchmark_clients_look_for_it(server: Running, route: str) -> None:
    body = server.chat(max_tokens=20, n=2)
    if route == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    assert acceptance([server.post(route, body).json()])["num_accepted_draft_tokens"] > 0
    assert acceptance([server.post(route, {**body, "mode": "autoregressive"}).json()])["num_spec_steps"] == 0
    chunks = events(server.post(route, {**body, "stream": True}))
    assert acceptance([chunks[-1]]) == acceptance(chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    chunks = events(server.post(route, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert acceptance([chunks[-1]]) == acceptance(chunks)
    assert chunks[-1]["choices"] == []
    assert "speculative_decoding" not in chunks[-1]["usage"]["metrics"]


def test_a_completion_is_of_one_prompt_or_of_several_as_text_or_as_token_ids(client: OpenAI) -> None:
    prompts: list[Any] = [TEXT, list(PROMPT), [TEXT, TEXT], [list(PROMPT)] * 2]
    for number, prompt in zip((1, 1, 2, 2), prompts, strict=True):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, temperature=0)
        assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
        assert [(choice.index, choice.text) for choice in answer.choices] == [(i, ANSWER[:9]) for i in range(number)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 * number, 9 * number)
    found: dict[int, str] = {0: "", 1: ""}
    for chunk in client.completions.create(model=MODEL, prompt=prompts[-1], max_tokens=9, temperature=0, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert [*found.values()] == [ANSWER[:9]] * 2


def sampled(client: OpenAI, **options: Any) -> Any:
    fields = {"temperature": 1.0, "max_tokens": 12, **options}
    return client.chat.completions.create(model=MODEL, messages=[USER], **fields)


def texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def test_a_seed_repeats_an_answer_and_the_next_choice_has_the_next_seed(client: OpenAI) -> None:
    both = sampled(client, seed=7, n=2)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert texts(both) == texts(sampled(client, seed=7)) + texts(sampled(client, seed=8))
    assert texts(both) == texts(sampled(client, seed=7, n=2, extra_body={"mode": "autoregressive"}))
    assert len({*texts(both)}) == 2
    drawn = sampled(client)  # the request has no seed, so the response names one
    assert texts(drawn) == texts(sampled(client, seed=drawn.seed))
    assert both.usage.completion_tokens == 24
    assert both.usage.prompt_tokens == 5


def test_each_token_says_who_was_first_to_say_it(client: OpenAI) -> None:
    fields: Any = {"temperature": 0, "max_tokens": 40, "extra_body": {"token_sources": True}}
    told = sampled(client, **fields).choices[0].tokens
    assert "".join(entry["text"] for entry in told) == ANSWER[:40]
    assert {"candidate", "target"} <= {entry["source"] for entry in told}
    chunks = [chunk.choices[0] for chunk in sampled(client, stream=True, **fields)]
    pieces = [entry for choice in chunks for entry in getattr(choice, "tokens", None) or ()]
    assert "".join(entry["text"] for entry in pieces) == ANSWER[:40]


def test_health_and_figures_say_what_was_done(server: Running, client: OpenAI) -> None:
    before = server.figures()
    sampled(client, n=2, max_tokens=10, temperature=0)
    whole = "vllm:e2e_request_latency_seconds_count{}"  # counted after the last byte
    until(lambda: server.figures().get(whole, 0) > before.get(whole, 0))
    health = server.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["draft"]) == (200, "ok", "present")
    after = server.figures()
    added = {name: after[name] - before.get(name, 0) for name in after}
    assert added["vllm:generation_tokens_total{}"] == 20
    assert added["vllm:prompt_tokens_total{}"] == 10
    assert added['vllm:request_success_total{finished_reason="length",}'] == 2
    assert added["vllm:time_to_first_token_seconds_count{}"] == 2
    assert added[whole] == 1
    assert added["vllm:inter_token_latency_seconds_count{}"] > 0
    accepted, judged = (added[f"vllm:spec_decode_num_{what}_tokens_total{{}}"] for what in ("accepted", "draft"))
    place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert sum(number for name, number in added.items() if name.startswith(place)) == accepted
    assert 0 < accepted <= judged
    assert (after["vllm:num_requests_running{}"], after["vllm:num_requests_waiting{}"]) == (0, 0)
    assert after["amusd:draft_present{}"] == 1


def test_a_key_is_asked_for_where_there_is_one() -> None:
    with serving(plain_engine(), mode="autoregressive", api_key="right") as server:
        for key in ("wrong", "righ", "rights"):
            with server.client(api_key=key) as client, pytest.raises(AuthenticationError) as refused:
                client.models.list()
            assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
        assert server.get("/metrics").headers["www-authenticate"] == "Bearer"
        assert server.get("/health").status_code == 200
        policy = server.get("/").headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        with server.client(api_key="right") as client:
            assert texts(sampled(client, temperature=0)) == [ANSWER[:12]]


def test_a_server_on_loopback_answers_to_its_own_names_alone() -> None:
    with serving(plain_engine(), mode="autoregressive", allowed_hosts=("Proxy.Example",)) as server:
        for host in ("localhost", "a.LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "proxy.example:80"):
            assert server.get("/health", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "["):
            refused = server.get("/v1/models", headers={"Host": host})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed"), host
    with serving(plain_engine(), mode="autoregressive", host="0.0.0.0") as server:
        assert server.get("/health", headers={"Host": "any.example"}).status_code == 200


def test_a_full_queue_is_told_and_answers_go_on() -> None:
    running = serving(plain_engine(max_num_seqs=1), mode="autoregressive", max_queue=1)
    with running as server, server.client() as client, ThreadPoolExecutor(2) as threads:
        with closing(Paused(server)):
            asked = [threads.submit(sampled, client, temperature=0, max_tokens=LONG) for _ in range(2)]
            until(lambda: server.get("/health").json()["num_requests_waiting"] == 1)
            with pytest.raises(RateLimitError) as refused:
                sampled(client)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "queue_full"
        assert [texts(answer.result(SECONDS)) for answer in asked] == [[ANSWER[:LONG]]] * 2
        assert texts(sampled(client, temperature=0)) == [ANSWER[:12]]


class Failing(Policy):
    """A policy of the operator's own, with a bug."""

    def decide(self, view: TargetView) -> Decision:
        raise KeyError("typo")


def failing(_decoding: DecodingConfig, *, can_branch: bool) -> Policy:
    return Failing()


def test_a_mistake_of_the_operators_own_policy_is_no_mistake_of_the_client() -> None:
    factories = {"oracle": oracle(LONG, right_with_probability(0.9, 1))}
    with pair(factories) as (engine, _), serving(engine, policy=f"{__name__}:failing") as server:
        with server.client() as client, pytest.raises(APIStatusError) as failed:
            sampled(client)
        assert (failed.value.status_code, failed.value.code) == (500, "engine_failed")
        assert any("raises KeyError" in line for line in server.lines)


def test_however_many_ask_for_health_one_token_at_a_time_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work: list[int] = []

    async def generate(*_arguments: Any, **_options: Any) -> None:
        at_work.append(1)
        await asyncio.sleep(0)
        assert at_work == [1]
        at_work.clear()

    async def ask() -> list[tuple[int, Any]]:
        return await asyncio.gather(*(service.health() for _ in range(3)))

    with serving(plain_engine(), mode="autoregressive") as server:
        service = server.service
        service.failed_at = service.engine.engine.worker.counts.num_tokens
        monkeypatch.setattr(service.engine, "generate", generate)
        assert [status for status, _ in asyncio.run(ask())] == [200] * 3


def test_after_a_failure_health_waits_for_a_token_and_for_no_place() -> None:
    engine = plain_engine(max_num_seqs=1)
    running = serving(engine, mode="autoregressive")
    with running as server, server.client() as client, ThreadPoolExecutor(2) as threads:
        run = engine.worker.model.run
        engine.worker.model.run = Mock(side_effect=RuntimeError)  # type: ignore[method-assign]
        with pytest.raises(APIStatusError):
            sampled(client)
        engine.worker.model.run = run  # type: ignore[method-assign]
        with closing(Paused(server)) as passes:
            answer = threads.submit(sampled, client, temperature=0)
            passes.arrived()  # it has the only place, and no token yet
            health = threads.submit(server.get, "/health", timeout=10.0)
            until(lambda: engine.scheduler.num_waiting == 1)
            passes.go_on()
            passes.arrived()
            assert health.result(SECONDS).status_code == 200
        assert texts(answer.result(SECONDS)) == [ANSWER[:12]]


def test_an_engine_that_fails_is_told_and_found_by_health() -> None:
    engine = plain_engine()
    with serving(engine, mode="autoregressive") as server, server.client() as client:
        model = engine.worker.model
        run = model.run
        model.run = Mock(side_effect=RuntimeError("secret: the device is gone"))  # type: ignore[method-assign]
        with pytest.raises(APIStatusError) as failed:
            sampled(client)
        assert (failed.value.status_code, failed.value.code) == (500, "engine_failed")
        (line,) = server.lines
        assert line.startswith("an answer failed: RuntimeError in ")
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failing: RuntimeError")
        stream = server.post("/v1/chat/completions", server.chat(stream=True))
        assert events(stream)[-1]["error"]["code"] == "engine_failed"
        assert "secret" not in stream.text + "".join(server.lines)
        whole = "vllm:e2e_request_latency_seconds_count{}"
        until(lambda: server.num_aborted + server.figures()[whole] == 2)
        assert server.num_aborted == 2
        model.run = run  # type: ignore[method-assign]
        assert server.get("/health").status_code == 200
        assert texts(sampled(client, temperature=0)) == [ANSWER[:12]]
