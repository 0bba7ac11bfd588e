"""The figures of a comparison's rows: how each is called and written in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amusd.console import percent

Row = Mapping[str, Any]
"""One way to decode and its figures, as `result.json` has them."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure."""

    name: str
    """Its key in a row."""
    heading: str
    meaning: str
    write: Callable[[Any], str]

    def text(self, row: Row) -> str:
        """The figure as shown; empty where the row has none."""
        value = row.get(self.name)
        return "" if value is None else self.write(value)


def _one(value: float) -> str:
    return f"{value:.1f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _between(value: Sequence[float]) -> str:
    return f"{value[0]:.2f}-{value[1]:.2f}"


def _same(value: Row) -> str:
    return f"{value['num_identical']}/{value['num_prompts']}"


COLUMNS = (
    Column(
        "batch_size",
        "at a time",
        "Answers that are computed at a time. With several, x plain is of tokens/s, over plain decoding's of as many.",
        str,
    ),
    Column("tokens_per_second", "tokens/s", "Tokens of all answers per second, prefill included.", _one),
    Column("identical_to_autoregressive", "identical", "Answers that equal plain decoding's token for token.", _same),
    Column(
        "speedup_vs_autoregressive",
        "x plain",
        "How many times as fast as plain decoding: the median over prompts.",
        _two,
    ),
    Column(
        "speedup_quartiles",
        "quartiles",
        "Of x plain: a quarter of the prompts gained less than the first figure, a quarter more than the second.",
        _between,
    ),
    Column(
        "speedup_vs_best_synchronous",
        "x best sync",
        "Tokens per second over those of the best synchronous length with the same drafter.",
        _two,
    ),
    Column("acceptance_rate", "accepted", "Candidates accepted, of those that were verified.", percent),
    Column(
        "mean_acceptance_length",
        "tokens/pass",
        "Tokens that a target pass commits on average, the target's own included.",
        _two,
    ),
    Column("ms_per_token", "ms/token", "Milliseconds per token, prefill included.", _one),
    Column("p50_inter_token_ms", "p50, ms", "Between two passes of an answer, which bring its tokens: median.", _one),
    Column("p99_inter_token_ms", "p99, ms", "The same, which 1 % of them exceed.", _one),
    Column("time_to_first_token_ms", "first token, ms", "From the request to the first tokens of the answer.", _one),
    Column("target_idle_fraction", "target idle", "Share of the time in which the target computed nothing.", percent),
    Column("draft_idle_fraction", "draft idle", "Share of the time in which the draft computed nothing.", percent),
    Column(
        "draft_overlap_fraction", "overlap", "Share of the draft's working time that lies inside target work.", percent
    ),
    Column("num_rollbacks", "rollbacks", "How often the draft had to take tokens back.", str),
    Column("wasted_draft_fraction", "wasted", "Drafted tokens that were never accepted, of all drafted.", percent),
    Column("num_devices", "devices", "Devices in use.", str),
    Column("tokens_per_second_per_device", "tokens/s/device", "Tokens per second over the number of devices.", _one),
    Column("num_prompts", "prompts", "Prompts that were answered.", str),
    Column("num_tokens", "tokens", "Tokens of all answers.", str),
)


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


def row_kind(row: Row) -> str:
    """`row_name` without what was tuned: the same from job to job of a sweep."""
    return row_name({**row, "num_speculative_tokens": None})
