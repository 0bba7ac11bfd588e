"""The pure part: a body is a plan or a named mistake, a stream adds up to the answer, listeners hear of every event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, get_args

import pytest
from checkpoints.published_tokenizers import ids_of, sentencepiece_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from table_model import TableTokenizer
from tracing.runs import made

from amusd.answer import Generation
from amusd.checkpoints.tokenizer import IncrementalDecoder, Tokenizer
from amusd.config import SamplingParams
from amusd.serving import requests, timeline
from amusd.serving.requests import Body, ChatRequest, CompletionRequest, RequestError, sampling_params
from amusd.serving.responses import Writer, event
from amusd.serving.timeline import lines_of, listen
from amusd.tracing.metrics import GenerationMetrics
from amusd.tracing.recorder import Recorder
from amusd.types import Token, TokenSource

VOCAB_SIZE = 50
CHAT_FIELDS, TEXT_FIELDS = ([*model.__struct_fields__] for model in (ChatRequest, CompletionRequest))

ODD: list[Any] = [None, True, 0, 1, -1, 2**70, 0.5, 1e9, -0.1]
ODD += ["", "a", "5", "stop", "text", "auto", "none", "synchronous", [], {}, {"role": "user", "content": "a"}]
ODD += [{"type": "text", "text": "a"}, {"include_usage": True}, {"5": 1.5}, {"type": "image_url"}]
values: Any = st.sampled_from(ODD) | st.lists(st.sampled_from(ODD), max_size=3)
checked = settings(max_examples=60)


def read(body: Any, is_chat: bool) -> Body:
    """A body as the server reads it. Raises `RequestError`."""
    return requests.read(ChatRequest if is_chat else CompletionRequest, json.dumps(body).encode())


def params_of(body: Any, is_chat: bool) -> SamplingParams:
    return sampling_params(read(body, is_chat), 400)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}


@checked
@given(st.booleans(), st.dictionaries(st.sampled_from([*CHAT_FIELDS, *TEXT_FIELDS, "other"]), values, max_size=4))
@example(is_chat=False, fields={"max_completion_tokens": 2**70})
def test_any_body_is_a_plan_or_a_mistake_of_a_named_field(is_chat: bool, fields: dict[str, Any]) -> None:
    base = chat() if is_chat else {"model": "m", "prompt": "a"}
    mistake = None
    try:
        params_of({**base, **fields}, is_chat)
    except RequestError as error:
        mistake = error
    if mistake is not None:
        assert (mistake.status, (mistake.param or "").split(".")[0] in {*fields, *base}) == (400, True)
        json.dumps(mistake.body)


def test_every_field_reaches_the_engine_under_its_name() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5}
    sampling |= {"frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 2**63 - 1, "ignore_eos": True}
    rest = {"logit_bias": {"5": -100}, "n": 2, "max_completion_tokens": 7, "min_tokens": 7, "mode": "synchronous"}
    params = params_of(chat(**sampling, **rest, logprobs=True, top_logprobs=3), is_chat=True)
    assert {name: getattr(params, name) for name in sampling} == sampling
    assert (params.logit_bias, params.stop, params.max_new_tokens) == (((5, -100.0),), (), 7)
    assert (params.logprobs, params.top_logprobs) == (True, 3)
    odd = params_of({"prompt": "a", "top_k": -1, "top_p": 0, "stop": "b"}, is_chat=False)
    assert (odd.top_k, odd.stop, 0 < odd.top_p < 1e-6) == (0, ("b",), True)


def test_what_is_left_out_is_as_in_openais_protocol() -> None:
    params = params_of(chat(), is_chat=True)
    assert (params.temperature, params.top_p, params.max_new_tokens, params.stop) == (1.0, 1.0, 400, ())
    assert params_of({"model": "m", "prompt": "a"}, is_chat=False).max_new_tokens == 16
    assert len({params_of(chat(), is_chat=True).seed for _ in range(3)}) > 1


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"role": "user", "content": "a", "name": "Ann", "type": "text"}, {"content": "a", "name": "Ann"}),
        ({"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}, {"role": "system", "content": "a\na"}),
        ({"role": "assistant", "content": None, "refusal": "no", "tool_calls": []}, {"content": ""}),
    ],
)
def test_a_turn_reaches_the_template(message: dict[str, Any], turn: dict[str, Any]) -> None:
    assert read(chat(messages=[message]), is_chat=True).prompts == [[{"role": message["role"]} | turn]]


# An answer of single characters; None shows no text

tokens = st.lists(st.sampled_from(["a", "bc", "", "é"]), min_size=1, max_size=12)
cuts = st.lists(st.integers(1, 4), min_size=1)


def answered(shown: list[str]) -> tuple[list[Token], Generation]:
    found = [
        Token(i % 9, text, -float(i + 1), ((i % 9, -float(i + 1)), (10, -50.0)), get_args(TokenSource)[i % 3])
        for i, text in enumerate(shown)
    ]
    generation = Generation(
        text="".join(shown), token_ids=tuple(token.token_id for token in found), finish_reason="eos", sequence_id=1,
        mode="asynchronous", policy="chain", drafter="ngram", seed=0, metrics=GenerationMetrics(num_tokens=len(shown)),
    )  # fmt: skip
    return found, generation


def writer(is_chat: bool, **fields: Any) -> Writer:
    base = chat() if is_chat else {"model": "m", "prompt": "pq"}
    asked = read({**base, **fields}, is_chat)
    return writer_of(asked, TableTokenizer(VOCAB_SIZE))


def writer_of(asked: ChatRequest | CompletionRequest, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> Writer:
    return Writer(asked, [IncrementalDecoder(tokenizer, prompt)], model="m", seed=0, num_prompt_tokens=3)


def streamed(out: Writer, found: list[Token], generation: Generation, widths: list[int]) -> list[dict[str, Any]]:
    chunks, begin = [], 0
    while begin < len(found):
        width = widths[len(chunks) % len(widths)]
        chunks += out.more(0, found[begin : begin + width])
        begin += width
    return [choice for chunk in (*chunks, *out.more(0, [], generation)) for choice in chunk["choices"]]


@pytest.mark.parametrize("is_chat", [True, False])
@checked
@given(shown=tokens, widths=cuts)
def test_the_pieces_of_an_answer_add_up(is_chat: bool, shown: list[str], widths: list[int]) -> None:
    fields = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    found, generation = answered(shown)
    *pieces, last = streamed(writer(is_chat, **fields, token_sources=True), found, generation, widths)
    (whole,) = writer(is_chat, **fields, token_sources=True).whole([(found, generation)])["choices"]
    texts = [piece["delta"]["content"] if is_chat else piece["text"] for piece in pieces]
    assert "".join(texts) == (whole["message"]["content"] if is_chat else whole["text"]) == "".join(shown)
    for name in ("content",) if is_chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        entries = [entry for piece in pieces for entry in piece["logprobs"][name]]
        assert entries == whole["logprobs"][name]
        assert len(entries) == len(shown)
    assert [entry for piece in pieces for entry in piece["tokens"]] == whole["tokens"]
    assert (last["delta"] if is_chat else last["text"]) in ({}, "")
    assert [piece["finish_reason"] for piece in (*pieces, last, whole)] == [None] * len(pieces) + ["stop"] * 2
    json.loads(event({"choices": pieces}).removeprefix(b"data: "))


SENTENCEPIECE = sentencepiece_tokenizer()
PROMPT_IDS = ids_of(SENTENCEPIECE, ["▁why", "▁is", "▁the"])
ALIKE = ["▁true", "<0x74>", "</s>", "<0xC3>", "t", "<0xC4>"]


def test_the_likelier_of_two_alternatives_with_the_same_text_is_shown() -> None:
    alike = tuple(zip(ids_of(SENTENCEPIECE, ALIKE), [-0.5, -1.0, -2.0, -3.0, -4.0, -5.0], strict=True))
    found = [Token(ids_of(SENTENCEPIECE, ["▁true"])[0], "", -0.5, alike)]
    asked = read({"prompt": "a", "logprobs": 6}, is_chat=False)
    out = writer_of(asked, Tokenizer(SENTENCEPIECE.backend_tokenizer), PROMPT_IDS)
    (choice,) = out.whole([(found, answered([""])[1])])["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert top == {" true": -0.5, "t": -1.0, "</s>": -2.0, "bytes:\\xc3": -3.0, "bytes:\\xc4": -5.0}


# What listeners are told of the target's events


PASS = {
    "num_candidates": 3, "num_judged": 3, "num_accepted": 1, "num_tokens": 2,
    "committed_length": 12, "num_ready": 0, "num_alternatives": 2, "num_accepted_alternatives": 0,
}  # fmt: skip


@pytest.mark.parametrize(("accepted", "ready", "told"), [(1, 0, True), (1, 2, False), (3, 0, False)])
def test_a_pass_is_told_with_its_counts_and_a_rollback_if_none_is_left(accepted: int, ready: int, told: bool) -> None:
    counts = {**PASS, "num_accepted": accepted, "num_tokens": accepted + 1, "num_ready": ready}
    done, *more = lines_of(made("target_pass", 2_000_000_000, 2_500_000_000, 7, **counts))
    times = {"begin": 2.0, "end": 2.5, "sequence": 7}
    assert done == {
        "device": "target", "kind": "pass", **times, "candidates": 3, "accepted": accepted, "tokens": accepted + 1,
        "alternatives": 2,
    }  # fmt: skip
    assert more == ([{"device": "draft", "kind": "rollback", **times, "begin": 2.5}] if told else [])


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("send", {"message": "verdict", "num_tokens": 2}, {"device": "target", "kind": "verdict", "tokens": 2}),
        ("receive", {"num_tokens": 3, "reception": "taken"}, {"candidates": 3, "taken": True}),
        ("receive", {"num_tokens": 3, "reception": "stale"}, {"candidates": 3, "taken": False}),
        ("receive", {"num_tokens": 0, "reception": "taken"}, None),
        ("send", {"message": "close"}, None),
    ],
)
def test_verdicts_and_candidates_are_told_with_their_tokens(name: Any, fields: Any, told: Any) -> None:
    event = made(name, 2_000_000_000, 2_000_000_000, 7, **{"message": "candidate", **fields})
    line = {"device": "draft", "kind": "candidates", "begin": 2.0, "end": 2.0, "sequence": 7}
    assert lines_of(event) == ([] if told is None else [{**line, **told}])


def test_a_listener_hears_what_happens_from_then_on_and_leaves_no_trace(monkeypatch: Any) -> None:
    monkeypatch.setattr(timeline, "LOOK_SECONDS", 0.0)
    recorder = Recorder("target")
    recorder.span("target_prefill", 1, 2, 1)

    async def hear() -> None:
        async with aclosing(listen(recorder, lambda: False)) as events:
            assert (await anext(events)).startswith(b":")
            recorder.span("target_prefill", 1_000_000_000, 3_000_000_000, 4)
            recorder.flush()  # as at the end of an answer: it is in the queue
            told = json.loads((await anext(events)).decode().removeprefix("data: "))
            assert told == {"device": "target", "kind": "prefill", "begin": 1.0, "end": 3.0, "sequence": 4}
            assert len(recorder.listeners) == 1

    asyncio.run(hear())
    assert recorder.listeners == ()
