"""Compare uses of two devices: a pair of target and draft, both on each pass, an engine on each.

Each use is a run of `amusd compare`; two engines share the prompts. The order of uses is reversed from round to round,
so that a machine whose speed drifts evenly treats them alike. The pair's first run finds the block length for the
others.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from amusd.config import HardwareConfig
from amusd.console import table
from amusd.errors import ConfigError
from amusd.runtime.cores import allowed_cores, cores_for
from experiments.common import Document, read_json, run_amusd, write_results
from experiments.plotting import run
from experiments.request import Request, parser_of

PAIR, ALL, APART = USES = ("pair", "all devices", "two engines")


@dataclass
class Measured:
    """The answers at one temperature: line of the prompt, number of the engine, and what is known of it."""

    temperature: str
    answers: dict[str, list[tuple[str, int, Document]]] = field(default_factory=lambda: {use: [] for use in USES})
    first_run: Path = Path()
    """The pair's first run, which calibrates the simulator."""
    length: int = 0
    """The best block length of that run."""


def main() -> None:
    """Run the script."""
    parser = parser_of("equal_devices", __doc__, num_prompts=16, num_tokens=48)
    parser.add_argument("--devices", nargs=2, default=("cpu", "cpu"), metavar="DEVICE", help="cuda:0 cuda:1")
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2; at least two prompts in each)")
    parser.add_argument("--keys", nargs="*", default=(), metavar="KEY=VALUE", help="more keys of `amusd compare`")
    run(parser, measure)


def measure(request: Request, arguments: Namespace) -> None:
    """Run all rounds at each temperature, simulate each use, and print a table of both."""
    lines = request.lines()
    num_rounds = min(arguments.rounds, len(lines) // 2)
    if num_rounds < 1:
        raise ConfigError("needs at least one round and two prompts")
    found = [Measured(temperature) for temperature in (("0",) if request.quick else ("0", "0.7"))]
    for one in found:
        for number in range(num_rounds):
            for use in USES if number % 2 == 0 else USES[::-1]:
                _measure(one, use, number, lines[number::num_rounds], request, arguments)
    jobs = [{"temperature": one.temperature, "rows": rows_of(one.answers)} for one in found]
    for one, job in zip(found, jobs, strict=True):
        job["simulated"] = _simulated(one, job["rows"], request)
    print(text_of(jobs))
    write_results(request, read_json(found[0].first_run / "environment.json"), {"jobs": jobs})


def _measure(
    found: Measured, use: str, number: int, lines: Sequence[str], request: Request, arguments: Namespace
) -> None:
    parts = [lines[0::2], lines[1::2]] if use == APART else [lines]
    name = f"{use.replace(' ', '_')}_{found.temperature}_round_{number}"
    runs = [request.runs / f"{name}_{engine}" for engine in range(len(parts))]
    lengths = [found.length] if found.length else [2] if request.quick else [1, 2, 3, 4]
    cores = [cores_for(role, allowed_cores(), HardwareConfig()) for role in ("target", "draft")]  # as the pair has them

    def answer(engine: int) -> None:
        settings = settings_of(use, engine, arguments.devices, lengths)
        if use == APART and arguments.devices[engine] == "cpu":
            os.sched_setaffinity(0, cores[engine])  # inherited by the command that this thread starts
        settings += [f"sampling.temperature={found.temperature}", "sampling.seed=1", *arguments.keys]
        workload = request.workload(parts[engine], f"{name}_{engine}")
        run_amusd("compare", [*settings, *workload], runs[engine])

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(answer, range(len(parts))))
    if not found.length:
        found.first_run = runs[0]
        rows = read_json(runs[0] / "result.json")["rows"]
        found.length = next(row["num_speculative_tokens"] for row in rows if row["mode"] == "synchronous")
    for engine, (part, run_dir) in enumerate(zip(parts, runs, strict=True)):
        for line in (run_dir / "answers.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["num_speculative_tokens"] in (None, found.length):
                found.answers[use].append((part[record["prompt"] - 1], engine, record))


def settings_of(use: str, engine: int, devices: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """The keys of `amusd compare` for a use; for two engines, those of one of them."""
    first, second = devices
    if use == PAIR:
        return [f"hardware.devices=[{first},{second}]", f"compare.synchronous_lengths={list(lengths)}".replace(" ", "")]
    blocks = ["mode=synchronous", f"num_speculative_tokens={lengths[0]}"]
    if use == APART:
        return [*blocks, f"hardware.devices=[{devices[engine]},{devices[engine]}]", "hardware.pin_cores=false"]
    if first == "cpu":
        return [*blocks, "hardware.devices=[cpu,cpu]", "hardware.num_threads=2", "hardware.pin_cores=false"]
    return [*blocks, f"hardware.devices=[{first},{second},{second}]", "target_tensor_parallel_size=2"]


def rows_of(answers: Mapping[str, Sequence[tuple[str, int, Document]]]) -> list[Document]:
    """A row for each use and mode. The tokens per second of two engines are added."""
    plain = "autoregressive"
    reference = {line: record["token_ids"] for line, _, record in answers[PAIR] if record["mode"] == plain}
    rows = []
    for use, mode in dict.fromkeys((name, record["mode"]) for name in USES for _, _, record in answers[name]):
        own = [one for one in answers[use] if one[2]["mode"] == mode]
        engines = [[record for _, number, record in own if number == engine] for engine in {one[1] for one in own}]
        speed = sum(1e3 * sum(one["tokens"] for one in each) / sum(one["ms"] for one in each) for each in engines)
        row = {
            "use": use,
            "mode": mode,
            "num_speculative_tokens": own[0][2]["num_speculative_tokens"],
            "tokens_per_second": speed,
        }
        row["tokens_per_second_per_device"] = speed / (1 if (use, mode) == (PAIR, plain) else 2)
        row["num_identical"] = sum(record["token_ids"] == reference[line] for line, _, record in own)
        rows.append(row | {"num_answers": len(own)})
    return rows


def _simulated(found: Measured, rows: Sequence[Document], request: Request) -> dict[str, float]:
    """Tokens per second of the best of each use by `amusd simulate`, from the pair's first run and the ranks' gain."""
    plain = {row["use"]: row["tokens_per_second"] for row in rows if row["mode"] == "autoregressive"}

    def simulate(use: str, *given: str) -> Document:
        calibrated = [f"calibration={found.first_run}", "simulate.min_candidates=[1]", *given]
        folder = request.runs / f"simulated_{found.temperature}_{use.replace(' ', '_')}"
        return run_amusd("simulate", calibrated, folder)

    def best(rows: Sequence[Document], *modes: str) -> float:
        return max(float(row["tokens_per_second"]) for row in rows if (row["policy"] or row["mode"]) in modes)

    drafting = simulate(PAIR)
    costs = drafting["inputs"]["costs"]
    verify, draft = costs["target_pass"]["0"], costs["draft_token"]
    ranks = simulate(ALL, f"verify_ms={verify['alone_ms'] * plain[PAIR] / plain[ALL]:.4f}")
    engines = simulate(APART, f"verify_ms={verify['together_ms']:.4f}", f"draft_ms={draft['together_ms']:.4f}")
    in_turns = ("autoregressive", "synchronous")
    return {
        PAIR: best(drafting["rows"], "auto"),
        ALL: best(ranks["rows"], *in_turns),
        APART: 2 * best(engines["rows"], *in_turns),
    }


def text_of(jobs: Sequence[Document]) -> str:
    """A table of all rows, with the simulator's figure beside the fastest row of each use."""
    lines = []
    for job in jobs:
        best = {row["use"]: row for row in sorted(job["rows"], key=lambda row: float(row["tokens_per_second"]))}
        for row in job["rows"]:
            how = f"{row['mode']}, {length} tokens" if (length := row["num_speculative_tokens"]) else row["mode"]
            speeds = (f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second_per_device']:.1f}")
            expected = f"{job['simulated'][row['use']]:.1f}" if best[row["use"]] is row else ""
            same = f"{row['num_identical']}/{row['num_answers']}"
            lines.append((job["temperature"], row["use"], how, *speeds, expected, same))
    return table(("temperature", "use", "mode", "tokens/s", "per device", "simulated", "identical"), lines)


if __name__ == "__main__":
    main()
