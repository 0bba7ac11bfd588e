"""Answer several prompts at a time in asyncio, as a server would: each task reads its own answer.

    python examples/many.py --prompts examples/prompts.jsonl
    python examples/many.py --target /models/big --drafter /models/small --max-num-seqs 8

The engine computes in a thread of its own. Cancelling a task, or leaving its loop, ends its answer. A whole file of
prompts is answered by `amusd generate workload.path=prompts.jsonl out=answers.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from amusd import AsyncEngine, SamplingParams
from amusd.config import WorkloadConfig
from amusd.workload import WorkloadPrompt, load_prompts


async def answer(engine: AsyncEngine, prompt: WorkloadPrompt, params: SamplingParams) -> None:
    """Read one answer token by token; print it once it is whole."""
    text = ""
    async for token in engine.stream(prompt.turns, params):
        text += token.text
    print(f"{prompt.number}: {text!r}")


async def main() -> None:
    """Read the arguments, answer every prompt, end the draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", default=str(Path(__file__).with_name("prompts.jsonl")))
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    prompts = load_prompts(WorkloadConfig(path=arguments.prompts))
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens)
    pair = {"target": arguments.target, "drafter": arguments.drafter}
    async with AsyncEngine.launch(**pair, max_num_seqs=arguments.max_num_seqs) as engine:
        await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))


if __name__ == "__main__":
    asyncio.run(main())
