"""The events of a run read back, and what the two workers did at the same time."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from amusd.tracing.metrics import overlap_fraction

DRAFT_WORK = ("draft_prefill", "draft_step", "advance", "rollback")
TARGET_WORK = ("target_prefill", "target_pass")


def read_events(run_directory: Path, role: str) -> list[dict[str, Any]]:
    """The events of one worker, in the order in which they were recorded; empty when it left none."""
    path = run_directory / "events" / f"{role}.jsonl"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def draft_overlap(run_directory: Path, sequence_ids: Collection[int]) -> float | None:
    """Share of the draft's working time on these sequences that lies inside target work; None without events.

    Both workers have to run on one machine: their clocks are compared as they are.
    """

    def spans(role: str, names: tuple[str, ...]) -> list[tuple[int, int]]:
        return sorted(
            (event["start_ns"], event["end_ns"])
            for event in read_events(run_directory, role)
            if event["name"] in names and event["sequence_id"] in sequence_ids
        )

    return overlap_fraction(spans("draft", DRAFT_WORK), spans("target", TARGET_WORK))
