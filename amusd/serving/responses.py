"""Tokens to the objects and chunks of OpenAI's protocol. Pure: dictionaries come out, nothing is sent here.

A stream is `opening`, any number of `piece`, `closing` of each choice, and `usage_chunk` where it is asked for; `whole`
has the same in one object. A piece has all tokens that became readable together; one without text waits for the next.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from amusd import __version__
from amusd.answer import Generation, Token
from amusd.models.tokenizer import IncrementalDecoder, Spelling
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
    """Writes the answer to one request. `make_decoder` makes the decoder of a choice, behind its prompt."""

    def __init__(
        self, plan: Plan, *, model: str, num_prompt_tokens: int, make_decoder: Callable[[int], IncrementalDecoder]
    ) -> None:
        self._plan = plan
        self._make_decoder = make_decoder
        self.num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._head = {
            "id": f"{'chatcmpl' if plan.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if plan.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"amusd-{__version__}",
            "seed": plan.params.seed,
        }
        self._chunk_head = self._head | {"object": "chat.completion.chunk" if plan.is_chat else "text_completion"}
        self._choices: dict[int, _Choice] = {}

    # A stream

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of each choice of a chat, which has the role."""
        if not self._plan.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(self._delta(index, delta)) for index in range(self._plan.num_choices)]

    def piece(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """The chunk of tokens that became readable together; None while they show no text."""
        choice = self._choice(index)
        choice.waiting += tokens
        self._num_tokens += len(tokens)
        if not any(token.text for token in choice.waiting):
            return None
        return self._chunk(self._next_piece(index, choice))

    def closing(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        """The last chunk of a choice; before it one with the tokens that have shown no text, if they are asked for."""
        choice = self._choice(index)
        chunks = []
        if choice.waiting and (self._plan.top_logprobs is not None or self._plan.token_sources):
            chunks.append(self._chunk(self._next_piece(index, choice)))
        reason = FINISH_REASONS[generation.finish_reason]
        last = self._delta(index, {}) if self._plan.is_chat else {"index": index, "text": "", "logprobs": None}
        return [*chunks, self._chunk(last | {"finish_reason": reason})]

    def usage_chunk(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The chunk behind all choices."""
        return {**self._chunk_head, "choices": [], "usage": usage(self.num_prompt_tokens, generations)}

    # One object

    def whole(self, answers: Sequence[tuple[Sequence[Token], Generation]]) -> dict[str, Any]:
        """The answer that is not streamed: of each choice its tokens and what it came to."""
        choices = []
        for index, (tokens, generation) in enumerate(answers):
            choice: dict[str, Any] = {"index": index, "finish_reason": FINISH_REASONS[generation.finish_reason]}
            if self._plan.is_chat:
                choice["message"] = {"role": "assistant", "content": generation.text, "refusal": None}
                choice["logprobs"] = self._chat_logprobs(index, tokens)
            else:
                choice["text"] = generation.text
                choice["logprobs"] = self._text_logprobs(index, tokens)
            if self._plan.token_sources:
                choice["tokens"] = _sources(tokens)
            choices.append(choice)
        generations = [generation for _, generation in answers]
        return {**self._head, "choices": choices, "usage": usage(self.num_prompt_tokens, generations)}

    # Their parts

    def _choice(self, index: int) -> _Choice:
        if index not in self._choices:
            self._choices[index] = _Choice(self._make_decoder(index))
        return self._choices[index]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._plan.counts_on:
            return {**chunk, "usage": _counts(self.num_prompt_tokens, self._num_tokens)}
        return {**chunk, "usage": None} if self._plan.includes_usage else chunk

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _next_piece(self, index: int, choice: _Choice) -> dict[str, Any]:
        """The chunk for the tokens that waited."""
        tokens, choice.waiting = choice.waiting, []
        text = "".join(token.text for token in tokens)
        if self._plan.is_chat:
            piece = self._delta(index, {"content": text}) | {"logprobs": self._chat_logprobs(index, tokens)}
        else:
            logprobs = self._text_logprobs(index, tokens)
            piece = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if self._plan.token_sources:
            piece["tokens"] = _sources(tokens)
        return piece

    def _chat_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._plan.top_logprobs is None:
            return None
        decoder = self._choice(index).decoder
        content = []
        for token in tokens:
            top = [_entry(decoder.spell(token_id), logprob) for token_id, logprob in token.top_logprobs]
            content.append({**_entry(decoder.spell(token.token_id), token.logprob), "top_logprobs": top})
            decoder.push(token.token_id)
        return {"content": content, "refusal": None}

    def _text_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._plan.top_logprobs is None:
            return None
        choice = self._choice(index)
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            own = choice.decoder.spell(token.token_id)
            top: dict[str, float | None] = {}
            for token_id, logprob in (*token.top_logprobs, (token.token_id, token.logprob)):  # it is always there
                top.setdefault(choice.decoder.spell(token_id).label, _finite(logprob))  # of equal labels the likelier
            found["tokens"].append(own.label)
            found["token_logprobs"].append(_finite(token.logprob))
            found["top_logprobs"].append(top)
            found["text_offset"].append(choice.num_characters)
            choice.num_characters += own.num_characters
            choice.decoder.push(token.token_id)
        return found


def _entry(spelling: Spelling, logprob: float | None) -> dict[str, Any]:
    """One token of a chat."""
    utf8 = None if spelling.utf8 is None else list(spelling.utf8)
    return {"token": spelling.label, "logprob": _finite(logprob), "bytes": utf8}


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


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def _sources(tokens: Sequence[Token]) -> list[dict[str, str]]:
    return [{"text": token.text, "source": token.source.value} for token in tokens]
