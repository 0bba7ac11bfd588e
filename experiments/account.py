"""Where a speed-up goes: what the draft's acceptance allows, and what each loss takes of it.

    speed-up  =  tokens a pass  x  time of a pass (plain decoding's, relative to this one's)
                                x  share of the time that is passes (relative to plain decoding's)

Tokens a pass are the chain bound for the acceptance and the depth that were measured: every pass as quick as plain
decoding's, and nothing between two of them. 1 / (1 - a) is the bound for any depth, as every rejection needs a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from amusd.commands.tables import row_kind
from amusd.console import table

Row = dict[str, Any]
PASSES = ("full_passes", "partial_passes", "passes_without_candidates")


def account(rows: Sequence[Row]) -> list[Row]:
    """Of each row of a comparison whose first row is plain decoding; factors of its speed-up in tokens per second."""
    plain = rows[0]
    return [
        {
            "kind": row_kind(row),
            "acceptance": acceptance(row),
            "bound_of_acceptance": bound(acceptance(row)),
            "tokens_per_pass": row["mean_acceptance_length"],
            "pass_time": pass_ms(plain) / pass_ms(row),
            "share_in_passes": in_passes(row) / in_passes(plain),
            "speedup": row["tokens_per_second"] / plain["tokens_per_second"],
            "of_tokens_per_pass": row["tokens_per_second"] / plain["tokens_per_second"] / row["mean_acceptance_length"],
            "waits": row["time"]["target"]["waits"],
            "prefill": row["time"]["target"]["prefill"],
            "host": row["time"]["target"]["host"],
        }
        for row in rows
        if row["mode"] != "autoregressive"
    ]


def in_passes(row: Row) -> float:
    """Share of the time."""
    return sum(row["time"]["target"][name] for name in PASSES)


def pass_ms(row: Row) -> float:
    """Mean time of a pass."""
    total_ms = row["num_tokens"] * row["ms_per_token"]
    return float(in_passes(row) * total_ms / row["num_passes"])


def acceptance(row: Row) -> float:
    """Of a candidate behind the right prefix: the first rejected one of a pass was tested, those behind it were not."""
    by_length = row["speculative_decoding"]["acceptance_histogram_by_draft_length"]
    passes = [(int(length), num, count) for length, counts in by_length.items() for num, count in enumerate(counts)]
    num_accepted = sum(num * count for _, num, count in passes)
    num_tested = sum((num + (num < length)) * count for length, num, count in passes)
    return num_accepted / num_tested if num_tested else 0.0


def bound(a: float) -> float:
    """Tokens a pass, whatever the depth."""
    return math.inf if a == 1 else 1 / (1 - a)


def text(accounts: Sequence[Row]) -> str:
    """A line for each."""
    head = ("mode", "acceptance", "1/(1-a)", "tokens/pass", "x pass time", "x in passes", "= x plain", "of tokens/pass")
    lines = [
        (
            one["kind"],
            f"{one['acceptance']:.2f}",
            f"{one['bound_of_acceptance']:.2f}",
            f"{one['tokens_per_pass']:.2f}",
            f"{one['pass_time']:.2f}",
            f"{one['share_in_passes']:.2f}",
            f"{one['speedup']:.2f}",
            f"{one['of_tokens_per_pass']:.2f}",
        )
        for one in accounts
    ]
    return table(head, lines)
