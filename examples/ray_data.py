"""Answer a file of prompts with several engines: Ray Data hands batches to actors with an engine each.

    python examples/ray_data.py --prompts examples/prompts.jsonl --out answers.jsonl --concurrency 2
    python examples/ray_data.py --target /models/big --drafter /models/small --num-gpus 2 --concurrency 4

Needs `pip install 'ray[data]'`, and amusd on every node. The lines are those of `amusd generate out=FILE`, in the order
of the prompts. Ray replaces an engine that is lost, and has its batch answered again.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import ray
except ImportError:
    sys.exit("examples/ray_data.py needs Ray: pip install 'ray[data]'")

from amusd import Engine, SamplingParams
from amusd.config import WorkloadConfig
from amusd.errors import ConfigError
from amusd.workload import load_prompts


class Answers:
    """One engine in an actor: the target in its process, the draft as a child of that."""

    def __init__(self, pair: dict[str, Any], params: SamplingParams) -> None:
        # Ray assigns no cores: all engines of a machine would pin the same ones.
        self._engine, self._params = Engine.launch(**pair, hardware={"pin_cores": False}), params
        self._settings = {**pair, "sampling.max_new_tokens": params.max_new_tokens}

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Answer a batch of prompts, as many at a time as the engine takes."""
        answers = []
        for prompt in map(json.loads, batch["line"]):
            with suppress(ConfigError):  # the prompt does not fit the context
                answers.append((prompt, self._engine.submit(prompt.pop("turns"), self._params)))
        lines = [{**prompt, **answer.result().as_dict(), "settings": self._settings} for prompt, answer in answers]
        return {"line": [json.dumps(line) for line in lines]}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, value in {"target": "embedded", "drafter": "auto", "prompts": None, "out": "answers.jsonl"}.items():
    parser.add_argument(f"--{name}", default=value)
for name, number in {"max-new-tokens": 48, "concurrency": 1, "num-gpus": 0, "batch-size": 64}.items():
    parser.add_argument(f"--{name}", default=number, type=int)
asked = parser.parse_args()
prompts = load_prompts(WorkloadConfig(path=asked.prompts), default=sys.maxsize)
items = [{"line": json.dumps({"id": p.number, "prompt": p.asked, "turns": p.turns})} for p in prompts]
ray.data.DataContext.get_current().execution_options.preserve_order = True
pair = {"target": asked.target, "drafter": asked.drafter}
engine = (pair, SamplingParams(max_new_tokens=asked.max_new_tokens))
engines = {"fn_constructor_args": engine, "concurrency": asked.concurrency, "num_gpus": asked.num_gpus}
answered = ray.data.from_items(items).map_batches(Answers, batch_size=asked.batch_size, **engines)
with Path(asked.out).open("w", encoding="utf-8") as file:
    file.writelines(row["line"] + "\n" for row in answered.iter_rows())
