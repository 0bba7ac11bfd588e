"""The sentence of advice under the tables of `compare` and `simulate`: which setting to use here, and what it gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amusd.types import Mode

TIE = 0.02
"""A difference in speed below this counts as none."""
STANDARD_ERRORS = 2.0
"""A difference of fewer standard errors counts as none."""
_SETTINGS = ("mode", "drafter", "policy", "num_speculative_tokens", "tree", "min_candidates")


@dataclass(frozen=True, slots=True)
class Option:
    """A setting that a user can choose."""

    overrides: str
    """The setting, as arguments of the command line."""
    mode: str
    policy: str | None
    speedup: float
    """Speed relative to plain decoding."""
    error: float
    """Standard error of `speedup`, relative to it; 0 if it is not known."""
    tokens_per_pass: float

    @classmethod
    def of(cls, row: Mapping[str, Any], speedup: float, error: float, *, names_drafter: bool = False) -> Option:
        """Return the option that a row of a table shows."""
        values = {key: row.get(key) for key in _SETTINGS if names_drafter or key != "drafter"}
        shown = {key: "true" if value is True else value for key, value in values.items() if value is not False}
        overrides = " ".join(f"{key}={value}" for key, value in shown.items() if value is not None)
        return cls(overrides, row["mode"], row["policy"], speedup, error, row["mean_acceptance_length"])

    def ties_with(self, other: Option) -> bool:
        """Whether no difference in speed can be told."""
        noise = STANDARD_ERRORS * math.hypot(self.error, other.error)
        return abs(math.log(self.speedup / other.speedup)) <= math.log1p(max(TIE, noise))


def advice(options: Sequence[Option]) -> str:
    """Return one sentence, empty without a choice. Among settings that tie, the one with the least to tune wins."""
    plain = next(option for option in options if option.mode == Mode.AUTOREGRESSIVE.value)
    drafting = [option for option in options if option is not plain]
    if not drafting:
        return ""
    fastest = max(drafting, key=lambda option: option.speedup)
    if fastest.speedup < plain.speedup or fastest.ties_with(plain):
        pass_times = fastest.tokens_per_pass / fastest.speedup
        return (
            f"Use {plain.overrides}: speculation does not pay on this pair, since even with {fastest.overrides} a pass "
            f"commits {fastest.tokens_per_pass:.2f} tokens but takes {pass_times:.2f} times as long, waits included."
        )
    equals = [option for option in drafting if option.mode == fastest.mode and option.ties_with(fastest)]
    best = next((option for option in equals if option.policy == "auto"), fastest)
    gain = f"{best.speedup:.2f} times as fast as plain decoding"
    others = [option for option in drafting if option.mode != best.mode]
    if not others:
        return f"Use {best.overrides}: {gain}."
    rival = max(others, key=lambda option: option.speedup)
    if best.ties_with(rival):
        return f"Use {best.overrides} or {rival.overrides}: both are about {gain}."
    return f"Use {best.overrides}: {gain}, and {best.speedup / rival.speedup:.2f} times as fast as {rival.overrides}."
