"""The text of an answer while its tokens arrive: never half a character, never a part of a stop string."""

from __future__ import annotations

from typing import Protocol

from amusd.sampling.stopping import cut_at_stop, held_back
from amusd.types import FinishReason


class Decoder(Protocol):
    """Token by token to text; `flush` gives what was waiting for more."""

    def push(self, token_id: int) -> str:
        """The text that this token adds."""
        ...

    def flush(self) -> str:
        """What is still held."""
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
        """What has been handed out so far."""
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
