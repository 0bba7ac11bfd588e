"""Finds the end of an answer (end-of-sequence, stop string, length), and the text that can be shown.

At one token end-of-sequence wins over a stop string, and both over the length. Text is cut before a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

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
    """Finds the first token that ends one answer, and the text that can be shown."""

    eos_token_ids: Collection[int]
    stop: tuple[str, ...]
    max_new_tokens: int
    push_text: Callable[[int], str]
    """Gives the text that a token adds."""
    flush_text: Callable[[], str] = str
    """Gives the text that still lacks a token."""
    text: str = ""
    """What was shown."""
    _num_tokens: int = 0
    _pieces: deque[str] = field(default_factory=deque)  # of tokens that `show` has not been asked for
    _held: str = ""

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

    def show(self, token_id: int, reason: FinishReason | None) -> str:
        """The text that can be shown with the next token that `push` kept; `reason`: with the last one."""
        self._held += self._pieces.popleft() if self.stop else self.push_text(token_id)
        if reason is not None:
            self._held += self.flush_text()
        number = len(self._held) - (held_back(self._held, self.stop) if reason is None else 0)
        if reason in (None, FinishReason.STOP):
            number = min(number, len(cut_at_stop(self._held, self.stop)))
        shown, self._held = self._held[:number], self._held[number:]
        self.text += shown
        return shown

    def _check(self, token_id: int) -> FinishReason | None:
        self._num_tokens += 1
        completes_stop = False
        if self.stop:  # without, text can wait until the draft knows of the tokens
            self._pieces.append(self.push_text(token_id))
            unseen = "".join((self._held, *self._pieces))
            completes_stop = any(stop in unseen for stop in self.stop)
        if token_id in self.eos_token_ids:
            return FinishReason.EOS
        if completes_stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._num_tokens >= self.max_new_tokens else None


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` before the earliest stop string, or all of it."""
    return text[: min((index for string in stop if (index := text.find(string)) >= 0), default=len(text))]


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """How many last characters of `text` may begin a stop string."""
    beginnings = (string[:length] for string in stop for length in range(1, len(string)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
