"""Converts a growing token sequence to text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amusd.checkpoints.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 4  # tokens of a prompt that are decoded at least
_MAX_WINDOW = 256  # tokens re-decoded at most; only text that is not UTF-8 comes near


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one token reads at its place in a text."""

    label: str
    """Its text; the name of a special or padded token; `bytes:` and the bytes of a part of a character."""
    utf8: bytes | None
    """Its bytes, which joined are those of the text; None for a special or padded token."""
    num_characters: int
    """Characters that it adds: 0 while a character is incomplete."""


class IncrementalDecoder:
    """Text of a growing token sequence, piece by piece, never half a character.

    Each token is decoded in a short window that begins with text, since some tokenizers decode a first token
    differently. Text that ends in a replacement character is held back, since the next token may complete the
    character. Text that the prompt ends with, held back, is given only if the answer completes it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: tokens before the first pushed one."""
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text has been handed out
        self._num_given = 0  # characters of that text
        self._is_holding = False
        size = _CONTEXT
        while size < len(prompt) and not tokenizer.decode(prompt[-size:]).strip(_REPLACEMENT):
            size *= 2
        self._held_by_prompt = ""
        for token_id in prompt[-size:]:
            self.push(token_id)
        self._held_by_prompt = tokenizer.decode(self._window)[self._num_given :] if self._is_holding else ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        piece = self._piece(token_id)
        self._window.append(token_id)
        self._is_holding = piece is None
        has_context = piece or len(self._window) >= _MAX_WINDOW
        if piece is None or not (has_context or self._num_read):
            return ""
        if has_context:
            del self._window[: self._num_read]
        else:  # a token without text is no context for the next one
            self._window.pop()
        self._num_read = len(self._window)
        self._num_given = len(self._tokenizer.decode(self._window))
        self._held_by_prompt = ""
        return piece

    def flush(self) -> str:
        """The text still held, such as an incomplete character."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._num_given :].removeprefix(self._held_by_prompt)
        self._num_read, self._num_given = len(self._window), len(text)
        self._held_by_prompt = ""
        return piece

    def spell(self, token_id: int) -> Spelling:
        """How a token would read if it were pushed next."""
        own = self._tokenizer.token_text(token_id)
        if isinstance(own, str):
            return Spelling(own, None, 0)
        piece = self._piece(token_id)
        if piece is None:
            return Spelling("bytes:" + repr(own)[2:-1], own, 0)
        return Spelling(piece, own if self._is_holding else piece.encode(), len(piece))

    def _piece(self, token_id: int) -> str | None:
        """The text that the token would complete; None while a character is incomplete."""
        text = self._tokenizer.decode([*self._window, token_id])
        if text.endswith(_REPLACEMENT) and len(self._window) < _MAX_WINDOW:
            return None
        return text[self._num_given :].removeprefix(self._held_by_prompt)
