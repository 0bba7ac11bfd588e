"""From what was measured on one device to two, by the simulator. A projection throughout.

On one device the two workers take each other's time, on two they do not. So passes, steps of chains and the host's time
come from plain and synchronous answers, in which the workers take turns; steps of trees are timed here, alone. Which
tokens were right does not depend on times.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from amusd.commands.simulate import simulate, simulator_of
from amusd.config import SimulateConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.simulation.calibration import Calibration, calibrate
from amusd.simulation.cost import Costs, Duration, Shared
from experiments.gpu_proof import adapter
from experiments.gpu_proof.compare import run_config
from experiments.gpu_proof.environment import token_ids
from experiments.gpu_proof.plan import Scale
from experiments.gpu_proof.records import Job, read_records
from experiments.gpu_proof.timing import timed

TREE_NODES = (1, 2, 4, 8)
SIMULATED = SimulateConfig(num_tokens=256, synchronous_lengths=(1, 2, 3, 4, 5, 7), min_candidates=(0, 1, 2, 4))
_PROMPT_TOKENS = 200
_ALONE = ("autoregressive", "synchronous")


def projection(job: Job) -> None:
    """Simulate both acceptances on the times of `compare_high`. Raises `ConfigError` before that was run."""
    calibration = measured(job.results, job.results / "projection", _tree_steps(job))
    job.write(
        "calibration",
        pass_ms=calibration.costs.passes[0].alone.mean_ms,
        draft_token_ms=calibration.costs.draft_token.alone.mean_ms,
        tree_step_ms={number: shared.alone.mean_ms for number, shared in calibration.costs.tree_steps.items()},
        host_ms=calibration.costs.host.together.mean_ms,
        link_ms=calibration.costs.to_target.mean_ms,
        acceptance=calibration.acceptance,
    )
    for accept in job.scale.accepts:
        _simulate(job, accept, calibration)


def measured(results: Path, folder: Path, tree_steps: dict[int, Shared]) -> Calibration:
    """What the greedy answers of `compare_high` show of two workers that never disturb each other."""
    rows = [row for row in read_records(results / "compare_high.jsonl") if row["sampling"] == "greedy"]
    alone = [number for row in rows if row["mode"] in _ALONE for number in row["sequence_ids"]]
    if not alone:
        raise ConfigError("projection: needs the events of compare_high: --parts compare")
    _copy_events(results / "compare_high", folder, alone)
    found = calibrate(folder, "synthetic")
    return dataclasses.replace(found, costs=_undisturbed(found.costs, tree_steps))


def _copy_events(run: Path, folder: Path, sequence_ids: Collection[int]) -> None:
    """The events of these sequences, and of none, as a run directory of their own."""
    (folder / "events").mkdir(parents=True)
    kept = {*sequence_ids, -1}
    for role in ("target", "draft"):
        lines = (run / "events" / f"{role}.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = [line for line in lines if json.loads(line)["sequence_id"] in kept]
        (folder / "events" / f"{role}.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")


def _undisturbed(costs: Costs, tree_steps: dict[int, Shared]) -> Costs:
    """Each worker as fast beside the other as alone."""
    numbers = sorted(tree_steps)
    grown = tree_steps[numbers[-1]].alone.mean_ms - tree_steps[numbers[0]].alone.mean_ms
    return dataclasses.replace(
        costs,
        passes={number: Shared.same(shared.alone) for number, shared in costs.passes.items()},
        draft_token=Shared.same(costs.draft_token.alone),
        tree_steps=tree_steps,
        tree_row_ns=max(0, round(grown * 1e6 / max(1, numbers[-1] - numbers[0]))),
    )


def _tree_steps(job: Job) -> dict[int, Shared]:
    scale = job.scale
    config = adapter.engine_config(scale.device, scale.target, scale.draft)
    drafter = adapter.prepared_drafters(config).tree
    found = {}
    for number in TREE_NODES:
        step = adapter.tree_step(drafter, token_ids(512, _PROMPT_TOKENS, 1), number)
        times = timed(step, scale.rounds, scale.device)
        found[number] = Shared.same(Duration(tuple(round(1e6 * time) for time in times)))
    return found


def _simulate(job: Job, accept: float, calibration: Calibration) -> None:
    rows = projected(job.scale, accept, calibration, job.results / "projection" / f"events-{accept}")
    for row in best_of(rows):
        job.write("projection", accept=accept, **{name: row[name] for name in SHOWN})


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row of each mode and policy."""
    fastest = {row["policy"] or row["mode"]: row for row in sorted(rows, key=lambda row: float(row["speedup"]))}
    return list(fastest.values())


SHOWN = ("mode", "policy", "num_speculative_tokens", "min_candidates", "tokens_per_second", "speedup",
         "speedup_vs_best_synchronous")  # fmt: skip


def projected(scale: Scale, accept: float, calibration: Calibration, folder: Path) -> list[dict[str, Any]]:
    """The rows of `amusd simulate` on such a calibration."""
    config = dataclasses.replace(run_config(scale, accept, "greedy"), simulate=SIMULATED)
    folder.mkdir(parents=True, exist_ok=True)
    found = simulate(config, simulator_of(config, calibration), Console(json_only=True), folder)
    rows: list[dict[str, Any]] = found["rows"]
    return rows
