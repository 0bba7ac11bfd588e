"""Tokens to the objects and chunks of OpenAI's protocol. Pure: dictionaries come out, nothing is sent here.

A stream is `opening`, any number of `piece`, `closing` of each choice, and `usage_chunk` where it is asked for; `whole`
has the same in one object. A piece has all tokens that became readable together; one without text waits for the next.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from amusd.answer import Generation, Token
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

    waiting: list[Token] = field(default_factory=list)
    """Tokens that have shown no text."""
    num_characters: int = 0
    """Length of the text so far: the next token begins there."""


class Writer:
    """Writes the answer to one request. `text_of` gives the text of a token id."""

    def __init__(
        self,
        plan: Plan,
        *,
        identity: str,
        created: int,
        model: str,
        fingerprint: str,
        text_of: Callable[[int], str],
    ) -> None:
        self._plan = plan
        self._text_of = functools.lru_cache(maxsize=1 << 12)(text_of)
        kind = "chat.completion" if plan.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if plan.is_chat else 'cmpl'}-{identity}",
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": plan.params.seed,
        }
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

    def usage_chunk(self, num_prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, Any]:
        """The chunk behind all choices."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": usage(num_prompt_tokens, generations)}

    # One object

    def whole(
        self,
        num_prompt_tokens: int,
        answers: Sequence[tuple[Sequence[Token], Generation]],
    ) -> dict[str, Any]:
        """The answer that is not streamed: of each choice its tokens and what it came to."""
        choices = []
        for index, (tokens, generation) in enumerate(answers):
            choice: dict[str, Any] = {"index": index, "finish_reason": FINISH_REASONS[generation.finish_reason]}
            if self._plan.is_chat:
                choice["message"] = {"role": "assistant", "content": generation.text, "refusal": None}
                choice["logprobs"] = self._chat_logprobs(tokens)
            else:
                choice["text"] = generation.text
                choice["logprobs"] = self._text_logprobs(index, tokens)
            if self._plan.token_sources:
                choice["tokens"] = _sources(tokens)
            choices.append(choice)
        generations = [generation for _, generation in answers]
        return {**self._head, "choices": choices, "usage": usage(num_prompt_tokens, generations)}

    # Their parts

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._plan.is_chat else "text_completion"

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._chunk_kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._plan.includes_usage else chunk

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _next_piece(self, index: int, choice: _Choice) -> dict[str, Any]:
        """The chunk for the tokens that waited."""
        tokens, choice.waiting = choice.waiting, []
        text = "".join(token.text for token in tokens)
        if self._plan.is_chat:
            piece = self._delta(index, {"content": text}) | {"logprobs": self._chat_logprobs(tokens)}
        else:
            logprobs = self._text_logprobs(index, tokens)
            piece = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if self._plan.token_sources:
            piece["tokens"] = _sources(tokens)
        return piece

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._plan.top_logprobs is None:
            return None
        content = []
        for token in tokens:
            top = [self._entry(token_id, logprob) for token_id, logprob in token.top_logprobs]
            content.append({**self._entry(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        """One token; `bytes` is None where it is only part of a character."""
        text = self._text_of(token_id)
        is_whole = "\ufffd" not in text
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}

    def _text_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._plan.top_logprobs is None:
            return None
        token_ids = [token.token_id for token in tokens]
        logprobs = [token.logprob for token in tokens]
        return self._text_logprobs_of(
            self._choice(index), token_ids, logprobs, [token.top_logprobs for token in tokens]
        )

    def _text_logprobs_of(
        self,
        choice: _Choice,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Iterable[tuple[int, float]]],
    ) -> dict[str, Any]:
        texts = [self._text_of(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(choice.num_characters)
            choice.num_characters += len(text)
        found = []
        for position, logprob in enumerate(logprobs):
            top = {self._text_of(token_id): _finite(value) for token_id, value in (tops[position] if tops else ())}
            if logprob is not None:  # the token itself is always there, as in OpenAI's protocol
                top.setdefault(texts[position], _finite(logprob))
            found.append(None if logprob is None else top)
        return {
            "tokens": texts,
            "token_logprobs": [*map(_finite, logprobs)],
            "top_logprobs": found,
            "text_offset": offsets,
        }


def usage(num_prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of the request, each prompt counted once, and what speculative decoding did, summed over its answers."""
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
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


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def _sources(tokens: Sequence[Token]) -> list[dict[str, str]]:
    return [{"text": token.text, "source": token.source.value} for token in tokens]
