"""Finds the end of an answer (end-of-sequence, stop string, length), and the part of its text that can be shown.

The target alone decides where, token by token.

At the same token end-of-sequence wins over a stop string, and both win over the length. A stop string may span any
number of tokens; the text is cut before it, the token that completed it still counts as generated. Text that could turn
out to be the beginning of a stop string is held back until that is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from amusd.types import FinishReason, TokenSource, TopLogprobs


@dataclass(frozen=True, slots=True)
class Emission:
    """The addition of a block of committed tokens to the answer."""

    token_ids: tuple[int, ...]
    """The tokens that count: all of the block, or those up to and including the one that ended the answer."""
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] = ()
    """Log-probabilities of `token_ids` under the target alone; empty unless asked for."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry for each of `token_ids`; empty unless asked for."""
    sources: tuple[TokenSource, ...] = ()
    """The source of each of `token_ids`."""


@dataclass
class StopChecker:
    """Finds the first token that ends the answer. One object per answer.

    `push_text` gives the text that a token adds (an incremental decoder); it is called only if there are stop strings.
    """

    eos_token_ids: Collection[int]
    stop: tuple[str, ...]
    max_new_tokens: int
    push_text: Callable[[int], str]
    _num_tokens: int = 0
    _text: str = field(default="")

    def push(self, token_ids: Iterable[int]) -> Emission:
        """Take in committed tokens; what follows the first one that ends the answer is dropped."""
        kept: list[int] = []
        for token_id in token_ids:
            kept.append(token_id)
            reason = self._check(token_id)
            if reason is not None:
                return Emission(tuple(kept), reason)
        return Emission(tuple(kept), None)

    def _check(self, token_id: int) -> FinishReason | None:
        self._num_tokens += 1
        if token_id in self.eos_token_ids:
            return FinishReason.EOS
        if self.stop and self._completes_stop(self.push_text(token_id)):
            return FinishReason.STOP
        if self._num_tokens >= self.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _completes_stop(self, new_text: str) -> bool:
        # Only as much of the old text matters as a stop string that ends in the new one can reach back.
        reach = max(len(stop) for stop in self.stop) - 1
        self._text = self._text[len(self._text) - min(reach, len(self._text)) :] + new_text
        return any(stop in self._text for stop in self.stop)


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` before the earliest stop string, or all of it."""
    found = [index for index in (text.find(string) for string in stop) if index >= 0]
    return text[: min(found)] if found else text


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    beginnings = (string[:length] for string in stop for length in range(1, len(string)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


class Decoder(Protocol):
    """Token by token to text; `flush` gives what was waiting for more."""

    def push(self, token_id: int) -> str:
        """The text that this token adds."""
        ...

    def flush(self) -> str:
        """The text that is still held."""
        ...


class AnswerText:
    """Collects the text; what is handed out, put together, is exactly `text` at the end."""

    def __init__(self, decoder: Decoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._text = ""
        self._num_given = 0

    @property
    def text(self) -> str:
        """The text handed out so far."""
        return self._text[: self._num_given]

    def push(self, token_id: int) -> str:
        """The text that can be shown now."""
        self._text += self._decoder.push(token_id)
        shown = len(self._text) - held_back(self._text, self._stop)
        # A stop string that is complete by now began in what is held back, or in this very token.
        pending = self._text[self._num_given :]
        return self._give(min(shown, self._num_given + len(cut_at_stop(pending, self._stop))))

    def finish(self, reason: FinishReason) -> str:
        """The rest, cut before the stop string that ended the answer if one did."""
        self._text += self._decoder.flush()
        if reason is FinishReason.STOP:
            self._text = cut_at_stop(self._text, self._stop)
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        new = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return new
