"""Experiments that are one sweep of `amusd compare` over a key: the sweep, and a figure of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.common import Document, compare, middle_half, row_kind, speedups, write_jobs
from experiments.plotting import SPEEDUP, caption, look, mark_plain, run, subplots
from experiments.request import Request, parser_of

DASHES = ("-", "--", ":")
"""One for each drafter."""


def sweep(
    experiment: str,
    description: str | None,
    key: str,
    label: str,
    *,
    values: str,
    quick_values: str,
    lengths: str,
    policies: str,
    more: Sequence[str] = (),
    num_prompts: int = 16,
) -> None:
    """Run a script. `label`: text of the horizontal axis, which shows `key`; `lengths`: synchronous block lengths."""

    def measure(request: Request, _arguments: object) -> None:
        overrides = [
            f"experiment={experiment}",
            f"{key}={quick_values if request.quick else values}",
            f"compare.policies=[{policies}]",
            f"compare.synchronous_lengths=[{2 if request.quick else lengths}]",
            *more,
            *request.workload(),
        ]
        write_jobs(request, compare(overrides, request.runs / "sweep"))

    def draw(results: Document) -> Any:
        figure, axes = subplots()
        lines_over(axes, results["jobs"], key)
        axes.set_xlabel(label)
        axes.legend()
        figure.supxlabel(caption(results), fontsize=7)
        return figure

    run(parser_of(experiment, description, num_prompts=num_prompts, num_tokens=96), measure, draw)


def lines_over(axes: Any, jobs: Sequence[Document], key: str) -> None:
    """Draw speed-ups over a swept key, with the middle half of prompts as a band. Synchronous: the best length."""
    kinds: dict[str, list[tuple[float, Document, Document]]] = {}
    for job in jobs:
        for row in job["rows"]:
            if row["mode"] != "autoregressive":
                kinds.setdefault(row_kind(row), []).append((float(job["settings"][key]), row, job))
    drafters = list(dict.fromkeys(row["drafter"] for points in kinds.values() for _, row, _ in points))
    for kind, points in kinds.items():
        points.sort(key=lambda point: point[0])
        colour, marker = look(points[0][1])
        dash = DASHES[drafters.index(points[0][1]["drafter"]) % len(DASHES)]
        places = [place for place, _, _ in points]
        found = [middle_half(speedups(job["per_prompt"], row["contestant"])) for _, row, job in points]
        axes.plot(places, [middle for _, middle, _ in found], dash, color=colour, marker=marker, label=kind)
        axes.fill_between(
            places, [low for low, _, _ in found], [high for _, _, high in found], color=colour, alpha=0.12
        )
    mark_plain(axes)
    axes.set_ylabel(SPEEDUP)
