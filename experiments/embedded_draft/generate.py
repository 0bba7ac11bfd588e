"""Let the embedded target write what its draft learns from: answers to user turns of many kinds, and its states.

    python experiments/embedded_draft/generate.py --out corpora/ --parts 20

Each part is a corpus of its own (`dataset.py`) and has its own seed. Parts that exist, or that another process is
writing, are passed over, so that a process on each core, or later another machine, shares the work by the same command.
The temperature of answers changes from row to row; user turns that the target ends are written at 1. A row whose answer
begins to loop is cut there. One core with AMX keeps some 430 tokens a second
(`--slots 256 --length 256`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dataset import Text, claim, loops, to_bits, write_corpus
from openings import Opening, Openings
from teacher import load_teacher, load_tokenizer, stop_ids
from torch import Tensor
from writer import Writer

TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.4, 1.0)
"""Of the answers, row by row."""
MOST_USER_TOKENS = 100
"""That the target writes; a turn with more of them is no question."""
LEAST_WORD = 5
"""Letters of the words that questions go on with."""
LEAST_ROOM = 80
"""A row with this much room left may get another turn."""


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the parts")
    parser.add_argument("--parts", type=int, default=20)
    parser.add_argument("--rows", type=int, default=768, help="rows of a part, before duplicates are dropped")
    parser.add_argument("--length", type=int, default=384, help="tokens of a row at most, chat prefix included")
    parser.add_argument("--slots", type=int, default=128, help="rows written at once")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    teacher, turns = load_teacher(arguments.device), Turns(load_tokenizer())
    writer = Writer(teacher, arguments.slots, arguments.length)
    for number in range(arguments.parts):
        folder = arguments.out / f"{number:03d}"
        with claim(folder) as to_be_written:
            if to_be_written:
                rows = write_part(writer, turns, stop_ids(teacher), arguments.rows, number)
                write_corpus(folder, *_as_corpus(rows, arguments.length, len(turns.prefix)))


def write_part(writer: Writer, turns: Turns, stops: set[int], num_rows: int, seed: int) -> list[Row]:
    """Rows that are all different and hold an answer, of `num_rows` that are begun."""
    choices, generator = random.Random(seed), torch.Generator(writer.device).manual_seed(seed)  # noqa: S311 - no secret
    script = _Script(turns, Openings(choices, turns.words), stops, writer.length)
    to_come = iter(list(itertools.islice(itertools.cycle(TEMPERATURES), num_rows)))
    slots: list[Row | None] = [None] * writer.num_slots
    kept: list[Row] = []
    seen: set[tuple[int, ...]] = set()
    num_dropped, began = 0, time.monotonic()
    while True:
        for slot, row in enumerate(slots):
            if row is None and (temperature := next(to_come, None)) is not None:
                slots[slot] = script.begin(temperature)
        if not any(slots):
            break
        for row, state in _read(writer, slots, turns.prefix[0]):
            row.last = state
        rows = [row for row in slots if row is not None]
        hot = [row.temperature if row.answering else 1.0 for row in rows]
        chosen = writer.choose(torch.stack([row.last for row in rows]), hot, generator)
        for row, token_id in zip(rows, chosen, strict=True):
            script.advance(row, token_id)
        for slot, row in enumerate(slots):
            if row is None or not row.complete:
                continue
            slots[slot] = None
            opening = tuple(row.token_ids[len(turns.prefix) : len(turns.prefix) + 48])
            if opening in seen or not any(row.answer):
                num_dropped += 1
                continue
            seen.add(opening)
            kept.append(row)
            script.keep(row)
            rate = sum(len(row.token_ids) for row in kept) / (time.monotonic() - began)
            print(f"\rpart {seed}: {len(kept)} rows, {num_dropped} dropped, {rate:,.0f} tokens/s ", end="", flush=True)
    print()
    return kept


@dataclass(slots=True, eq=False)
class Row:
    """A row while it is written."""

    temperature: float
    token_ids: list[int] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)
    """Which tokens belong to an answer."""
    states: list[np.ndarray] = field(default_factory=list)
    """Bits of the states of the tokens that have been read."""
    num_read: int = 0
    answering: bool = False
    user_tokens: int = 0
    """Tokens that the target has written of the user's turn."""
    complete: bool = False
    last: Tensor = field(default_factory=lambda: torch.empty(0))
    """State of the last token."""

    def append(self, token_ids: list[int], *, answer: bool) -> None:
        """Add tokens."""
        self.token_ids += token_ids
        self.answer += [answer] * len(token_ids)

    def answers(self) -> list[list[int]]:
        """The tokens of each answer."""
        parts = itertools.groupby(zip(self.token_ids, self.answer, strict=True), key=lambda pair: pair[1])
        return [[token_id for token_id, _ in part] for is_answer, part in parts if is_answer]


class Turns:
    """Token ids around the turns of the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        question = [{"role": "user", "content": "\0"}]
        asked = tokenizer.apply_chat_template(question, tokenize=False)
        before, _, after = asked.partition("\0")
        opening = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)[len(asked) :]
        turn = before[before.rindex("<|im_start|>") :]
        line = after.partition("<|im_end|>")[2]
        self.prefix: list[int] = self.encode(before)
        self.to_answer: list[int] = self.encode(line + opening)
        self.to_user: list[int] = self.encode(line + turn)
        self.end: list[int] = self.encode("<|im_end|>")
        single = (tokenizer.decode([token_id]) for token_id in range(len(tokenizer)))
        words = (text[1:] for text in single if text[:1] == " " and text[1:].isalpha())
        self.words = [word for word in words if len(word) >= LEAST_WORD]
        """The longer words, and beginnings of words, that are one token with the space before them."""

    def encode(self, text: str) -> list[int]:
        """Token ids, nothing added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """Text without the marks of turns."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


class _Script:
    """Who speaks when."""

    def __init__(self, turns: Turns, openings: Openings, stops: set[int], length: int) -> None:
        self._turns, self._openings, self._stops, self._length = turns, openings, stops, length

    def begin(self, temperature: float) -> Row:
        """A new row that the target goes on with."""
        while True:
            row = Row(temperature)
            row.append(self._turns.prefix, answer=False)
            self._open(row, self._openings.first())
            if len(row.token_ids) + LEAST_ROOM <= self._length:
                return row

    def advance(self, row: Row, token_id: int) -> None:
        """Add what the target has written, and what comes next if that ends its turn."""
        row.append([token_id], answer=row.answering)
        row.user_tokens += not row.answering
        if token_id not in self._stops:
            row.complete = row.user_tokens > MOST_USER_TOKENS
        elif not row.answering:
            row.append(self._turns.to_answer, answer=False)
            row.answering = True
        elif len(row.token_ids) + LEAST_ROOM <= self._length and (opening := self._openings.further()):
            row.append(self._turns.to_user, answer=False)
            self._open(row, opening)
        else:
            row.complete = True
        row.complete |= len(row.token_ids) >= self._length or _loops(row)

    def keep(self, row: Row) -> None:
        """Let later rows have this one's answers as passages, unless they loop."""
        for answer in row.answers():
            if not loops(answer):
                self._openings.take(self._turns.decode(answer))

    def _open(self, row: Row, opening: Opening) -> None:
        row.append(self._turns.encode(opening.text), answer=False)
        row.answering, row.user_tokens = opening.complete, 0
        if opening.complete:
            row.append(self._turns.end + self._turns.to_answer, answer=False)


def _loops(row: Row) -> bool:
    """Whether the answer that is being written repeats itself; looked at now and then."""
    return row.answer[-1] and len(row.token_ids) % 16 == 0 and loops(row.answers()[-1])


def _read(writer: Writer, slots: list[Row | None], first_token: int) -> Iterator[tuple[Row, Tensor]]:
    """Read what has been added to each row, one token of many rows at a time; the state of the last one of each.

    Where few slots step, they are read alone: their keys and values are copied. Else all are, in place, and a slot
    with nothing to read gets the first token of the prefix again, which changes nothing.
    """
    stepping = []
    for slot, row in enumerate(slots):
        if row is None:
            continue
        added = row.token_ids[row.num_read :]
        if len(added) == 1:
            stepping.append((slot, row))
            continue
        (states,) = writer.read([slot], [row.num_read], [added])
        row.states.append(to_bits(states))
        row.num_read += len(added)
        yield row, states[-1]
    if not stepping:
        return
    few = 2 * len(stepping) <= len(slots)
    places = [slot for slot, _ in stepping] if few else list(range(len(slots)))
    tokens = {slot: (row.num_read, row.token_ids[-1:]) for slot, row in stepping}
    starts, token_ids = zip(*(tokens.get(place, (0, [first_token])) for place in places), strict=True)
    states = writer.read(places, starts, token_ids)[:, 0]
    own = dict(zip(places, zip(to_bits(states), states, strict=True), strict=True))
    for slot, row in stepping:
        bits, state = own[slot]
        row.states.append(bits[None])
        row.num_read += 1
        yield row, state


def _as_corpus(rows: list[Row], width: int, prefix_length: int) -> tuple[Text, np.ndarray]:
    """The rows cut to `width`, and their states; zeros behind the last token that was read, which no answer follows."""
    token_ids = np.full((len(rows), width), 2, dtype=np.int64)
    answer = np.zeros((len(rows), width), dtype=bool)
    lengths = np.array([min(len(row.token_ids), width) for row in rows], dtype=np.int64)
    states = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        token_ids[index, :length] = row.token_ids[:length]
        answer[index, :length] = row.answer[:length]
        read = np.concatenate(row.states)[:length]
        states += [read, np.zeros((length - len(read), read.shape[1]), dtype=read.dtype)]
    temperatures = np.array([row.temperature for row in rows], dtype=np.float32)
    return Text(token_ids, lengths, answer, temperatures, prefix_length), np.concatenate(states)


if __name__ == "__main__":
    main()
