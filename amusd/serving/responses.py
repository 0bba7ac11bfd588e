"""Tokens to the objects and chunks of OpenAI's protocol. Pure: dictionaries come out, nothing is sent here.

A stream is `opening`, any number of `piece`, `closing` of each choice, and `usage_chunk` where it is asked for; `whole`
has the same in one object. A piece has all tokens that became readable together; one without text waits for the next.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amusd import __version__
from amusd.answer import Generation, Token
from amusd.models.detokenizer import IncrementalDecoder, Spelling
from amusd.serving.requests import Plan
from amusd.tracing.metrics import total
from amusd.types import FinishReason

DONE = b"data: [DONE]\n\n"
"""The end of a stream."""
LEAST_LOGPROB = -9999.0
"""The log-probability of a token that cannot come, as in OpenAI's protocol."""
FINISH_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's word for why an answer ended."""


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % json.dumps(document, separators=(",", ":")).encode()


@dataclass
class _Choice:
    """The part of one choice that was written."""

    decoder: IncrementalDecoder
    """It has taken in the prompt, and the tokens whose log-probabilities were written."""
    waiting: list[Token] = field(default_factory=list)
    """Tokens that have shown no text."""
    num_characters: int = 0
    """Length of the text of these tokens: the next one begins there."""


class Writer:
    """Writes the answer to one request. `decoders`: one for each choice, behind its prompt."""

    def __init__(
        self, plan: Plan, *, model: str, num_prompt_tokens: int, decoders: Sequence[IncrementalDecoder]
    ) -> None:
        self._request, self._is_chat = plan.request, plan.is_chat
        self.num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._choices = [_Choice(decoder) for decoder in decoders]
        self._head = {
            "id": f"{'chatcmpl' if plan.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if plan.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"amusd-{__version__}",
            "seed": plan.params.seed,
        }
        self._chunk_head = self._head | {"object": "chat.completion.chunk" if plan.is_chat else "text_completion"}

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of each choice of a chat, which has the role."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(index, said)) for index in range(len(self._choices) if self._is_chat else 0)]

    def piece(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """The chunk of tokens that became readable together; None while they show no text."""
        waiting = self._choices[index].waiting
        waiting += tokens
        self._num_tokens += len(tokens)
        return self._next_piece(index) if any(token.text for token in waiting) else None

    def closing(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        """The last chunk of a choice; before it one with the tokens that have shown no text, if they are asked for."""
        chunks = []
        tells_all = self._request.alternatives is not None or self._request.token_sources
        if self._choices[index].waiting and tells_all:
            chunks.append(self._next_piece(index))
        last = self._choice(index, {"delta": {}} if self._is_chat else {"text": ""}, generation=generation)
        return [*chunks, self._chunk(last)]

    def usage_chunk(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The chunk behind all choices."""
        return {**self._chunk_head, "choices": [], "usage": usage(self.num_prompt_tokens, generations)}

    def whole(self, answers: Sequence[tuple[Sequence[Token], Generation]]) -> dict[str, Any]:
        """The answer that is not streamed: of each choice its tokens and what it came to."""
        choices = []
        for index, (tokens, generation) in enumerate(answers):
            message = {"role": "assistant", "content": generation.text, "refusal": None}
            said = {"message": message} if self._is_chat else {"text": generation.text}
            choices.append(self._choice(index, said, tokens, generation))
        generations = [generation for _, generation in answers]
        return {**self._head, "choices": choices, "usage": usage(self.num_prompt_tokens, generations)}

    def _next_piece(self, index: int) -> dict[str, Any]:
        """The chunk for the tokens that waited."""
        tokens, self._choices[index].waiting = self._choices[index].waiting, []
        text = "".join(token.text for token in tokens)
        said = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return self._chunk(self._choice(index, said, tokens))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
        options = self._request.stream_options
        if options.include_usage:
            so_far = _counts(self.num_prompt_tokens, self._num_tokens)
            chunk["usage"] = so_far if options.continuous_usage_stats else None
        return chunk

    def _choice(
        self, index: int, said: dict[str, Any], tokens: Sequence[Token] = (), generation: Generation | None = None
    ) -> dict[str, Any]:
        """Part of a choice, or all of it: these tokens and, with a generation, why it ended."""
        reason = None if generation is None else FINISH_REASONS[generation.finish_reason]
        logprobs = self._logprobs(self._choices[index], tokens) if tokens else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        if self._request.token_sources and tokens:
            choice["tokens"] = [{"text": token.text, "source": token.source.value} for token in tokens]
        return choice

    def _logprobs(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._request.alternatives is None:
            return None
        chat: list[dict[str, Any]] = []
        text: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            spelling = choice.decoder.spell(token.token_id)
            own = _entry(spelling, token.logprob)
            top = [_entry(choice.decoder.spell(token_id), logprob) for token_id, logprob in token.top_logprobs]
            chat.append({**own, "top_logprobs": top})
            text["tokens"].append(own["token"])
            text["token_logprobs"].append(own["logprob"])
            labelled: dict[str, float | None] = {}
            for one in (*top, own):  # which is always there
                labelled.setdefault(one["token"], one["logprob"])  # of equal labels the likelier
            text["top_logprobs"].append(labelled)
            text["text_offset"].append(choice.num_characters)
            choice.num_characters += spelling.num_characters
            choice.decoder.push(token.token_id)
        return {"content": chat, "refusal": None} if self._is_chat else text


def _entry(spelling: Spelling, logprob: float | None) -> dict[str, Any]:
    """One token of a chat; JSON has no infinity."""
    utf8 = None if spelling.utf8 is None else list(spelling.utf8)
    known = None if logprob is None else max(logprob, LEAST_LOGPROB)
    return {"token": spelling.label, "logprob": known, "bytes": utf8}


def usage(num_prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of the request, each prompt counted once, and what speculative decoding did, summed over its answers."""
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    counts: dict[str, Any] = _counts(num_prompt_tokens, num_tokens)
    if generations:
        metrics = total([generation.metrics for generation in generations])
        figures = metrics.as_dict()
        told = ("time_to_first_token_ms", "tokens_per_second", "num_drafted", "num_tokens_alone", "num_draft_restarts")
        counts["metrics"] = {
            "speculative_decoding": figures["speculative_decoding"],
            "seconds": metrics.total_ns / 1e9,
            **{name: figures[name] for name in told},
        }
    return counts


def _counts(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    total_tokens = num_prompt_tokens + num_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": total_tokens}
