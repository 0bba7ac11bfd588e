"""A server of a model with SentencePiece's tokenizer, whose first token of a text has no space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints.published_tokenizers import WORDS, ids_of, sentencepiece_tokenizer
from runtime.pair import KeepingRecorder
from serving.running import MODEL, Running, events, serving
from table_model import TableModel

from amusd.checkpoints.tokenizer import Tokenizer
from amusd.config import SamplingParams
from amusd.engine import Engine
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_worker import TargetWorker

RAW = sentencepiece_tokenizer("{% for turn in messages %}<s>{{ turn.content }}{% endfor %}")
TOKENIZER = Tokenizer(RAW.backend_tokenizer, RAW.special_tokens_map, RAW.chat_template, num_ids=len(RAW) + 6)
BIAS = dict.fromkeys((*ids_of(RAW, ["▁" + word for word in WORDS] + ["<tool>"]), len(RAW)), 100.0)
PROMPT = "why is the"
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "seed": 1, "mode": "autoregressive"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = TableModel(TOKENIZER.num_ids, seed=7, max_length=400)
    recorder = KeepingRecorder("target")
    worker = TargetWorker(model, recorder, DraftClient(recorder), 4)
    with serving(Engine(worker, TOKENIZER)) as running:
        yield running


@pytest.mark.parametrize("name", ["self", "turns", "messages", "conversations", "chat_template"])
def test_a_variable_that_is_no_templates_is_refused_by_name(server: Running, name: str) -> None:
    fields = {**FIELDS, "messages": [{"role": "user", "content": PROMPT}]}
    refused = server.post("/v1/chat/completions", {**fields, "chat_template_kwargs": {name: 1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert f"'{name}'" in refused.json()["error"]["message"]
    assert server.post("/v1/chat/completions", {**fields, "chat_template_kwargs": {"other": 1}}).status_code == 200
    assert server.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_an_answer_goes_on_after_its_prompt_also_in_logprobs(server: Running, is_chat: bool, streams: bool) -> None:
    params = SamplingParams(max_new_tokens=20, seed=1, temperature=1.0, logit_bias=BIAS)
    generation = server.engine.generate(PROMPT, params, raw=not is_chat)
    prompt_ids = server.engine.encode(PROMPT, raw=not is_chat)
    text = TOKENIZER.decode([*prompt_ids, *generation.token_ids]).removeprefix(TOKENIZER.decode(prompt_ids))
    assert text.startswith(" ")
    assert generation.text == text

    fields = {**FIELDS, "stream": streams, "logit_bias": {f"{token_id}": bias for token_id, bias in BIAS.items()}}
    if is_chat:
        fields |= {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
    else:
        fields |= {"prompt": PROMPT, "logprobs": 0}
    response = server.post("/v1/chat/completions" if is_chat else "/v1/completions", fields)
    documents = events(response) if streams else [response.json()]
    choices = [choice for document in documents for choice in document["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if is_chat:
        shown = [choice.get("delta", choice.get("message", {})).get("content") or "" for choice in choices]
        entries = [entry for part in logprobs for entry in part["content"]]
        assert b"".join(bytes(entry["bytes"] or ()) for entry in entries).decode() == text
        assert len(entries) == 20
    else:
        shown = [choice["text"] for choice in choices]
        tokens = [token for part in logprobs for token in part["tokens"]]
        offsets = [offset for part in logprobs for offset in part["text_offset"]]
        for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
            assert text[begin:end] == ("" if token in ("<tool>", f"token_id:{len(RAW)}") else token)
    assert "".join(shown) == text
