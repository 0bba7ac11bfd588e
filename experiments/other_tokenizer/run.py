"""How often a draft that lacks a part of the target's vocabulary still guesses the target's likeliest token.

    python experiments/other_tokenizer/run.py --out experiments/other_tokenizer/results/table.json

The draft is the embedded target itself with the first tokens of its vocabulary only (a byte-level BPE vocabulary is
ordered by how often its merges were found), so every wrong guess comes from the vocabulary. It reads the target's
greedy answers in two ways: with one position for each token of the target (`amusd/models/vocabulary.py`), and encoded
anew, with several positions where it lacks a token. Guesses are taken behind each token of the target, from both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from amusd.config import WorkloadConfig
from amusd.models.embedded_target import embedded_target_path
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.tokenizer import load_tokenizer
from amusd.models.vocabulary import TokenText, describe_share, share_vocabulary
from amusd.workload import load_prompts

MAX_LENGTH = 1024
SIZES = (32768, 16384, 8192, 4096, 2048, 1024)
"""Tokens that the draft has, of 49,152."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; shares of the answers' tokens."""

    num_tokens: int
    """Tokens that the draft has."""
    described: str
    """What a user is told of such a draft."""
    shared: float
    """Share that the draft has, too: no method guesses more."""
    one_position: float
    encoded_anew: float


def main() -> None:
    """Read the command line, answer, guess, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a file of prompts; otherwise those of the package")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    path = embedded_target_path()
    tokenizer = load_tokenizer(path)
    texts = tokenizer.token_texts()
    answers = list(answered(arguments.prompts, arguments.num_prompts, arguments.tokens))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    rows = []
    print(f"{'tokens':>8}{'shared':>8}{'one':>8}{'anew':>8}")
    for num_tokens in SIZES:
        kept = {token_id: text for token_id, text in texts.items() if token_id < num_tokens}
        shared = share_vocabulary(texts, kept, tokenizer.num_ids)
        one = guesses(model, answers, shared.output_ids, [[own] for own in shared.readings.tolist()])
        anew = guesses(model, answers, shared.output_ids, pieces(texts, kept))
        inside = torch.isin(torch.tensor([token for ids, start in answers for token in ids[start:]]), shared.output_ids)
        described = describe_share(shared.output_ids, tokenizer.num_ids, tokenizer.encode)
        rows.append(Row(num_tokens, described, float(inside.float().mean()), one, anew))
        print(f"{num_tokens:>8}{rows[-1].shared:>8.3f}{one:>8.3f}{anew:>8.3f}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def answered(prompts: str | None, num_prompts: int, num_tokens: int) -> Iterator[tuple[list[int], int]]:
    """Prompt and greedy answer as one list of tokens, and where the answer begins."""
    path = embedded_target_path()
    tokenizer = load_tokenizer(path)
    options = LoadOptions(numerics=Numerics.for_device("cpu", width=8, fixed=True), max_model_len=MAX_LENGTH)
    model = load_model(path, options)
    cache = model.new_cache(MAX_LENGTH)
    for prompt in load_prompts(WorkloadConfig(path=prompts, num_prompts=num_prompts)):
        ids = tokenizer.encode_chat(prompt.turns)
        cache.truncate(0)
        model.prefill(ids[:-1], cache)
        answer = model.extend(ids[-1:], cache, num_tokens)
        end = next((place for place, token in enumerate(answer) if token in tokenizer.eos_token_ids), num_tokens)
        yield [*ids, *answer[:end]], len(ids)


def pieces(texts: Mapping[int, TokenText], kept: Mapping[int, TokenText]) -> list[list[int]]:
    """The tokens of `kept` that make up each token, the longest first."""
    ids = {text: token_id for token_id, text in kept.items()}
    split = []
    for token_id in range(len(texts)):
        text, found = texts[token_id], []
        while text:
            length = next(length for length in range(len(text), 0, -1) if text[:length] in ids)
            found.append(ids[text[:length]])
            text = text[length:]
        split.append(found)
    return split


def guesses(
    model: Any, answers: Sequence[tuple[list[int], int]], output_ids: Tensor, read_as: Sequence[Sequence[int]]
) -> float:
    """Share of the answers' tokens that are the draft's likeliest; it reads each token as those in `read_as`."""
    num_right = num_guesses = 0
    for ids, start in answers:
        own = [read_as[token_id] for token_id in ids]
        ends = torch.tensor([len(tokens) for tokens in own]).cumsum(0) - 1
        with torch.inference_mode():
            logits = model(torch.tensor([[token for tokens in own for token in tokens]])).logits[0]
        best = output_ids[logits[ends][start - 1 : -1, output_ids].argmax(dim=-1)]
        num_right += int((best == torch.tensor(ids[start:])).sum())
        num_guesses += len(ids) - start
    return num_right / num_guesses


if __name__ == "__main__":
    main()
