"""Finds the end of an answer (end-of-sequence, stop string, length), and the text that can be shown.

At one token end-of-sequence wins over a stop string, and both over the length. Text is cut before a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from amusd.types import FinishReason


@dataclass
class StopChecker:
    """Finds the token that ends one answer, and holds back text that could begin a stop string."""

    eos_token_ids: Collection[int]
    stop: tuple[str, ...]
    max_new_tokens: int
    push_text: Callable[[int], str]
    """Gives the text that a token adds."""
    flush_text: Callable[[], str] = str
    """Gives the text left at the end."""
    _num_tokens: int = 0
    _held: str = ""

    def push(self, token_ids: Iterable[int]) -> tuple[list[str], FinishReason | None]:
        """Take in committed tokens, up to one that ends the answer; return what to show with each, and why it ends."""
        texts: list[str] = []
        reason = None
        for token_id in token_ids:
            self._num_tokens += 1
            self._held += self.push_text(token_id)
            reason = self._reason(token_id)
            if reason is not None:
                self._held += self.flush_text()
                texts.append(cut_at_stop(self._held, self.stop) if reason == "stop" else self._held)
                break
            number = len(self._held) - held_back(self._held, self.stop)
            texts.append(self._held[:number])
            self._held = self._held[number:]
        return texts, reason

    def _reason(self, token_id: int) -> FinishReason | None:
        if token_id in self.eos_token_ids:
            return "eos"
        if any(string in self._held for string in self.stop):
            return "stop"
        return "length" if self._num_tokens >= self.max_new_tokens else None


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` before the earliest stop string, or all of it."""
    return text[: min((index for string in stop if (index := text.find(string)) >= 0), default=len(text))]


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """Number of last characters of `text` that may begin a stop string."""
    ends = (text[start:] for start in range(len(text)))  # the longest first, which mostly matches
    return next((len(end) for end in ends if any(string.startswith(end) for string in stop)), 0)
