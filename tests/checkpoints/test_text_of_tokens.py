"""The text of prompt and answer is the tokenizer's text of all ids together, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from checkpoints.published_tokenizers import WORDS, ids_of, qwen_tokenizer, sentencepiece_tokenizer

from amusd.checkpoints.tokenizer import IncrementalDecoder, Spelling, Tokenizer

NUM_PADDED = 6
SENTENCEPIECE, QWEN = sentencepiece_tokenizer(), qwen_tokenizer()
Draw = Callable[[random.Random], list[int]]


def bytes_of(text: str) -> list[int]:
    return ids_of(SENTENCEPIECE, [f"<0x{byte:02X}>" for byte in text.encode()])


def draw_sentencepiece(draw: random.Random) -> list[int]:
    """Words, special and padded ids, and characters in bytes, whole ones or, between two words, parts of them.

    A part beside a whole character would turn that into replacement characters, too, which has been shown by then.
    """
    words = [*ids_of(SENTENCEPIECE, ["▁" + word for word in WORDS] + [*WORDS, "▁", "."])]
    textless = [*ids_of(SENTENCEPIECE, ["<s>", "</s>", "<tool>"]), *range(len(SENTENCEPIECE), len(SENTENCEPIECE) + 6)]
    token_ids: list[int] = []
    for _ in range(draw.randrange(1, 25)):
        kind = draw.choice(["word", "word", "textless", "whole", "part"])
        some = draw.choices(textless, k=draw.randrange(2))
        character = bytes_of(draw.choice("é中🎉"))
        if kind == "word":
            token_ids.append(draw.choice(words))
        elif kind == "textless":
            token_ids.append(draw.choice(textless))
        elif kind == "whole":
            token_ids += character
        else:
            part = character[: draw.randrange(1, len(character))]
            token_ids += [words[0], *part, *some, draw.choice(words[:-2])]
    return token_ids + draw.choice([[], [words[0], *bytes_of("中")[:2]]])


def draw_qwen(draw: random.Random) -> list[int]:
    return [draw.randrange(len(QWEN) + NUM_PADDED) for _ in range(draw.randrange(1, 60))]


LAYOUTS: dict[str, tuple[Any, Draw]] = {"pieces": (SENTENCEPIECE, draw_sentencepiece), "qwen": (QWEN, draw_qwen)}


def wrap(tokenizer: Any) -> Tokenizer:
    return Tokenizer(tokenizer.backend_tokenizer, num_ids=len(tokenizer) + NUM_PADDED)


def read(decoder: IncrementalDecoder, token_ids: Sequence[int]) -> tuple[list[str], list[Spelling]]:
    """The pieces of text (the last is the text held back until the end) and the text of each token."""
    pieces, spellings = [], []
    for token_id in token_ids:
        spellings.append(decoder.spell(token_id))
        pieces.append(decoder.push(token_id))
    return [*pieces, decoder.flush()], spellings


@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_of_prompt_and_answer_is_that_of_all_ids_in_every_form(layout: str, number: int) -> None:
    raw, draw_ids = LAYOUTS[layout]
    tokenizer = wrap(raw)
    for seed in range(number):
        draw = random.Random(seed)
        token_ids = draw_ids(draw)
        begin = draw.randrange(len(token_ids) + 1)
        truth = raw.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        (*before, held), prompt = read(IncrementalDecoder(tokenizer), token_ids[:begin])
        pieces, spellings = read(IncrementalDecoder(tokenizer, token_ids[:begin]), token_ids[begin:])
        shown = "".join(before) + held
        is_completed = not truth.startswith(shown)  # a character, by the answer
        assert "".join(pieces) == truth.removeprefix("".join(before) if is_completed else shown), f"seed {seed}"
        labels = [spelling.label for spelling in spellings if spelling.num_characters]
        assert "".join(labels) + pieces[-1] == "".join(pieces), f"seed {seed}"
        assert "".join(spelling.label for spelling in prompt if spelling.num_characters) == "".join(before)
        assert [spelling.num_characters for spelling in spellings] == [len(piece) for piece in pieces[:-1]]
        utf8 = b"".join(spelling.utf8 or b"" for spelling in (*prompt, *spellings))
        if layout == "qwen" or "\ufffd" not in truth:  # SentencePiece has a replacement for each byte of a part
            assert utf8.decode(errors="replace") == truth, f"seed {seed}"
        assert all(spelling.label for spelling in spellings if spelling.utf8 != b"")


_REPLACED = ["<0xEF>", "<0xBF>", "<0xBD>"]  # U+FFFD itself


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["▁the"], ["<tool>", "▁sky"], " sky"),
        (["▁the", "<0xC3>"], ["<0xA9>"], "é"),
        (["▁the", "<0xC3>"], ["▁sky"], " sky"),
        (["▁the", "<0xE4>"], ["<0xB8>"], "\ufffd"),
        (["▁the", *_REPLACED], ["▁sky"], " sky"),
        (["▁the", *_REPLACED], [*_REPLACED, "▁sky"], "\ufffd sky"),
        (_REPLACED * 90, ["▁sky"], " sky"),
        (["<s>"], ["▁the"], "the"),
        (["▁the", *["<tool>"] * 40], ["▁sky"], " sky"),
        (["▁a", *["<0xC3>", "<0xA9>"] * 40], ["<0xC3>", "<0xA9>", "▁sky"], "é sky"),
        ([], ["▁the", "<tool>", "▁sky"], "the sky"),
    ],
)
def test_a_token_is_not_the_first_of_a_text(prompt: list[str], answer: list[str], text: str) -> None:
    prompt_ids, token_ids = ids_of(SENTENCEPIECE, prompt), ids_of(SENTENCEPIECE, answer)
    assert "".join(read(IncrementalDecoder(wrap(SENTENCEPIECE), prompt_ids), token_ids)[0]) == text


def test_the_end_of_a_character_reads_as_the_whole_with_its_own_bytes() -> None:
    decoder = IncrementalDecoder(wrap(QWEN), ids_of(QWEN, ["the", "Ã"]))
    assert decoder.spell(ids_of(QWEN, ["©"])[0]) == Spelling("é", b"\xa9", 1)
    assert decoder.spell(ids_of(QWEN, ["ª"])[0]) == Spelling("ê", b"\xaa", 1)
    decoder.push(ids_of(QWEN, ["©"])[0])
    assert decoder.spell(ids_of(QWEN, ["Ġâ"])[0]) == Spelling("bytes: \\xe2", b" \xe2", 0)
