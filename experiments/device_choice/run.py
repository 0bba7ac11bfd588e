"""How often the digest of a row that a device makes settles the choice, on logits of the embedded target's own answers.

    python experiments/device_choice/run.py --prompts mt_bench.jsonl

The target answers every prompt at each temperature, with top-p 0.95, and the logits of each position are kept. Passes
of 8 rows are then judged as a device would have them judged: `Digest.compute` on the CPU, the choice from its outputs,
for all 8 rows. Beside the share of rows and passes that needed no whole row stands the share of passes in which the
filter keeps no column beyond the digest's likely ones (what a digest without noise could settle), and beyond 1,024.
Every choice is compared with that from whole rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from amusd.config import Distribution, WorkloadConfig
from amusd.models.cached_model import CachedModel
from amusd.models.embedded_target import embedded_target_path
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.tokenizer import load_tokenizer
from amusd.sampling.digest import NUM_LIKELY, Digests
from amusd.sampling.logits import LogitsProcessor
from amusd.sampling.sampler import TokenSampler
from amusd.workload import load_prompts

MAX_LENGTH = 2048
ROWS = 8
"""Of a pass."""
SETTINGS: dict[str, dict[str, float]] = {
    "temperature alone": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 40": {"top_k": 40},
    "min-p 0.02": {"min_p": 0.02},
    "top-p 0.95, penalties 1.1 and 0.5": {"top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}
TEMPERATURES = (0.7, 1.0)
Sequences = list[tuple[list[int], int, Tensor]]
"""Tokens, length of the prompt, logits [answer, columns] of each answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    temperature: float
    setting: str
    num_rows: int
    num_passes: int
    bytes_per_pass: int
    settled_rows: float
    settled_passes: float
    within_likely_passes: float
    within_1024_passes: float
    median_kept: float
    num_wrong: int


class Keeper:
    """A `Chooser` that keeps the logits it is given."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler
        self.rows: list[Tensor] = []

    def choose(self, logits: Tensor, start: int, token_ids: Sequence[int]) -> list[int]:
        """As the sampler does."""
        self.rows.append(logits.clone())
        return self._sampler.choose(logits, start, token_ids)


def main() -> None:
    """Read the command line, answer, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a file of prompts; otherwise those of the package")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    rows = []
    for temperature in TEMPERATURES:
        answers = list(answered(arguments.prompts, arguments.num_prompts, arguments.tokens, temperature))
        rows += [judge(answers, temperature, setting) for setting in SETTINGS]
    headings = "".join(f"{name:>8}" for name in ("rows", "settled", "passes", "likely", "1,024", "kept", "wrong"))
    print(f"{'T':>4} {'setting':<34}{headings}")
    for row in rows:
        shares = (row.settled_rows, row.settled_passes, row.within_likely_passes, row.within_1024_passes)
        cells = "".join(f"{share:>8.4f}" for share in shares)
        numbers = f"{row.median_kept:>8.0f}{row.num_wrong:>8}"
        print(f"{row.temperature:>4g} {row.setting:<34}{row.num_rows:>8}{cells}{numbers}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def answered(
    prompts: str | None, num_prompts: int, num_tokens: int, temperature: float
) -> Iterator[tuple[list[int], int, Tensor]]:
    """The answers to all prompts; seed 0 for the first one."""
    path = str(embedded_target_path())
    tokenizer = load_tokenizer(path)
    options = LoadOptions(numerics=Numerics.for_device("cpu", width=ROWS, fixed=True), max_model_len=MAX_LENGTH)
    model: CachedModel = load_model(path, options)
    cache = model.new_cache(MAX_LENGTH)
    for number, prompt in enumerate(load_prompts(WorkloadConfig(path=prompts, num_prompts=num_prompts))):
        ids = tokenizer.encode_chat(prompt.turns)
        distribution = Distribution(temperature=temperature, top_p=0.95, seed=number)
        keeper = Keeper(TokenSampler(distribution, model.vocab_size, prompt=ids))
        cache.truncate(0)
        model.prefill(ids[:-1], cache)
        tokens = model.extend(ids[-1:], cache, num_tokens, keeper)
        yield [*ids, *tokens], len(ids), torch.cat(keeper.rows)


def judge(answers: Sequences, temperature: float, setting: str) -> Row:
    """Passes of 8 rows over all answers. The seed is another one than that of the answers."""
    num_columns = answers[0][2].shape[1]
    distribution = Distribution(temperature=temperature, seed=1000, **SETTINGS[setting])  # type: ignore[arg-type]
    digests = Digests(num_columns, None, torch.device("cpu"))
    processor = LogitsProcessor(distribution, num_columns)
    kept: list[list[int]] = []
    settled: list[float] = []
    num_wrong, num_words = 0, 0
    for tokens, num_prompt, logits in answers:
        whole = TokenSampler(distribution, num_columns, prompt=tokens[:num_prompt])
        away = TokenSampler(distribution, num_columns, prompt=tokens[:num_prompt], digests=digests)
        assert away.digest is not None
        num_words = away.digest.num_outputs
        for first in range(0, len(logits) - ROWS + 1, ROWS):
            start = num_prompt + first - 1
            rows, block = logits[first : first + ROWS], tokens[start : start + ROWS]
            for sampler in (whole, away):
                sampler.see(tokens[:start])
            before = away.num_whole_rows
            num_wrong += away.choose(rows, start, block) != whole.choose(rows, start, block)
            settled.append(ROWS - (away.num_whole_rows - before))
            kept.append([])
            for row in range(ROWS):
                answer = tokens[num_prompt : start + row + 1]
                _, columns = processor.process(rows[row].float().numpy(), tokens[:num_prompt], answer)
                kept[-1].append(num_columns if columns is None else len(columns))
    most = [max(one) for one in kept]
    return Row(
        temperature=temperature,
        setting=setting,
        num_rows=ROWS * len(settled),
        num_passes=len(settled),
        bytes_per_pass=ROWS * 4 * num_words,
        settled_rows=sum(settled) / (ROWS * len(settled)),
        settled_passes=statistics.fmean(one == ROWS for one in settled),
        within_likely_passes=statistics.fmean(one <= NUM_LIKELY for one in most),
        within_1024_passes=statistics.fmean(one <= 1024 for one in most),
        median_kept=statistics.median(number for one in kept for number in one),
        num_wrong=num_wrong,
    )


if __name__ == "__main__":
    main()
