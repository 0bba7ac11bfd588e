"""The rows of `compare` and `simulate`: their names, the best of each kind, and a text with advice below."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import PurePath
from typing import Any, NamedTuple, get_args

from amusd.config import DecodingConfig, RunConfig
from amusd.console import percent, table
from amusd.policies.factory import policy_name
from amusd.runtime.devices import devices_of
from amusd.types import Mode

Row = dict[str, Any]
"""One way to decode and its figures, as `result.json` has them."""
TIE = 0.02
"""A smaller relative difference in speed counts as none."""
LEGEND_WIDTH = 118
_IN_BATCHES = ("p50_inter_token_ms", "p99_inter_token_ms")
"""Columns hidden at batch size 1."""
_ALONE = ("target_idle_fraction", "draft_idle_fraction")
"""Columns hidden in batches."""
OF_CATEGORIES = ("mean_acceptance_length", "tokens_per_second", "speedup_vs_autoregressive")
"""Figures that a row also has for each category of prompts."""


def settings_of(decoding: DecodingConfig) -> dict[str, Any]:
    """The settings that name a schedule in a row; None: the setting has no effect."""
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
    """Name: `synchronous (best: 2 tokens), embedded`, `asynchronous (chain, waits for 2), ngram, 4 at a time`."""
    length, wait, size = row.get("num_speculative_tokens"), row.get("min_candidates"), row.get("batch_size", 1)
    block = f"{length} {'tree step' if row.get('tree') else 'token'}{'s' if length != 1 else ''}"
    block = f"best: {block}" if row.get("tuned") else block if length else ""
    settings = ", ".join(filter(None, (row.get("policy"), block, "" if wait is None else f"waits for {wait}")))
    mode = f"{row['mode']} ({settings})" if settings else row["mode"]
    return ", ".join(filter(None, (mode, row.get("drafter"), f"{size} at a time" if size > 1 else "")))


class Column(NamedTuple):
    """A column: one figure."""

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
    Column("mean_acceptance_length", "length", "{:.2f}".format, "of acceptance, 1 + accepted / passes with candidates"),
    Column("tokens_per_verification", "tokens/pass", "{:.2f}".format, "committed by a target pass"),
    Column("p50_inter_token_ms", "p50 ms", "{:.1f}".format, "time between tokens"),
    Column("p99_inter_token_ms", "p99 ms", "{:.1f}".format),
    Column("target_idle_fraction", "idle t", percent, "time without work, target"),
    Column("draft_idle_fraction", "idle d", percent, "the same, draft"),
    Column("wasted_draft_fraction", "wasted", percent, "of the drafted tokens"),
    Column("mean_latency_s", "s/answer", "{:.2f}".format, "from an answer's begin to its end"),
    Column("identical_to_autoregressive", "identical", "{0[num_identical]}/{0[num_prompts]}".format, "to plain"),
)


def report(rows: Sequence[Row], hidden: Sequence[str] = (), summary: Row | None = None) -> str:
    """The text of all rows: a table, advice for each batch size, figures by category, and `summary` in a line."""
    sizes = dict.fromkeys(row.get("batch_size", 1) for row in rows)
    advices = {size: advice([row for row in rows if row.get("batch_size", 1) == size]) for size in sizes}
    lines = [f"{size} at a time: {text}" if len(sizes) > 1 else text for size, text in advices.items() if text]
    hidden = [*hidden, "mean_acceptance_length"]  # a column of the categories' table
    shown = rows_table(rows, [*hidden, *(_ALONE if max(sizes) > 1 else _IN_BATCHES)])
    known = {key: value for key, value in (summary or {}).items() if value is not None}  # no commit outside a checkout
    values = [f"{key}: {round(value, 2) if isinstance(value, float) else value}" for key, value in known.items()]
    return "\n\n".join(filter(None, (shown, "\n".join(lines), _categories_table(rows), "; ".join(values))))


def rows_table(rows: Sequence[Row], hidden: Sequence[str] = (), leading: Sequence[Row] = ()) -> str:
    """A table of all columns in which a row has a figure, without `hidden` ones, and a legend.

    `leading`: for each row, headings and values of further columns on the left.
    """
    shown = [column for column in COLUMNS if column.name not in hidden and any(map(column.text, rows))]
    lines = [
        (*map(str, before.values()), row_name(row), *(column.text(row) for column in shown))
        for before, row in zip(leading or [{}] * len(rows), rows, strict=True)
    ]
    header = (*next(iter(leading), {}), "mode", *(column.heading for column in shown))
    meanings = "; ".join(f"{column.heading}: {column.meaning}" for column in shown if column.meaning)
    return f"{table(header, lines)}\n\n{textwrap.fill(meanings, LEGEND_WIDTH)}"


def _categories_table(rows: Sequence[Row]) -> str:
    """A table of all rows for each category of prompts; empty without categories."""
    found = ((name, row | own) for row in rows for name, own in row.get("categories", {}).items())
    shown = sorted(found, key=itemgetter(0))
    hidden = [column.name for column in COLUMNS if column.name not in OF_CATEGORIES]
    return rows_table([row for _, row in shown], hidden, [{"category": name} for name, _ in shown]) if shown else ""


def summary_of(rows: Sequence[Row], config: RunConfig, environment: Row | None) -> dict[str, Any]:
    """A row of `experiments/machines`: the fastest of each mode, one answer at a time, in tokens per second.

    Empty unless all modes were compared, and the environment is known.
    """
    alone = sorted((row for row in rows if row["batch_size"] == 1), key=itemgetter("tokens_per_second"))
    best = {row["mode"]: row for row in alone}
    if environment is None or len(best) < len(get_args(Mode)):
        return {}
    speeds = {mode: best[mode]["tokens_per_second"] for mode in get_args(Mode)}
    engine, own, cpu = config.engine_for("compare"), best["asynchronous"], environment["cpu"]
    used = [line.split(",")[0] for line in environment["gpus"][: len({*devices_of(engine)} - {"cpu"})]]
    used += [f"{cpu['model']}, {cpu['allowed_cores']} cores"] if "cpu" in devices_of(engine) else []
    target = config.target.model or config.hardware.synthetic or config.target.kind
    drafter = next(one.model or one.kind for one in engine.drafters if one.kind == own["drafter"])
    return {
        "machine": " + ".join(used),
        "pair": f"{PurePath(target).name}, {PurePath(drafter).name}",
        **speeds,
        "ratio": speeds["asynchronous"] / speeds["synchronous"],
        "acceptance_length": own["mean_acceptance_length"] or 1.0,
        "commit": environment["commit"],
    }


def with_the_best(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Plain decoding, then for each drafter the best synchronous and all asynchronous rows."""
    plain, *others = rows
    for row in rows:
        if row["speedup_vs_autoregressive"] is None:
            row["speedup_vs_autoregressive"] = row["tokens_per_second"] / plain["tokens_per_second"]
    yield plain
    for drafter in dict.fromkeys(row["drafter"] for row in others):
        own = [row for row in others if row["drafter"] == drafter]
        blocks = [row for row in own if row["mode"] == "synchronous"]
        best = max(blocks, key=lambda row: float(row["tokens_per_second"]), default=None)
        if best is not None:
            best["tuned"] = {
                f"{row['num_speculative_tokens']}{' as a tree' if row['tree'] else ''}": row["tokens_per_second"]
                for row in blocks
            }
            for row in own:
                row["speedup_vs_best_synchronous"] = row["tokens_per_second"] / best["tokens_per_second"]
        yield from (row for row in own if row is best or row["mode"] != "synchronous")


def advice(rows: Sequence[Row]) -> str:
    """One sentence: the fastest setting, and its gain. Empty if plain decoding, the first row, is alone.

    `auto`, which has the least to tune, wins among equally fast settings.
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
