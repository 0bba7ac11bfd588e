"""From tokens to the objects and chunks of OpenAI's protocol. No I/O.

A stream is `opening` and any number of `more`; `whole` is the answer in one object. Tokens without text are sent with
the next text. `metrics.speculative_decoding` is at the root of `whole` and of a stream's last chunk, where benchmark
clients look for it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from amusd import __version__
from amusd.answer import Generation
from amusd.checkpoints.tokenizer import IncrementalDecoder, Spelling
from amusd.serving.requests import Body
from amusd.tracing.metrics import total
from amusd.types import Token

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def encoded(document: dict[str, Any]) -> bytes:
    """A document as JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encoded(document)


class Writer:
    """Writes the answer to one request. `decoders`: one for each choice."""

    def __init__(
        self, body: Body, decoders: Sequence[IncrementalDecoder], *, model: str, seed: int, num_prompt_tokens: int
    ) -> None:
        self._request, self._is_chat = body, body.is_chat
        self._num_prompt_tokens = num_prompt_tokens
        self._decoders = decoders
        self._waiting: list[list[Token]] = [[] for _ in decoders]
        self._num_characters = [0] * len(decoders)
        self._ended: dict[int, Generation] = {}
        self._tells_all = body.alternatives is not None or body.token_sources
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"amusd-{__version__}",
            "seed": seed,
        }

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of each chat choice, with the role."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(i, said)]) for i in range(len(self._decoders) if self._is_chat else 0)]

    def more(self, index: int, tokens: Sequence[Token], generation: Generation | None = None) -> list[dict[str, Any]]:
        """Chunks of new tokens, and of the end of a choice; after the last choice the usage, if asked for."""
        waiting, chunks = [*self._waiting[index], *tokens], []
        ends_untold = generation is not None and self._tells_all
        if any(token.text for token in waiting) or (waiting and ends_untold):
            text = "".join(token.text for token in waiting)
            said: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
            chunks.append(self._chunk([self._choice(index, said, waiting)]))
            waiting = []
        self._waiting[index] = waiting
        if generation is not None:
            self._ended[index] = generation
            said = {"delta": {}} if self._is_chat else {"text": ""}
            chunks.append(self._chunk([self._choice(index, said, generation=generation)]))
            if len(self._ended) == len(self._decoders):
                totals = self._totals()
                chunks += [self._chunk([]) | totals] if self._request.stream_options.get("include_usage") else []
                chunks[-1]["metrics"] = totals["metrics"]
        return chunks

    def whole(self, answers: Sequence[tuple[Sequence[Token], Generation]]) -> dict[str, Any]:
        """The whole answer as one object."""
        choices = []
        for index, (tokens, generation) in enumerate(answers):
            message = {"role": "assistant", "content": generation.text, "refusal": None}
            said = {"message": message} if self._is_chat else {"text": generation.text}
            choices.append(self._choice(index, said, tokens, generation))
            self._ended[index] = generation
        return {**self._head, "choices": choices, **self._totals()}

    def _totals(self) -> dict[str, Any]:
        """`usage`, which counts each prompt once, and `metrics`, summed over the choices."""
        generations = [self._ended[index] for index in range(len(self._decoders))]
        metrics = total([generation.metrics for generation in generations])
        num_tokens = sum(len(generation.token_ids) for generation in generations)
        firsts = [generation.metrics for generation in generations[:: self._request.n]]
        figures = metrics.as_dict()
        speculative = figures.pop("speculative_decoding")
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(metrics.num_cached_tokens for metrics in firsts)},
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
            "metrics": {**figures, "seconds": metrics.total_ns / 1e9},
        }
        return {"usage": usage, "metrics": {"speculative_decoding": speculative}}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._request.stream_options.get("include_usage") else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _choice(
        self, index: int, said: dict[str, Any], tokens: Sequence[Token] = (), generation: Generation | None = None
    ) -> dict[str, Any]:
        reason = None if generation is None else FINISH_REASONS[generation.finish_reason]
        tells_logprobs = tokens and self._request.alternatives is not None
        logprobs = self._logprobs(index, tokens) if tells_logprobs else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        if self._request.token_sources and tokens:
            choice["tokens"] = [{"text": token.text, "source": token.source} for token in tokens]
        return choice

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        offsets: list[int] = []
        decoder = self._decoders[index]
        for token in tokens:
            spelling = decoder.spell(token.token_id)
            top = [_entry(decoder.spell(token_id), logprob) for token_id, logprob in token.top_logprobs]
            entries.append({**_entry(spelling, token.logprob), "top_logprobs": top})
            offsets.append(self._num_characters[index])
            self._num_characters[index] += spelling.num_characters
            decoder.push(token.token_id)
        if self._is_chat:
            return {"content": entries, "refusal": None}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_by_label([*entry["top_logprobs"], entry]) for entry in entries],
            "text_offset": offsets,
        }


def _entry(spelling: Spelling, logprob: float | None) -> dict[str, Any]:
    utf8 = None if spelling.utf8 is None else list(spelling.utf8)
    known = None if logprob is None else max(logprob, LEAST_LOGPROB)
    return {"token": spelling.label, "logprob": known, "bytes": utf8}


def _by_label(entries: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    return {entry["token"]: entry["logprob"] for entry in reversed(entries)}
