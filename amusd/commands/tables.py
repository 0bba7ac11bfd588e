"""The rows of a comparison as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amusd.console import percent, table

Row = Mapping[str, Any]
"""One way to decode and its figures, as `result.json` has them."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure."""

    name: str
    heading: str
    write: Callable[[Any], str]

    def text(self, row: Row) -> str:
        """The figure as shown; empty where the row has none."""
        value = row.get(self.name)
        return "" if value is None else self.write(value)


COLUMNS = (
    Column("batch_size", "at a time", str),
    Column("tokens_per_second", "tokens/s", "{:.1f}".format),
    Column("tokens_per_second_per_device", "per device", "{:.1f}".format),
    Column("speedup_vs_autoregressive", "x plain", "{:.2f}".format),
    Column("speedup_quartiles", "quartiles", "{0[0]:.2f}-{0[1]:.2f}".format),
    Column("speedup_vs_best_synchronous", "x best sync", "{:.2f}".format),
    Column("acceptance_rate", "accepted", percent),
    Column("mean_acceptance_length", "tokens/pass", "{:.2f}".format),
    Column("p50_inter_token_ms", "p50 ms", "{:.1f}".format),
    Column("p99_inter_token_ms", "p99 ms", "{:.1f}".format),
    Column("target_idle_fraction", "idle t", percent),
    Column("draft_idle_fraction", "idle d", percent),
    Column("wasted_draft_fraction", "wasted", percent),
    Column("mean_latency_s", "s/answer", "{:.2f}".format),
    Column("identical_to_autoregressive", "identical", "{0[num_identical]}/{0[num_prompts]}".format),
)


def columns_of(rows: Sequence[Row], names: Sequence[str]) -> list[Column]:
    """The named columns in which any row has a figure."""
    return [column for column in COLUMNS if column.name in names and any(map(column.text, rows))]


def row_name(row: Row) -> str:
    """`synchronous (best: 2), embedded`."""
    name = str(row["mode"])
    if row.get("num_speculative_tokens") is not None:
        name += f" (best: {row['num_speculative_tokens']}{' as a tree' if row.get('tree') else ''})"
    if row.get("policy") is not None:
        name += f" ({row['policy']})"
    if row.get("drafter") is not None:
        name += f", {row['drafter']}"
    if row.get("batch_size", 1) not in (None, 1):
        name += f", {row['batch_size']} at a time"
    return name


_LEGEND = """\
x plain: speed over plain decoding, median and quartiles over the prompts; x best sync: over the best synchronous length
accepted: of the judged candidates; tokens/pass: committed by a target pass; per device: tokens/s of each device in use
{times}; identical: to plain decoding"""
_IDLE = "idle t, d: share of the time without work, target and draft"
_BETWEEN = "p50, p99: time between tokens"
_SHOWN = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "speedup_vs_autoregressive",
    "speedup_quartiles",
    "speedup_vs_best_synchronous",
    "acceptance_rate",
    "mean_acceptance_length",
    "identical_to_autoregressive",
)
_SHOWN_ALONE = ("target_idle_fraction", "draft_idle_fraction")
_SHOWN_IN_BATCHES = ("batch_size", "p50_inter_token_ms", "p99_inter_token_ms")


def comparison_table(rows: Sequence[Row]) -> str:
    """The rows for the terminal, and what their columns mean."""
    has_batches = any(row["batch_size"] > 1 for row in rows)
    columns = columns_of(rows, [*_SHOWN, *(_SHOWN_IN_BATCHES if has_batches else _SHOWN_ALONE)])
    lines = [(row_name({**row, "batch_size": None}), *(column.text(row) for column in columns)) for row in rows]
    legend = _LEGEND.format(times=_BETWEEN if has_batches else _IDLE)
    return f"{table(('mode', *(column.heading for column in columns)), lines)}\n\n{legend}"
