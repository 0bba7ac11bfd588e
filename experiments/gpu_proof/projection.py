"""From what was measured on one device to two, by the simulator. A projection throughout.

Passes, steps, the host's time and messages are those of the parts `passes` and `links`, measured one at a time: on two
devices neither worker takes the other's time.
"""

from __future__ import annotations

import dataclasses

from amusd.commands.simulate import simulate, simulator_of
from amusd.config import SimulateConfig
from amusd.errors import ConfigError
from experiments.gpu_proof.compare import run_config
from experiments.gpu_proof.records import Job, Record, find, read_records

SIMULATED = SimulateConfig(num_tokens=256, synchronous_lengths=(1, 2, 3, 4, 5, 7), min_candidates=(0, 1, 2, 4))
SHOWN = ("mode", "policy", "num_speculative_tokens", "min_candidates", "tokens_per_second", "speedup",
         "speedup_vs_best_synchronous")  # fmt: skip


def projection(job: Job) -> None:
    """Simulate each acceptance rate on the measured times. Raises `ConfigError` if there are none."""
    records = [record for part in ("passes", "links") for record in read_records(job.results / f"{part}.jsonl")]

    def measured(name: str, kind: str, **wanted: object) -> float:
        found = find(records, kind, **wanted)
        if found is None:
            raise ConfigError("projection: needs what other parts measure: --parts passes,links")
        return float(found[name])

    context = job.scale.contexts[0]
    times = {
        "verify_ms": measured("ms", "pass", context=context, rows=8)
        + measured("between_ms", "host", sampling="greedy"),
        "draft_ms": measured("ms", "step", context=context),
        "delay_ms": measured("p50_us", "link", link="shared_memory") / 1000,
    }
    job.write("times", **times)
    folder = job.results / job.part
    folder.mkdir(parents=True, exist_ok=True)
    for accept in job.scale.accepts:
        config = dataclasses.replace(run_config(job.scale, accept, "greedy"), simulate=SIMULATED, **times)
        for row in best_of(simulate(config, simulator_of(config), folder)["rows"]):
            job.write("projection", accept=accept, **{name: row[name] for name in SHOWN})


def best_of(rows: list[Record]) -> list[Record]:
    """The fastest row of each mode and policy."""
    fastest = {row["policy"] or row["mode"]: row for row in sorted(rows, key=lambda row: float(row["speedup"]))}
    return list(fastest.values())
