"""Let the embedded target write what its draft learns from: user turns and answers, given only its chat prefix.

    python experiments/embedded_draft/generate.py --out TEXT.npz --tokens 2000000

A batch of rows is written at one temperature: the user turns at 1, half of them begun with a few words of a task that
the target seldom thinks of by itself, the answers at the batch's own. Rows that loop and rows seen before are dropped.
Two cores write about 250 tokens a second, a GPU thousands.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dataset import Text, repeated_share, write_text
from teacher import continue_rows, load_teacher, load_tokenizer, stop_ids

TEMPERATURES = (0.0, 0.3, 0.6, 0.6, 0.8, 1.0)
"""Of the answers, batch by batch."""
SEEDED_SHARE = 0.5
SEEDS = (
    "Write a Python function that",
    "Explain what this code does:\n",
    "Write a SQL query that",
    "Fix the bug in this function:\n",
    "Solve step by step:",
    "How many",
    "If a train",
    "Prove that",
    "Summarise the following text:",
    "Rewrite this paragraph:",
    "Translate to French:",
    "Translate into English:",
    "Write an email to",
    "Write a short story about",
    "Write a poem about",
    "Compare",
    "Pretend you are",
    "List five",
    "Extract all names from this text:",
    "Classify the sentiment of",
    "Complete the following function.\n\ndef ",
    "What is the difference between",
)
MOST_USER_TOKENS = 120
LEAST_ROOM = 80
"""A row with this much room left gets another turn."""
MOST_REPEATED = 0.25
"""Share of a row's tokens that may lie in repetitions."""


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="at least this many, padding not counted")
    parser.add_argument("--length", type=int, default=324, help="tokens of a row, chat prefix included")
    parser.add_argument("--rows", type=int, default=64, help="rows written at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    text = generate(arguments.tokens, arguments.length, arguments.rows, arguments.seed, arguments.device)
    write_text(arguments.out, text)


def generate(num_tokens: int, length: int, batch_rows: int, seed: int, device: str) -> Text:
    """Batches of rows until there are `num_tokens` tokens."""
    torch.manual_seed(seed)
    choices = random.Random(seed)  # noqa: S311 - no secret
    teacher, writer = load_teacher(device), _Turns(load_tokenizer())
    kept: list[tuple[list[int], list[bool], float]] = []
    seen: set[tuple[int, ...]] = set()
    num_dropped, written, number, began = 0, 0, 0, time.monotonic()
    while written < num_tokens:
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        number += 1
        for token_ids, answer in _write_batch(teacher, writer, choices, batch_rows, length, temperature):
            opening = tuple(token_ids[len(writer.prefix) : len(writer.prefix) + 48])
            if opening in seen or repeated_share(token_ids[len(writer.prefix) :]) > MOST_REPEATED:
                num_dropped += 1
                continue
            seen.add(opening)
            kept.append((token_ids, answer, temperature))
            written += len(token_ids)
        rate = written / (time.monotonic() - began)
        left = max(0, num_tokens - written) / max(rate, 1) / 60
        print(
            f"\r{written:,} tokens, {num_dropped} rows dropped, {rate:,.0f}/s, {left:.0f} min left ", end="", flush=True
        )
    print()
    return _as_text(kept, length, len(writer.prefix))


class _Turns:
    """Token ids around the turns of the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        marks = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
        before, _, after = marks.partition("\0")
        opening = tokenizer.apply_chat_template(
            [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
        ).partition(after)[2]
        turn = before[before.rindex("<|im_start|>") :]
        line = after.partition("<|im_end|>")[2]
        self.prefix: list[int] = self.encode(before)
        self.to_answer: list[int] = self.encode(line + opening)
        self.to_user: list[int] = self.encode(line + turn)

    def encode(self, text: str) -> list[int]:
        """Token ids, nothing added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _write_batch(
    teacher: Any, writer: _Turns, choices: random.Random, batch_rows: int, length: int, temperature: float
) -> list[tuple[list[int], list[bool]]]:
    """Rows of `length` tokens at most, and which of their tokens belong to answers."""
    stops = stop_ids(teacher)
    rows = [list(writer.prefix) for _ in range(batch_rows)]
    answers = [[False] * len(row) for row in rows]

    def append(index: int, token_ids: list[int], *, answer: bool) -> None:
        rows[index] += token_ids
        answers[index] += [answer] * len(token_ids)

    def take_turn(active: list[int], room: int, temperature: float, *, answer: bool) -> None:
        turns = continue_rows(teacher, [rows[i] for i in active], temperature=temperature, max_new_tokens=room)
        for index, turn in zip(active, turns, strict=True):
            append(index, turn, answer=answer)

    active = list(range(batch_rows))
    while active:
        for index in active:
            if choices.random() < SEEDED_SHARE:
                append(index, writer.encode(choices.choice(SEEDS)), answer=False)
        take_turn(active, MOST_USER_TOKENS, 1.0, answer=False)
        active = [i for i in active if rows[i][-1] in stops]  # a turn cut short is no question
        for index in active:
            append(index, writer.to_answer, answer=False)
        active = [i for i in active if len(rows[i]) < length]
        if not active:
            break
        take_turn(active, length - min(len(rows[i]) for i in active), temperature, answer=True)
        active = [i for i in active if rows[i][-1] in stops and len(rows[i]) + LEAST_ROOM < length]
        for index in active:
            append(index, writer.to_user, answer=False)
    return [(row[:length], answer[:length]) for row, answer in zip(rows, answers, strict=True) if any(answer[:length])]


def _as_text(kept: list[tuple[list[int], list[bool], float]], width: int, prefix_length: int) -> Text:
    token_ids = np.full((len(kept), width), 2, dtype=np.int64)
    answer = np.zeros((len(kept), width), dtype=bool)
    for row, (ids, is_answer, _) in enumerate(kept):
        token_ids[row, : len(ids)] = ids
        answer[row, : len(ids)] = is_answer
    lengths = np.array([len(ids) for ids, _, _ in kept], dtype=np.int64)
    temperatures = np.array([temperature for _, _, temperature in kept], dtype=np.float32)
    return Text(token_ids, lengths, answer, temperatures, prefix_length)


if __name__ == "__main__":
    main()
