"""All of `amusd simulate`: the schedules on one machine, the map where one is asked for, and both as text."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from amusd.config import RunConfig
from amusd.console import Console
from amusd.simulate.grid import grid_of, grid_text
from amusd.simulate.inputs import Inputs
from amusd.simulate.rows import advice, rows_of, table_of
from amusd.simulate.schedules import Bench, waiting_policies


def simulate(config: RunConfig, inputs: Inputs, console: Console, events_folder: Path) -> dict[str, Any]:
    """All rows, and the map where one is asked for; the documented JSON without `run_dir`.

    `events_folder` gets the events of the first answer, decoded alone under the configured policy.
    """
    settings, simulator = config.simulate, inputs.simulator
    waiting = waiting_policies(simulator)
    waits = {config.min_candidates, *settings.min_candidates}
    num_block_schedules = 2 + (simulator.num_slots > 1)
    num_trials = 2 + num_block_schedules * len(set(settings.synchronous_lengths)) + len(waiting) * len(waits)
    bench = Bench(simulator, config.decoding(), console.steps(num_trials))
    plain = bench.plain()
    lengths = settings.synchronous_lengths
    trials = [plain, *bench.synchronous(lengths), *bench.in_turns(lengths), *bench.windowed(lengths)]
    for policy in waiting:
        trials += [bench.asynchronous(policy), *bench.tuned(policy, settings.min_candidates)]
    trials.append(bench.asynchronous("auto"))
    result: dict[str, Any] = {
        "complete": True,
        "rows": rows_of(trials, plain, can_branch=simulator.can_branch),
        "inputs": inputs.as_dict(),
    }
    if settings.grid:
        result |= {"grid": grid_of(config, simulator, console), "points": [asdict(point) for point in inputs.points]}
    console.clear_progress()
    first = replace(simulator, answers=simulator.answers[:1], batch_size=1)
    first.run(bench.asynchronous(config.policy).decoding, events_folder=events_folder)
    return result


def simulate_text(result: dict[str, Any]) -> str:
    """What `simulate` found, for a person."""
    batch_size = result["inputs"]["batch_size"]
    texts = [table_of(result["rows"], in_batches=batch_size > 1)]
    if batch_size > 1:
        texts.insert(0, f"{batch_size} answers at a time: tokens/s of all together, s/answer of each")
    if "grid" in result:
        texts.append(grid_text(result["grid"]))
    texts.append(advice(result["rows"]))
    return "\n\n".join(texts)
