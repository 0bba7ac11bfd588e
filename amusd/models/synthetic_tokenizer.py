"""A tokenizer for models with random weights: any vocabulary, a pronounceable word for every id, no files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from amusd.models.tokenizer import Conversation

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")
_INDEX = {syllable: index for index, syllable in enumerate(_SYLLABLES)}
_PIECES = re.compile(r" (?:[bdfghjklmnprstvz][aeiou])+(?![^ ])|.", re.DOTALL)
"""A word as `decode` writes it, or any other character."""


class SyntheticTokenizer:
    """Every id is one word behind a space, whatever stands beside it. Satisfies `Tokenizer`.

    `encode` gives such words their ids back, and other text an id for each byte, so its text is not what was encoded.
    """

    def __init__(self, vocab_size: int) -> None:
        """Ids are in `[0, vocab_size)`. Raises `ValueError` below 2."""
        if vocab_size < 2:
            raise ValueError(f"vocab_size={vocab_size} must be at least 2")
        self._vocab_size = vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """None: an answer ends at its length, or at a stop string."""
        return frozenset()

    @property
    def fingerprint(self) -> str:
        """Sha256 over the size of the vocabulary, all that two of them can differ in."""
        return hashlib.sha256(f"amusd synthetic {self._vocab_size}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """One id for each word that `decode` writes, one for each byte of anything else."""
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            word_id = _id_of(piece[1:]) if len(piece) > 1 else self._vocab_size
            if word_id < self._vocab_size:
                ids.append(word_id)
            else:
                ids.extend(byte % self._vocab_size for byte in piece.encode(errors="replace"))
        return ids

    def encode_chat(self, turns: Conversation) -> list[int]:
        """As `encode` of the contents, an empty line between them: there is no template."""
        return self.encode("\n\n".join(turn["content"] for turn in turns))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The words one after the other. Raises `ValueError` on an id out of range."""
        return "".join(f" {self._word(token_id)}" for token_id in token_ids)

    def _word(self, token_id: int) -> str:
        """The id in bijective numeration, its digits the syllables: 0 is `ba`, 80 is `baba`."""
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"a token id is out of range: {token_id}, between 0 and {self._vocab_size - 1} allowed")
        left, word = token_id + 1, ""
        while left:
            left, digit = divmod(left - 1, len(_SYLLABLES))
            word = _SYLLABLES[digit] + word
        return word


def _id_of(word: str) -> int:
    """The inverse of `SyntheticTokenizer._word`."""
    number = 0
    for start in range(0, len(word), 2):
        number = number * len(_SYLLABLES) + _INDEX[word[start : start + 2]] + 1
    return number - 1
