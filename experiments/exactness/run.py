"""Check that sampled answers equal plain decoding's, token for token.

    python experiments/exactness/run.py

The embedded pair with `verify_width=fixed` and matching answers real prompts over every link, with every combination of
temperature, filters, mode and drafter, and with a draft that is killed in mid-answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.answer import Generation
from amusd.config import (
    DecodingConfig,
    DrafterConfig,
    EngineConfig,
    HardwareConfig,
    SamplingParams,
    TransportConfig,
    WorkloadConfig,
)
from amusd.engine import Engine
from amusd.workload import WorkloadPrompt, load_prompts

LINKS = {
    "shared_memory": TransportConfig(kind="shared_memory"),
    "zeromq, socket file": TransportConfig(kind="zeromq"),
    "zeromq, tcp": TransportConfig(kind="zeromq", address="tcp://127.0.0.1:*"),
    "shared_memory, 10 ms away": TransportConfig(kind="shared_memory", delay_ms=10),
}
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS: dict[str, dict[str, Any]] = {"none": {}, "top-k 40, top-p 0.95": {"top_k": 40, "top_p": 0.95}}
DECODINGS = {
    "synchronous, 4": DecodingConfig(mode="synchronous", num_speculative_tokens=4),
    "chain": DecodingConfig(mode="asynchronous", policy="chain"),
    "chain, never waits": DecodingConfig(mode="asynchronous", policy="chain", min_candidates=0),
    "branching": DecodingConfig(mode="asynchronous", policy="branching"),
    "auto": DecodingConfig(mode="asynchronous", policy="auto"),
}
DRAFTERS = ("embedded", "ngram")
COMBINATIONS = list(itertools.product(DECODINGS, DRAFTERS))
KILLED = ("chain", "branching")
PLAIN = DecodingConfig(mode="autoregressive")


@dataclass(frozen=True, slots=True)
class Run:
    """One answer, and whether it was right."""

    link: str
    temperature: float
    filters: str
    decoding: str
    drafter: str
    killed: bool
    identical: bool
    num_tokens: int
    num_accepted: int
    num_rejected: int


def main() -> None:
    """Read the command line, run everything, print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a file of prompts; otherwise those of the package")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="write every run as JSON")
    arguments = parser.parse_args()
    prompts = load_prompts(WorkloadConfig(path=arguments.prompts), sys.maxsize)
    runs: list[Run] = []
    for run in all_runs(prompts, arguments.tokens):
        runs.append(run)
        print(f"{len(runs)}: {run}", flush=True)
    for name in ("link", "temperature", "decoding", "drafter", "killed"):
        print(f"\n{name:<28}{'runs':>6}{'identical':>11}{'accepted':>10}")
        for value in dict.fromkeys(getattr(run, name) for run in runs):
            own = [run for run in runs if getattr(run, name) == value]
            accepted = sum(run.num_accepted for run in own)
            print(f"{value!s:<28}{len(own):>6}{sum(run.identical for run in own):>11}{accepted:>10}")
    if arguments.out is not None:
        records = [{name: getattr(run, name) for name in Run.__slots__} for run in runs]
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    if not all(run.identical for run in runs):
        raise SystemExit("not all answers are identical")


def all_runs(prompts: list[WorkloadPrompt], num_tokens: int) -> Iterator[Run]:
    """Run every combination over every link, each with its own prompt; then kill drafts."""
    supply = itertools.cycle(prompts)
    for name, link in LINKS.items():
        with start(link) as engine:
            for temperature, filters in itertools.product(TEMPERATURES, FILTERS):
                prompt = engine.encode(next(supply).turns)
                params = parameters(temperature, filters, num_tokens)
                expected = engine.generate(prompt, params, decoding=PLAIN).token_ids
                for decoding, drafter in COMBINATIONS:
                    answer = engine.generate(prompt, params, decoding=DECODINGS[decoding], drafter=drafter)
                    yield run_of(answer, expected, (name, temperature, filters, decoding, drafter), killed=False)
    for temperature, decoding in itertools.product(TEMPERATURES, KILLED):
        yield killed_run(next(supply), temperature, decoding, num_tokens)


def killed_run(prompt: WorkloadPrompt, temperature: float, decoding: str, num_tokens: int) -> Run:
    """Check an answer whose draft is killed after a third of it."""
    filters, link = "none", "shared_memory"
    with start(LINKS[link]) as engine:
        encoded, params = engine.encode(prompt.turns), parameters(temperature, filters, num_tokens)
        expected = engine.generate(encoded, params, decoding=PLAIN).token_ids
        answer = engine.stream(encoded, params, decoding=DECODINGS[decoding], drafter="embedded")
        for number, _ in enumerate(answer):
            if number == num_tokens // 3:
                assert engine.draft.pid is not None
                os.kill(engine.draft.pid, signal.SIGKILL)
        assert engine.draft.losses, "the draft lived on"
        how = link, temperature, filters, decoding, "embedded"
        return run_of(answer.generation, expected, how, killed=True)


def run_of(answer: Generation, expected: Sequence[int], how: tuple[str, float, str, str, str], *, killed: bool) -> Run:
    """`how`: link, temperature, filters, schedule and drafter."""
    metrics = answer.metrics
    num_rejected = metrics.num_verified - metrics.num_accepted
    return Run(*how, killed, answer.token_ids == expected, metrics.num_tokens, metrics.num_accepted, num_rejected)


def start(link: TransportConfig) -> Engine:
    """The embedded target with both drafters."""
    drafters = tuple(DrafterConfig(kind=kind) for kind in DRAFTERS)  # type: ignore[arg-type]  # of the tuple above
    return Engine.start(EngineConfig(drafters=drafters, transport=link, hardware=HardwareConfig(), max_model_len=1024))


def parameters(temperature: float, filters: str, num_tokens: int) -> SamplingParams:
    """The sampling parameters of one answer; the other settings determine the seed."""
    seed = round(100 * temperature) + len(filters)
    return SamplingParams(temperature=temperature, seed=seed, max_new_tokens=num_tokens, **FILTERS[filters])


if __name__ == "__main__":
    main()
