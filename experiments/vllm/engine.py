"""One vLLM for `run.py`, in an environment that has vLLM: settings as an argument, lines of JSON in and out.

    in   {"prompts": [[token ids] ...], "num_tokens": [64 ...], "kills": [10, 30], "settings": {"wait_ms": 10},
          "pads": true}
    out  {"token_ids": [[...] ...], "seconds": 1.2, "counts": {...}}

`num_tokens`: for each answer. `kills`: the draft is killed before these calls of the proposer, each counted from the
kill before. `settings`: those of `AsyncProposer` for waits and batch sizes from now on (if given at the start, vLLM
would compile the model anew for each value). `pads`: fill up the proposer's lists, as for graphs. `counts`: those of
this order's calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock


def main() -> None:
    """Load, write `{}`, and answer until standard input ends."""
    settings = json.loads(sys.argv[1])
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(len(settings["cores"]))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes elsewhere

    from vllm import LLM, SamplingParams

    from amusd.runtime.cores import pin_to

    llm = LLM(**settings["llm"])
    pin_to(set(settings["cores"]))  # now that it has compiled, on all cores
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    kills: list[int] = []
    propose_with_kills(getattr(runner, "drafter", None), kills)
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        params = [SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True) for number in order["num_tokens"]]
        prompts = [{"prompt_token_ids": token_ids} for token_ids in order["prompts"]]
        kills[:] = order.get("kills", ())
        if "settings" in order:
            batch = runner.drafter.batch
            batch.settings = replace(batch.settings, **order["settings"])
        if order.get("pads"):
            runner.drafter.compilation = Mock()  # any attribute of it is true
        before = counts_of(runner)
        start = time.perf_counter()
        found = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        reply = {
            "token_ids": [[*answer.outputs[0].token_ids] for answer in found],
            "seconds": seconds,
            "counts": {name: value - before[name] for name, value in counts_of(runner).items()},
        }
        print(json.dumps(reply), file=replies, flush=True)


def counts_of(runner: Any) -> dict[str, float]:
    """The counts of `AsyncProposer`; empty for other proposers."""
    return dict(getattr(getattr(runner, "drafter", None), "counts", {}))


def propose_with_kills(drafter: Any, kills: list[int]) -> None:
    """Have `drafter.propose` kill the draft after as many calls with a draft as the next of `kills` says."""
    import psutil

    if not hasattr(drafter, "counts"):
        return
    propose, num_calls = drafter.propose, 0

    def killing(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += drafter.batch.connection.link is not None  # one that still loads is not killed
        if kills and num_calls >= kills[0]:
            del kills[0]
            num_calls = 0
            children = psutil.Process().children(recursive=True)
            if children:
                children[-1].kill()
        return propose(*args, **options)

    drafter.propose = killing


if __name__ == "__main__":
    main()
