"""What a comparison says of each category of prompts, where their file has categories (MT-Bench, Spec-Bench)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from amusd.commands.tables import Row, columns_of, row_kind, row_name
from amusd.console import table
from amusd.types import Mode

OTHER = "other"
"""The category of prompts that have none."""


def speedups(per_prompt: Sequence[Row], contestant: str, reference: str = Mode.AUTOREGRESSIVE.value) -> list[float]:
    """Prompt by prompt, how many times as fast as `reference`, which is plain decoding, in the same run."""
    return [one["ms_per_token"][reference] / one["ms_per_token"][contestant] for one in per_prompt]


def by_category(rows: Sequence[Row], per_prompt: Sequence[Row]) -> list[dict[str, Any]]:
    """For each category and row of the pair with one answer at a time, but plain decoding, the gain on its prompts.

    Both gains are medians over the prompts. The categories are in the order of the file.
    """
    found: dict[str, list[Row]] = {}
    for one in per_prompt:
        found.setdefault(one["category"] or OTHER, []).append(one)
    own = _alone(rows)
    best = {row["drafter"]: row["contestant"] for row in own if row["mode"] == Mode.SYNCHRONOUS.value}
    return [
        {
            "category": category,
            "contestant": row["contestant"],
            "kind": row_kind(row),
            "mode": row["mode"],
            "policy": row["policy"],
            "num_prompts": len(prompts),
            "speedup_vs_autoregressive": statistics.median(speedups(prompts, row["contestant"])),
            "speedup_vs_best_synchronous": statistics.median(speedups(prompts, row["contestant"], best[row["drafter"]]))
            if row["drafter"] in best
            else None,
            "speedups": speedups(prompts, row["contestant"]),
        }
        for category, prompts in found.items()
        for row in own
        if row["mode"] != Mode.AUTOREGRESSIVE.value
    ]


def category_table(rows: Sequence[Row], categories: Sequence[Row]) -> str:
    """A line for each category, of the fastest asynchronous row; empty without one, or if no prompt has a category."""
    asynchronous = [row for row in _alone(rows) if row["mode"] == Mode.ASYNCHRONOUS.value]
    if not asynchronous or {one["category"] for one in categories} == {OTHER}:
        return ""
    best = max(asynchronous, key=lambda row: float(row["tokens_per_second"]))
    own = [one for one in categories if one["contestant"] == best["contestant"]]
    columns = columns_of(own, ("speedup_vs_autoregressive", "speedup_vs_best_synchronous"))
    lines = [(one["category"], str(one["num_prompts"]), *(column.text(one) for column in columns)) for one in own]
    header = ("category", "prompts", *(column.heading for column in columns))
    return f"{row_name(best)}: medians over the prompts of a category\n\n{table(header, lines)}"


def _alone(rows: Sequence[Row]) -> list[Row]:
    """Those whose times per prompt can be compared with plain decoding's."""
    return [row for row in rows if row.get("batch_size", 1) == 1]
