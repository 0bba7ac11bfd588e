"""The sentence of advice under the tables of `compare` and `simulate`: which setting to use here, and what it gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from amusd.commands.tables import Row

TIE = 0.02
"""A difference in speed below this counts as none."""
STANDARD_ERRORS = 2.0
"""A difference of fewer standard errors counts as none."""
_SETTINGS = ("mode", "drafter", "policy", "num_speculative_tokens", "tree", "min_candidates")


class Option(NamedTuple):
    """A setting that a user can choose."""

    row: Row
    """Its row of the table."""
    speedup: float
    """Speed relative to plain decoding."""
    error: float
    """Standard error of `speedup`, relative to it; 0 if it is not known."""

    def ties_with(self, other: Option) -> bool:
        """Whether no difference in speed can be told."""
        noise = STANDARD_ERRORS * math.hypot(self.error, other.error)
        return abs(math.log(self.speedup / other.speedup)) <= math.log1p(max(TIE, noise))


def advice(options: Sequence[Option]) -> str:
    """Return one sentence, empty without a choice: plain decoding is the first of `options`.

    Among settings that tie, the one with the least to tune wins.
    """
    plain, *drafting = options
    if not drafting:
        return ""
    names_drafter = len({option.row.get("drafter") for option in drafting}) > 1

    def setting(option: Option) -> str:
        values = {key: option.row.get(key) for key in _SETTINGS if names_drafter or key != "drafter"}
        shown = {key: "true" if value is True else value for key, value in values.items() if value is not False}
        return " ".join(f"{key}={value}" for key, value in shown.items() if value is not None)

    fastest = max(drafting, key=lambda option: option.speedup)
    if fastest.speedup < plain.speedup or fastest.ties_with(plain):
        tokens = fastest.row["mean_acceptance_length"]
        return (
            f"Use {setting(plain)}: speculation does not pay on this pair, since even with {setting(fastest)} a pass "
            f"commits {tokens:.2f} tokens but takes {tokens / fastest.speedup:.2f} times as long, waits included."
        )
    equals = [option for option in drafting if _mode(option) == _mode(fastest) and option.ties_with(fastest)]
    best = next((option for option in equals if option.row["policy"] == "auto"), fastest)
    gain = f"{best.speedup:.2f} times as fast as plain decoding"
    others = [option for option in drafting if _mode(option) != _mode(best)]
    if not others:
        return f"Use {setting(best)}: {gain}."
    rival = max(others, key=lambda option: option.speedup)
    if best.ties_with(rival):
        return f"Use {setting(best)} or {setting(rival)}: both are about {gain}."
    return f"Use {setting(best)}: {gain}, and {best.speedup / rival.speedup:.2f} times as fast as {setting(rival)}."


def _mode(option: Option) -> str:
    return str(option.row["mode"])
