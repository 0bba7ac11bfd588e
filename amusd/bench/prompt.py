"""The text behind which everything is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_SENTENCES = (
    "The harbour master keeps a notebook in which he writes down every ship that enters, its cargo, and the weather. ",
    "On Tuesday he noted two fishing boats, a ferry that was late, and a tanker that waited outside for the tide. ",
    "His daughter asked him why he never wrote about the birds, and he answered that nobody had ever asked for them. ",
)


def english(encode: Callable[[str], Sequence[int]], num_tokens: int) -> list[int]:
    """`num_tokens` tokens of plain English."""
    text = ""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        text += "".join(_SENTENCES)
        token_ids = list(encode(text))
    return token_ids[:num_tokens]
