"""Ways to decode, and the rows of figures that `compare` and `simulate` make of them, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from amusd.config import DecodingConfig, RunConfig
from amusd.console import percent, table
from amusd.policies.factory import policy_name
from amusd.runtime.devices import devices_of

if TYPE_CHECKING:
    from amusd.answer import Generation

Row = Mapping[str, Any]
"""One way to decode and its figures, as `result.json` has them."""
TIE = 0.02
"""A difference in speed below this counts as none."""
LEGEND_WIDTH = 118


def settings_of(decoding: DecodingConfig) -> dict[str, Any]:
    """The settings that name a schedule in a row; None for one without effect."""
    policy, is_synchronous = policy_name(decoding), decoding.mode == "synchronous"
    in_blocks = is_synchronous or policy == "windowed"
    return {
        "mode": decoding.mode,
        "policy": policy,
        "num_speculative_tokens": decoding.num_speculative_tokens if in_blocks else None,
        "tree": (is_synchronous and decoding.tree) or None,
        "min_candidates": decoding.min_candidates if policy in ("chain", "branching") else None,
    }


def row_name(row: Row) -> str:
    """`synchronous (best: 2 tokens), embedded`, `asynchronous (chain, waits for 2), ngram, 4 at a time`."""
    length, wait, size = row.get("num_speculative_tokens"), row.get("min_candidates"), row.get("batch_size", 1)
    block = f"{length} {'tree step' if row.get('tree') else 'token'}{'s' if length != 1 else ''}"
    block = f"best: {block}" if row.get("tuned") else block if length else ""
    settings = ", ".join(filter(None, (row.get("policy"), block, "" if wait is None else f"waits for {wait}")))
    mode = f"{row['mode']} ({settings})" if settings else row["mode"]
    return ", ".join(filter(None, (mode, row.get("drafter"), f"{size} at a time" if size > 1 else "")))


@dataclass(eq=False)
class Contestant:
    """One way to decode, and its answers in the order of the prompts, which repeat if it needs more of them."""

    decoding: DecodingConfig
    drafter: str | None
    batch_size: int = 1
    num_devices: int = 1
    answers: list[Generation] = field(default_factory=list)
    seconds: float = 0.0
    """In which the answers were made."""

    @property
    def settings(self) -> dict[str, Any]:
        """What names it in a row."""
        return {**settings_of(self.decoding), "drafter": self.drafter, "batch_size": self.batch_size}

    @property
    def name(self) -> str:
        """The name for people."""
        return row_name(self.settings)


def contestants_of(config: RunConfig) -> list[Contestant]:
    """Plain decoding, then for each drafter the synchronous lengths and the asynchronous policies.

    `mode=synchronous` compares that mode with plain decoding, `mode=autoregressive` only measures it. Repeated for each
    batch size; plain decoding of one answer at a time comes first.
    """
    decoding, devices = config.decoding(), devices_of(config.engine_for("compare"))
    plain = replace(decoding, mode="autoregressive")
    found: list[tuple[DecodingConfig, str | None]] = [(plain, None)]
    for drafter in config.engine().drafters:
        has_trees = config.compare.trees and drafter.can.tree and config.sampling.rule != "rejection"
        found += [
            (replace(decoding, mode="synchronous", num_speculative_tokens=length, tree=is_tree), drafter.kind)
            for is_tree in dict.fromkeys((decoding.tree, *((False, True) if has_trees else ())))
            for length in config.synchronous_lengths()
        ]
        policies = config.asynchronous_policies() if drafter.can.runs_ahead else ()
        found += [(replace(decoding, policy=policy), drafter.kind) for policy in policies]
    sized = dict.fromkeys([(plain, None, 1), *((*one, size) for size in config.compare.batch_sizes for one in found)])
    return [Contestant(*one, num_devices=count_devices(devices if one[1] else devices[:-1])) for one in sized]


def count_devices(devices: Sequence[str]) -> int:
    """Number of devices: each GPU counts once, and a CPU for each rank (its cores)."""
    return len({*devices} - {"cpu"}) + devices.count("cpu")


class Column(NamedTuple):
    """One figure."""

    name: str
    heading: str
    write: Callable[[Any], str]
    meaning: str = ""

    def text(self, row: Row) -> str:
        """The figure as shown; empty where the row has none."""
        value = row.get(self.name)
        return "" if value is None else self.write(value)


COLUMNS = (
    Column("tokens_per_second", "tokens/s", "{:.1f}".format),
    Column("tokens_per_second_per_device", "per device", "{:.1f}".format, "tokens/s of each device in use"),
    Column("speedup_vs_autoregressive", "x plain", "{:.2f}".format, "speed over plain decoding, median of the answers"),
    Column("speedup_quartiles", "quartiles", "{0[0]:.2f}-{0[1]:.2f}".format),
    Column("speedup_vs_best_synchronous", "x best sync", "{:.2f}".format, "over the best synchronous length"),
    Column("acceptance_rate", "accepted", percent, "of the judged candidates"),
    Column("tokens_per_verification", "tokens/pass", "{:.2f}".format, "committed by a target pass"),
    Column("p50_inter_token_ms", "p50 ms", "{:.1f}".format, "time between tokens"),
    Column("p99_inter_token_ms", "p99 ms", "{:.1f}".format),
    Column("target_idle_fraction", "idle t", percent, "time without work, target"),
    Column("draft_idle_fraction", "idle d", percent, "the same, draft"),
    Column("wasted_draft_fraction", "wasted", percent, "of the drafted tokens"),
    Column("mean_latency_s", "s/answer", "{:.2f}".format, "from an answer's begin to its end"),
    Column("identical_to_autoregressive", "identical", "{0[num_identical]}/{0[num_prompts]}".format, "to plain"),
)


def rows_table(rows: Sequence[Row], hidden: Sequence[str] = (), leading: Sequence[Row] = ()) -> str:
    """A table of the columns in which any row has a figure, without `hidden` ones, and a legend of their meanings.

    `leading`: for each row headings and values of columns before these.
    """
    shown = [column for column in COLUMNS if column.name not in hidden and any(map(column.text, rows))]
    lines = [
        (*map(str, before.values()), row_name(row), *(column.text(row) for column in shown))
        for before, row in zip(leading or [{}] * len(rows), rows, strict=True)
    ]
    header = (*next(iter(leading), {}), "mode", *(column.heading for column in shown))
    meanings = "; ".join(f"{column.heading}: {column.meaning}" for column in shown if column.meaning)
    return f"{table(header, lines)}\n\n{textwrap.fill(meanings, LEGEND_WIDTH)}"


def advice(rows: Sequence[Row]) -> str:
    """One sentence: the fastest setting, and what it gains. Empty without a choice; the first row is plain decoding.

    `auto`, which has the least to tune, wins among settings that are equally fast.
    """
    plain, *drafting = rows
    if not drafting:
        return ""
    best = max(drafting, key=_gain)
    best = next((row for row in drafting if row["policy"] == "auto" and _gain(row) > (1 - TIE) * _gain(best)), best)
    gain = f"{_gain(best):.2f} times as fast as plain decoding"
    if _gain(best) <= 1 + TIE:
        return f"Use {_typed(plain)}: speculation does not pay on this pair; {_typed(best)} is {gain}."
    rival = max((row for row in drafting if row["mode"] != best["mode"]), key=_gain, default=None)
    if rival is None:
        return f"Use {_typed(best)}: {gain}."
    return f"Use {_typed(best)}: {gain}, and {_gain(best) / _gain(rival):.2f} times as fast as {_typed(rival)}."


def _gain(row: Row) -> float:
    return float(row["speedup_vs_autoregressive"])


def _typed(row: Row) -> str:
    keys = ("mode", "drafter", "policy", "num_speculative_tokens", "tree", "min_candidates")
    values = {key: "true" if row.get(key) is True else row.get(key) for key in keys}
    return " ".join(f"{key}={value}" for key, value in values.items() if value not in (None, ""))
