"""Stream one answer: the target in this process, the draft in a process of its own.

    python examples/stream.py --prompt "Why is the sky blue?"
    python examples/stream.py --target /models/big --drafter /models/small --temperature 0.7

Without `--target` and `--drafter` the embedded pair answers; with them, two checkpoints, best with one tokenizer.
"""

from __future__ import annotations

import argparse
import sys

from amusd import Engine, SamplingParams


def main() -> None:
    """Read the arguments, answer one prompt, end the draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    params = SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=1)
    with Engine.launch(target=arguments.target, drafter=arguments.drafter) as engine:
        answer = engine.stream(arguments.prompt, params)
        for token in answer:
            print(token.text, end="", flush=True)
        metrics = answer.generation.metrics.as_dict()
    print()
    speed, per_pass = metrics["tokens_per_second"], metrics["tokens_per_verification"]
    print(f"{metrics['num_tokens']} tokens, {speed:.1f} a second, {per_pass:.2f} a target pass", file=sys.stderr)


if __name__ == "__main__":
    main()
