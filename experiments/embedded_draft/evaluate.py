"""How often the embedded target agrees with its draft on new prompts.

    python experiments/embedded_draft/evaluate.py --prompts mt_bench.jsonl human_eval.jsonl --answers answers.json

The target answers every prompt, greedily and at temperature 1; the answers are kept in the file --answers. Greedy
agreement is the share of tokens that are the draft's first choice. Sampled acceptance is the mean of 1 - total
variation at temperature 1. Both are measured for the model alone, for chains of `drafter=embedded` and for trees.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from dataset import known_after
from losses import mix
from teacher import load_teacher, stop_ids

from amusd.checkpoints.building import load_model
from amusd.checkpoints.embedded_draft import DRAFT_FILE, VOCAB_SIZE, load_embedded_draft
from amusd.checkpoints.embedded_target import embedded_target_path
from amusd.checkpoints.tokenizer import load_tokenizer
from amusd.config import WorkloadConfig
from amusd.drafters.factory import MIN_LOOKUP
from amusd.drafters.ngram import NgramCache
from amusd.models.linear import fastest_dtype
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner
from amusd.workload import load_prompts

MAX_NEW_TOKENS = 128
MAX_LENGTH = 1024
TOP_K = 50
"""Sampled answers are drawn from this many most likely tokens."""
POSITIONS = (0, 16, 48, MAX_NEW_TOKENS)
DEPTHS, WIDTHS = 6, (1, 2, 4, 8)
"""For the table by depth: tokens on a path of the tree, and guesses behind each token."""
HEADINGS = ("lookup", "mixture")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target."""

    category: str
    temperature: float
    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Judged:
    """One token of an answer."""

    category: str
    temperature: float
    position: int
    model: float
    """Probability that the model's candidate is accepted: 0 or 1 where the target is greedy."""
    drafter: float
    """The same for the drafter's candidate, which may come from a lookup."""
    mixture: float
    """The same for the first guess in a tree."""
    rank: int
    """Number of guesses in the tree that are likelier than the token."""


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", default=[], help="files of prompts; those of the package always count")
    parser.add_argument("--answers", type=Path, required=True, help="where the target's answers are kept")
    parser.add_argument("--draft-file", type=Path, default=DRAFT_FILE)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    arguments = parser.parse_args()
    if not arguments.answers.exists():
        answers = answer_all(arguments.prompts)
        arguments.answers.write_text(json.dumps([asdict(answer) for answer in answers]))
    answers = [Answer(**record) for record in json.loads(arguments.answers.read_text())]
    judged = judge_all(answers, arguments.draft_file, arguments.vocab_size)
    report = tabulate(judged)
    for name, rows in report.items():
        print(
            f"\n{name:<24}"
            + "".join(f"{column:>9}" for column in ("greedy", *HEADINGS, "sampled", *HEADINGS, "tokens"))
        )
        for label, row in rows.items():
            shares = [row[column] for column in row if column != "num_tokens"]
            print(f"{label:<24}{_cells(shares)}{row['num_tokens']:>9}")
    depths = by_depth(judged)
    print(f"\n{'by depth, greedy':<24}" + "".join(f"{f'of {width}':>9}" for width in WIDTHS))
    for depth, shares in depths.items():
        print(f"{f'token {depth}':<24}{_cells(shares)}")
    if arguments.out is not None:
        whole = {**report, "by depth": {"widths": WIDTHS, **depths}}
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")


def _cells(shares: Iterable[float | None]) -> str:
    return "".join(f"{'-' if share is None else format(share, '.3f'):>9}" for share in shares)


def answer_all(paths: Iterable[str]) -> list[Answer]:
    """The target's greedy and sampled answers to every prompt."""
    teacher, tokenizer = load_teacher("cpu"), load_tokenizer(embedded_target_path())
    prompts: list[tuple[str, list[int]]] = []
    for path in (None, *paths):
        name = "built-in" if path is None else Path(path).stem
        for prompt in load_prompts(WorkloadConfig(path=path), sys.maxsize):
            category = f"{name} {prompt.category}" if path is not None and prompt.category else name
            prompts.append((category, tokenizer.encode_chat(prompt.turns)))
    prompts = [(category, ids) for category, ids in prompts if len(ids) + MAX_NEW_TOKENS <= MAX_LENGTH]
    answers: list[Answer] = []
    for temperature, (number, (category, ids)) in itertools.product((0.0, 1.0), enumerate(prompts)):
        answers.append(Answer(category, temperature, ids, answer_one(teacher, ids, temperature, number)))
        print(f"\r{len(answers)} of {2 * len(prompts)} answers ", end="", flush=True)
    print()
    return answers


def answer_one(teacher: Any, prompt: list[int], temperature: float, seed: int) -> list[int]:
    """The target's answer to a prompt, with the token that ends it. Temperature 0: greedy."""
    torch.manual_seed(seed)
    how: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": TOP_K, "top_p": 1.0}
    if temperature == 0:
        how = {"do_sample": False}
    token_ids = torch.tensor([prompt])
    mask = torch.ones_like(token_ids)
    pad = min(stop_ids(teacher))
    written = teacher.generate(token_ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=pad, **how)
    tokens: list[int] = written[0, len(prompt) :].tolist()
    return tokens


def judge_all(answers: Sequence[Answer], draft_file: Path, vocab_size: int) -> list[Judged]:
    """Every token of every answer."""
    numerics = Numerics(width=MAX_LENGTH, fixed=False)  # a whole answer in one pass
    options = LoadOptions(numerics=numerics, max_model_len=MAX_LENGTH, dtype=fastest_dtype(torch.device("cpu")))
    path = str(embedded_target_path())
    target = load_model(path, options)
    draft = load_embedded_draft(path, options, vocab_size=vocab_size, draft_file=draft_file)
    judged: list[Judged] = []
    for number, answer in enumerate(answers, start=1):
        judged += judge(answer, target, draft)
        print(f"\r{number} of {len(answers)} answers judged ", end="", flush=True)
    print()
    return judged


def judge(answer: Answer, target: ModelRunner, draft: ModelRunner) -> list[Judged]:
    """The tokens of one answer."""
    sequence = answer.prompt + answer.tokens
    start = len(answer.prompt)
    p = logits_of(target, sequence)[start - 1 : -1].float().softmax(dim=-1)
    q = logits_of(draft, sequence)[start - 1 : -1].float().softmax(dim=-1)
    assert draft.output_ids is not None  # it has a head of its own
    tokens = torch.tensor(answer.tokens)
    if answer.temperature == 0:
        model = (draft.output_ids[q.argmax(dim=-1)] == tokens).float()
    else:
        model = torch.minimum(p[:, draft.output_ids], q).sum(dim=-1)
    known, behind = known_after([sequence]), slice(start - 1, -1)
    mixed = mix(q, draft.output_ids, *known.at(behind), p.shape[1])
    ranks = (mixed > mixed.gather(1, tokens[:, None])).sum(dim=-1).tolist()
    acceptance = torch.minimum(p, mixed).sum(dim=-1)
    found = _look_up(sequence, start)
    judged = []
    for position, looked_up in enumerate(found):
        probability = float(model[position])
        if looked_up is None:
            drafted = probability
        elif answer.temperature == 0:
            drafted = float(looked_up == answer.tokens[position])
        else:
            drafted = float(p[position, looked_up])
        mixture = float(ranks[position] == 0 if answer.temperature == 0 else acceptance[position])
        judged.append(
            Judged(
                answer.category,
                answer.temperature,
                position,
                probability,
                drafted,
                mixture,
                ranks[position],
            )
        )
    return judged


def tabulate(judged: Sequence[Judged]) -> dict[str, dict[str, dict[str, float | None]]]:
    """The report: table -> row -> figures."""

    def rows(label_of: Callable[[Judged], str]) -> dict[str, dict[str, float | None]]:
        labels = sorted({label_of(token) for token in judged})
        return {label: _figures([token for token in judged if label_of(token) == label]) for label in labels}

    def of_position(token: Judged) -> str:
        low, high = next((a, b) for a, b in itertools.pairwise(POSITIONS) if a <= token.position < b)
        return f"tokens {low:3d} to {high - 1:3d}"

    return {
        "all": {"": _figures(judged)},
        "by set": rows(lambda token: token.category.split(" ")[0]),
        "by position": rows(of_position),
    }


def by_depth(judged: Sequence[Judged]) -> dict[int, list[float | None]]:
    """The share of trees that hold the target's greedy token at each depth where they hold all before it, by width."""
    answers: list[list[int]] = []
    for token in judged:
        if token.temperature == 0:
            if token.position == 0:
                answers.append([])
            answers[-1].append(token.rank)
    table: dict[int, list[float | None]] = {}
    for depth in range(1, DEPTHS + 1):
        windows = [ranks[start : start + depth] for ranks in answers for start in range(len(ranks) - depth + 1)]
        table[depth] = [
            _mean([ranks[-1] < width for ranks in windows if max(ranks[:-1], default=0) < width]) for width in WIDTHS
        ]
    return table


def _figures(judged: Sequence[Judged]) -> dict[str, float | None]:
    greedy = [token for token in judged if token.temperature == 0]
    sampled = [token for token in judged if token.temperature != 0]
    return {
        "greedy": _mean([token.model for token in greedy]),
        "greedy_drafter": _mean([token.drafter for token in greedy]),
        "greedy_mixture": _mean([token.mixture for token in greedy]),
        "sampled": _mean([token.model for token in sampled]),
        "sampled_drafter": _mean([token.drafter for token in sampled]),
        "sampled_mixture": _mean([token.mixture for token in sampled]),
        "num_tokens": len(judged),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def logits_of(model: ModelRunner, sequence: Sequence[int]) -> Any:
    """Logits [tokens, vocabulary], from one pass."""
    return model.run([Rows(sequence, model.new_cache(len(sequence)))])[0].logits


def _look_up(sequence: Sequence[int], start: int) -> list[int | None]:
    """What prompt lookup would propose at each position from `start` on; None where no long suffix has occurred."""
    ngrams = NgramCache(MIN_LOOKUP)
    ngrams.open(text := list(sequence[:start]))
    found: list[int | None] = []
    for position in range(start, len(sequence)):
        proposed = ngrams.continuation(1)[0]
        found.append(proposed[0] if proposed else None)
        text.append(sequence[position])
    return found


if __name__ == "__main__":
    main()
