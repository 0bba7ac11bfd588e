"""Compare the three modes on prompts of your own, from Python.

    python examples/compare.py --prompts examples/prompts.jsonl
    python examples/compare.py --target /models/big --drafter /models/small

Each prompt is answered in every mode before the next one, so that a machine whose speed drifts treats the modes alike.
`amusd compare` does the same with warm-up, tuned synchronous lengths, a table and a figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from amusd import Engine, Generation, SamplingParams
from amusd.config import DecodingConfig, WorkloadConfig
from amusd.types import Mode
from amusd.workload import load_prompts


def main() -> None:
    """Read the arguments, answer every prompt in every mode, print a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", default=str(Path(__file__).with_name("prompts.jsonl")))
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    prompts = load_prompts(WorkloadConfig(path=arguments.prompts, num_prompts=arguments.num_prompts))
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens)
    answers: dict[Mode, list[Generation]] = {mode: [] for mode in get_args(Mode)}
    pair = {"target": arguments.target, "drafter": arguments.drafter}
    with Engine.launch(**pair, prefix_caching=False) as engine:  # each mode computes the prompts
        for prompt in prompts:
            for mode in get_args(Mode):
                decoding = DecodingConfig(mode=mode, num_speculative_tokens=3)
                answers[mode].append(engine.generate(prompt.turns, params, decoding=decoding))

    plain = [answer.token_ids for answer in answers["autoregressive"]]
    for mode, given in answers.items():
        num_tokens = sum(len(answer.token_ids) for answer in given)
        seconds = sum(answer.metrics.total_ns for answer in given) / 1e9
        num_same = sum(answer.token_ids == expected for answer, expected in zip(given, plain, strict=True))
        same = f"{num_same} of {len(plain)} answers as plain decoding's"
        print(f"{mode:<16}{num_tokens / seconds:>8.1f} tokens/s, {same}")


if __name__ == "__main__":
    main()
