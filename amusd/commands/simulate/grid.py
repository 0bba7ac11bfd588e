"""The map: which schedule wins at each acceptance and each ratio of speeds, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from amusd.commands.simulate.inputs import drawn
from amusd.commands.simulate.schedules import Bench, best_of, waiting_policies
from amusd.config import RunConfig
from amusd.console import Console, percent, table
from amusd.simulation.closed_forms import upper_bound
from amusd.simulation.cost import Shared
from amusd.simulation.simulator import Simulator


def grid_of(config: RunConfig, simulator: Simulator, console: Console) -> list[dict[str, Any]]:
    """Return a cell for each acceptance and ratio of speeds: the tuned schedules, which wins, its lead, and `auto`."""
    settings = config.simulate
    cells = list(product(settings.grid_accepts, settings.grid_ratios))
    report = console.steps(len(cells))
    found = []
    for accept, ratio in cells:
        report(f"acceptance {accept:g}, {ratio:g} draft steps a pass")
        found.append(_cell(config, simulator, accept, ratio))
    return found


def _cell(config: RunConfig, simulator: Simulator, accept: float, ratio: float) -> dict[str, Any]:
    settings, costs = config.simulate, simulator.costs
    draft_ms = costs.passes[min(costs.passes)].alone.mean_ms / ratio
    costs = replace(
        costs,
        draft_token=Shared.of_ms(draft_ms, settings.jitter),
        tree_steps={},
        tree_row_ns=round(costs.tree_row_share * draft_ms * 1e6),
    )
    bench = Bench(replace(simulator, costs=costs, answers=drawn(settings, accept)), config.decoding())
    plain = bench.plain()
    synchronous = best_of(bench.synchronous(settings.synchronous_lengths))
    tuned = {"windowed": best_of(bench.windowed(settings.synchronous_lengths))}
    tuned |= {policy: best_of(bench.tuned(policy, settings.min_candidates)) for policy in waiting_policies(simulator)}
    auto = bench.asynchronous("auto")
    speedups: dict[str, float] = {"autoregressive": 1.0, "synchronous": synchronous.over(plain)}
    speedups |= {policy: trial.over(plain) for policy, trial in tuned.items()}
    ranked = sorted(speedups, key=lambda name: speedups[name], reverse=True)
    return {
        "accept": accept,
        "ratio": ratio,
        "speedups": speedups,
        "num_speculative_tokens": synchronous.decoding.num_speculative_tokens,
        "window": tuned["windowed"].decoding.num_speculative_tokens,
        "min_candidates": {policy: tuned[policy].decoding.min_candidates for policy in waiting_policies(simulator)},
        "winner": ranked[0],
        "margin": speedups[ranked[0]] / speedups[ranked[1]] - 1,
        "auto": auto.over(plain),
        "upper_bound": upper_bound(accept, ratio),
    }


def grid_text(cells: Sequence[dict[str, Any]]) -> str:
    """Return a table: for each acceptance the winners, their speed-ups and their leads over the next, and a legend."""
    by_place = {(cell["accept"], cell["ratio"]): cell for cell in cells}
    ratios = list(dict.fromkeys(cell["ratio"] for cell in cells))
    header = ("accept \\ verify/draft", *(f"{ratio:g}" for ratio in ratios))
    lines = []
    for accept in dict.fromkeys(cell["accept"] for cell in cells):
        row = [by_place[accept, ratio] for ratio in ratios]
        shown = [f"{cell['winner']} {max(cell['speedups'].values()):.2f} (+{percent(cell['margin'])})" for cell in row]
        lines.append((f"{accept:g}", *shown))
    legend = "for each acceptance and draft steps per pass: the fastest, times plain decoding, its lead over the next"
    return f"{table(header, lines)}\n\n{legend}"
