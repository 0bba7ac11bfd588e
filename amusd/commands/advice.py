"""The advice under the tables of `compare` and `simulate`: which setting to use, and its gain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amusd.commands.tables import Row

TIE = 0.02
"""A difference in speed below this counts as none."""
STANDARD_ERRORS = 2.0
"""A difference of fewer standard errors counts as none."""
_SETTINGS = ("mode", "drafter", "policy", "num_speculative_tokens", "tree", "min_candidates")


def advice(rows: Sequence[Row]) -> str:
    """One sentence; empty without a choice: plain decoding is the first of `rows`.

    Among ties the setting with the least to tune wins.
    """
    plain, *drafting = rows
    if not drafting:
        return ""
    keys = _SETTINGS if len({row.get("drafter") for row in drafting}) > 1 else [*_SETTINGS[:1], *_SETTINGS[2:]]

    def setting(row: Row) -> str:
        values = {key: row.get(key) for key in keys}
        shown = {key: "true" if value is True else value for key, value in values.items() if value is not False}
        return " ".join(f"{key}={value}" for key, value in shown.items() if value is not None)

    fastest = max(drafting, key=_gain)
    if _gain(fastest) < _gain(plain) or _is_tie(fastest, plain):
        tokens = fastest["mean_acceptance_length"]
        return (
            f"Use {setting(plain)}: speculation does not pay on this pair, since even with {setting(fastest)} a pass "
            f"commits {tokens:.2f} tokens but takes {tokens / _gain(fastest):.2f} times as long, waits included."
        )
    equals = [row for row in drafting if row["mode"] == fastest["mode"] and _is_tie(row, fastest)]
    best = next((row for row in equals if row["policy"] == "auto"), fastest)
    gain = f"{_gain(best):.2f} times as fast as plain decoding"
    others = [row for row in drafting if row["mode"] != best["mode"]]
    if not others:
        return f"Use {setting(best)}: {gain}."
    rival = max(others, key=_gain)
    if _is_tie(best, rival):
        return f"Use {setting(best)} or {setting(rival)}: both are about {gain}."
    return f"Use {setting(best)}: {gain}, and {_gain(best) / _gain(rival):.2f} times as fast as {setting(rival)}."


def _gain(row: Row) -> float:
    return float(row["speedup_vs_autoregressive"])


def _is_tie(one: Row, other: Row) -> bool:
    noise = STANDARD_ERRORS * math.hypot(_error(one), _error(other))
    return abs(math.log(_gain(one) / _gain(other))) <= math.log1p(max(TIE, noise))


def _error(row: Row) -> float:
    """The relative standard error: of a median of n, 0.93 interquartile ranges / sqrt(n); 0 where none is known."""
    if not row.get("speedup_quartiles"):
        return 0.0
    lower, upper = row["speedup_quartiles"]
    return float(0.93 * (upper - lower) / _gain(row) / math.sqrt(row["num_prompts"]))
