"""The worth of the draft's device: as a draft's, as one more rank of the target, or as a part of another replica.

    draft      `auto`, on the target's N devices and the draft's one
    rank       plain decoding or the best synchronous length, with each pass on all N + 1 devices
    replica    the same on N devices each, with (N + 1) / N times as many engines: on N machines of N + 1 devices, the
               devices of the drafts make one more engine

All three have the same answers to compute at a time: `batch_size` in all. So several replicas have a part of them each,
and a replica gains nothing where there is a single answer.

The law of ranks has one parameter, the speed-up s of a pass on twice as many devices: n devices are n ** log2(s) times
as fast as one. A device of speed v counts as v devices, as if a pass could be divided in proportion, which favours the
rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from amusd.commands.simulate.schedules import Bench, Trial
from amusd.config import DecodingConfig, SimulateConfig
from amusd.console import table
from amusd.simulation.simulator import Simulator
from amusd.types import Mode


@dataclass(frozen=True, kw_only=True)
class EqualDevices:
    """The devices of a pair, and what splitting a pass over them brings."""

    rank_speedup: float
    """Speed-up of a target pass on twice as many devices."""
    draft_rank_speedup: float = 1.0
    """The same of a draft step where the target's ranks share the draft, too."""
    num_target_devices: int = 1
    draft_device_speed: float = 1.0
    """Speed of the draft's device relative to one of the target's."""

    @property
    def more(self) -> float:
        """All devices over the target's."""
        return 1 + self.draft_device_speed / self.num_target_devices

    @property
    def pass_speedup(self) -> float:
        """Speed-up of a target pass by one more rank."""
        return float(self.more ** math.log2(self.rank_speedup))

    @property
    def draft_speedup(self) -> float:
        """Speed-up of a draft step on all devices over one on a single device like the target's."""
        return float((self.more * self.num_target_devices) ** math.log2(self.draft_rank_speedup))


def equal_devices_of(settings: SimulateConfig) -> EqualDevices | None:
    """Return what the settings say; None where they do not ask for it."""
    if settings.rank_speedup is None:
        return None
    return EqualDevices(
        rank_speedup=settings.rank_speedup,
        draft_rank_speedup=settings.draft_rank_speedup or 1.0,
        num_target_devices=settings.num_target_devices,
        draft_device_speed=settings.draft_device_speed,
    )


def worth(
    devices: EqualDevices, simulator: Simulator, settings: SimulateConfig, decoding: DecodingConfig
) -> dict[str, Any]:
    """Return every use of the draft's device in tokens per second, which is the best, and the gain of drafting.

    That gain is over the best other use.
    """
    costs, size = simulator.costs, simulator.num_slots
    pair = replace(simulator, costs=costs.scaled(1.0, 1 / devices.draft_device_speed))
    split = replace(simulator, costs=costs.scaled(1 / devices.pass_speedup, 1 / devices.draft_speedup))
    of_each = max(1, round(size / devices.more))
    num_engines = min(devices.more, size / of_each)
    replica = replace(simulator, costs=costs.where_other(works=True) if num_engines > 1 else costs, batch_size=of_each)
    draft = Bench(pair, decoding).asynchronous("auto")
    rows = [_row("draft", draft, 1.0)]
    for use, machine, number in (("rank", split, 1.0), ("replica", replica, num_engines)):
        bench = Bench(machine, decoding)
        trials = [bench.plain(), *bench.synchronous(settings.synchronous_lengths)]
        rows += [_row(use, trial, number) for trial in trials]
    best = {use: max(_speed(row) for row in rows if row["use"] == use) for use in ("draft", "rank", "replica")}
    ranked = sorted(best, key=lambda use: best[use], reverse=True)
    plain = Bench(simulator, decoding).plain().outcome.throughput.tokens_per_second
    return {
        "speedups": {use: speed / plain for use, speed in best.items()},
        "winner": ranked[0],
        "margin": best[ranked[0]] / best[ranked[1]] - 1,
        "gain": best["draft"] / max(best["rank"], best["replica"]) - 1,
        "pass_speedup": devices.pass_speedup,
        "rows": rows,
    }


def worth_text(found: Mapping[str, Any], devices: EqualDevices, batch_size: int) -> str:
    """Return the best row of each use, and what they mean."""
    lines = []
    for use in ("draft", "rank", "replica"):
        best = max((row for row in found["rows"] if row["use"] == use), key=_speed)
        length = best["num_speculative_tokens"]
        how = best["policy"] or best["mode"]
        lines.append(
            (
                f"as a {use}",
                f"{best['tokens_per_second']:.1f}",
                f"{found['speedups'][use]:.2f}",
                how if length is None else f"{how}, {length} tokens",
            )
        )
    legend = (
        f"the draft's device beside {devices.num_target_devices} of the target, {batch_size} "
        f"answer{'s' if batch_size > 1 else ''} at a time in all: the best of each use; as a rank\nit makes a pass "
        f"{devices.pass_speedup:.2f} times as fast (twice the devices: {devices.rank_speedup:.2f}); as a draft it "
        f"gains {100 * found['gain']:+.0f} % over the best other use"
    )
    return f"{table(('use', 'tokens/s', 'x plain', 'by'), lines)}\n\n{legend}"


def _row(use: str, trial: Trial, num_engines: float) -> dict[str, Any]:
    decoding = trial.decoding
    is_synchronous = decoding.mode is Mode.SYNCHRONOUS
    return {
        "use": use,
        "mode": decoding.mode.value,
        "policy": "auto" if use == "draft" else None,
        "num_speculative_tokens": decoding.num_speculative_tokens if is_synchronous else None,
        "tokens_per_second": num_engines * trial.outcome.throughput.tokens_per_second,
    }


def _speed(row: Mapping[str, Any]) -> float:
    return float(row["tokens_per_second"])
