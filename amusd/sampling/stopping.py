"""Finds the end of an answer (end-of-sequence, stop string, length), and the text that can be shown.

At one token end-of-sequence wins over a stop string, and both over the length. Text is cut before a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from amusd.types import FinishReason, TokenSource, TopLogprobs


@dataclass(frozen=True, slots=True)
class Emission:
    """The addition of a block of committed tokens to the answer."""

    token_ids: tuple[int, ...]
    """Those up to the one that ended the answer, or all."""
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    sources: tuple[TokenSource, ...] = ()


@dataclass
class StopChecker:
    """Finds the first token that ends one answer."""

    eos_token_ids: Collection[int]
    stop: tuple[str, ...]
    max_new_tokens: int
    push_text: Callable[[int], str]
    """Gives the text that a token adds; used only with stop strings."""
    _num_tokens: int = 0
    _text: str = ""

    def push(self, token_ids: Iterable[int]) -> Emission:
        """Take in committed tokens; drops what follows the end."""
        kept: list[int] = []
        reason = None
        for token_id in token_ids:
            kept.append(token_id)
            reason = self._check(token_id)
            if reason is not None:
                break
        return Emission(tuple(kept), reason)

    def _check(self, token_id: int) -> FinishReason | None:
        self._num_tokens += 1
        if token_id in self.eos_token_ids:
            return FinishReason.EOS
        if self.stop and self._completes_stop(self.push_text(token_id)):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._num_tokens >= self.max_new_tokens else None

    def _completes_stop(self, new_text: str) -> bool:
        # Only as much of the old text matters as a stop string that ends in the new one can reach back.
        reach = max(len(stop) for stop in self.stop) - 1
        self._text = self._text[max(0, len(self._text) - reach) :] + new_text
        return any(stop in self._text for stop in self.stop)


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` before the earliest stop string, or all of it."""
    return text[: min((index for string in stop if (index := text.find(string)) >= 0), default=len(text))]


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """How many last characters of `text` may begin a stop string."""
    beginnings = (string[:length] for string in stop for length in range(1, len(string)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


class AnswerText:
    """Collects an answer's text, and holds back what could begin a stop string."""

    def __init__(self, push: Callable[[int], str], flush: Callable[[], str], stop: tuple[str, ...]) -> None:
        """`push`, `flush`: of an incremental decoder."""
        self._push, self._flush, self._stop = push, flush, stop
        self._held = ""
        self.text = ""

    def push(self, token_id: int) -> str:
        """The text that can be shown now."""
        self._held += self._push(token_id)
        number = len(self._held) - held_back(self._held, self._stop)
        return self._give(min(number, len(cut_at_stop(self._held, self._stop))))

    def finish(self, reason: FinishReason) -> str:
        """The rest, cut before the stop string that ended the answer if one did."""
        self._held += self._flush()
        if reason is FinishReason.STOP:
            self._held = cut_at_stop(self._held, self._stop)
        return self._give(len(self._held))

    def _give(self, number: int) -> str:
        given, self._held = self._held[:number], self._held[number:]
        self.text += given
        return given
