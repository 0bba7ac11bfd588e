"""The worth of the draft's device: as a draft's, as one more rank of the target, or as a part of another replica.

    draft      `auto`, on the target's N devices and the draft's one
    rank       plain decoding or the best synchronous length, with each pass on all N + 1 devices
    replica    the same on N devices each, with (N + 1) / N times as many engines: on N machines of N + 1 devices, the
               devices of the drafts make one more engine

All three have the same answers to compute at a time: `batch_size` in all. So several replicas have a part of them each,
and a replica gains nothing where there is a single answer. The law of ranks has one parameter, the speed-up s of a pass
on twice as many devices: n devices are n ** log2(s) times as fast as one. The draft's steps are on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from amusd.commands.simulate.schedules import Bench, Trial, knobs, schedule_name
from amusd.config import DecodingConfig
from amusd.console import table
from amusd.simulation.simulator import Simulator

_USES = ("draft", "rank", "replica")


def worth(
    rank_speedup: float, num_target_devices: int, simulator: Simulator, decoding: DecodingConfig, *lengths: int
) -> dict[str, Any]:
    """Return every use of the draft's device in tokens per second, and the gain of drafting over the best other use.

    `lengths`: those of synchronous blocks that are tried.
    """
    more = 1 + 1 / num_target_devices
    pass_speedup = more ** math.log2(rank_speedup)
    costs, size = simulator.costs, simulator.num_slots
    split = replace(simulator, costs=costs.with_target(1 / pass_speedup))
    of_each = max(1, round(size / more))
    num_engines = min(more, size / of_each)
    replica = replace(simulator, costs=costs.where_other(works=True) if num_engines > 1 else costs, batch_size=of_each)
    rows = [_row("draft", Bench(simulator, decoding).asynchronous("auto"), 1.0)]
    for use, machine, number in (("rank", split, 1.0), ("replica", replica, num_engines)):
        bench = Bench(machine, decoding)
        rows += [_row(use, trial, number) for trial in (bench.plain(), *bench.synchronous(lengths))]
    best = {use: _speed(_best(rows, use)) for use in _USES}
    plain = Bench(simulator, decoding).plain().outcome.throughput.tokens_per_second
    return {
        "rank_speedup": rank_speedup,
        "num_target_devices": num_target_devices,
        "pass_speedup": pass_speedup,
        "speedups": {use: speed / plain for use, speed in best.items()},
        "gain": best["draft"] / max(best["rank"], best["replica"]) - 1,
        "rows": rows,
    }


def worth_text(found: Mapping[str, Any], batch_size: int) -> str:
    """Return the best row of each use, and what they mean."""
    lines = []
    for use in _USES:
        best = _best(found["rows"], use)
        speeds = (f"{best['tokens_per_second']:.1f}", f"{found['speedups'][use]:.2f}")
        lines.append((f"as a {use}", *speeds, schedule_name(best)))
    legend = (
        f"the draft's device beside {found['num_target_devices']} of the target, {batch_size} "
        f"answer{'s' if batch_size > 1 else ''} at a time in all: the best of each use; as a rank\nit makes a pass "
        f"{found['pass_speedup']:.2f} times as fast (twice the devices: {found['rank_speedup']:.2f}); as a draft it "
        f"gains {100 * found['gain']:+.0f} % over the best other use"
    )
    return f"{table(('use', 'tokens/s', 'x plain', 'by'), lines)}\n\n{legend}"


def _row(use: str, trial: Trial, num_engines: float) -> dict[str, Any]:
    speed = num_engines * trial.outcome.throughput.tokens_per_second
    return {"use": use, **knobs(trial.decoding), "tokens_per_second": speed}


def _best(rows: list[dict[str, Any]], use: str) -> dict[str, Any]:
    return max((row for row in rows if row["use"] == use), key=_speed)


def _speed(row: Mapping[str, Any]) -> float:
    return float(row["tokens_per_second"])
