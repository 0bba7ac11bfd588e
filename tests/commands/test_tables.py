"""Names, columns and the advice under a table, for rows that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from amusd.commands.tables import advice, row_name, rows_table, summary_of
from amusd.config import RunConfig
from amusd.settings import from_mapping

Row = dict[str, Any]
PLAIN = {"mode": "autoregressive", "policy": None, "speedup_vs_autoregressive": 1.0}
BLOCKS = "mode=synchronous num_speculative_tokens=4 tree=true"
SLOW = "1.01 times as fast as plain decoding"
CHAIN, AUTO = "mode=asynchronous policy=chain min_candidates=0", "mode=asynchronous policy=auto"


def blocks(speedup: float) -> Row:
    named = {"mode": "synchronous", "policy": None, "num_speculative_tokens": 4, "tree": True}
    return {**named, "speedup_vs_autoregressive": speedup}


def asynchronous(policy: str, speedup: float, **settings: Any) -> Row:
    return {"mode": "asynchronous", "policy": policy, "speedup_vs_autoregressive": speedup, **settings}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [asynchronous("chain", 2.8, min_candidates=0), blocks(2.0), asynchronous("auto", 2.5)],
            f"Use {CHAIN}: 2.80 times as fast as plain decoding, and 1.40 times as fast as {BLOCKS}.",
        ),
        (
            [asynchronous("chain", 2.8, min_candidates=0), asynchronous("auto", 2.76)],
            f"Use {AUTO}: 2.76 times as fast as plain decoding.",
        ),
        (
            [blocks(1.01), asynchronous("auto", 0.5)],
            f"Use mode=autoregressive: speculation does not pay on this pair; {BLOCKS} is {SLOW}.",
        ),
        ([], ""),
    ],
    ids=["asynchronous", "auto beside a chain", "plain", "plain alone"],
)
def test_the_advice_names_the_fastest_setting_and_what_it_gains(options: list[Row], sentence: str) -> None:
    assert advice([PLAIN, *options]) == sentence


@pytest.mark.parametrize(
    ("settings", "machine", "pair"),
    [
        ({"target": {"kind": "hf", "model": "org/Big"}, "drafter": {"kind": "hf", "model": "/models/small"},
          "hardware": {"devices": ["cuda:0", "cuda:1"]}}, "NVIDIA H200 + NVIDIA H200", "Big, small"),
        ({"drafter": {"kind": "hf", "model": "s"}, "hardware": {"devices": ["cuda:0", "cpu"]}},
         "NVIDIA H200 + A CPU, 16 cores", "embedded, s"),
        ({"drafter": {"kind": "hf", "model": "s"}, "hardware": {"devices": ["cpu", "cpu"]}},
         "A CPU, 16 cores", "embedded, s"),
    ],
)  # fmt: skip
def test_a_comparison_is_one_row_of_the_fastest_of_each_mode(settings: Any, machine: str, pair: str) -> None:
    cpu, gpus = {"model": "A CPU", "allowed_cores": 16}, ["NVIDIA H200, 143771 MiB, 570.1"] * 8
    config, environment = from_mapping(RunConfig, settings), {"cpu": cpu, "gpus": gpus, "commit": "c0ffee"}
    rows = [
        {"mode": mode, "drafter": "hf", "tokens_per_second": speed, "batch_size": size, "mean_acceptance_length": 2.5}
        for mode, speed, size in (
            ("autoregressive", 10.0, 1), ("synchronous", 20.0, 1), ("asynchronous", 30.0, 1), ("asynchronous", 25.0, 1),
            ("synchronous", 99.0, 8),
        )
    ]  # fmt: skip
    summary = summary_of(rows, config, environment)
    assert (summary["machine"], summary["pair"]) == (machine, pair)
    figures = ("autoregressive", "synchronous", "asynchronous", "ratio", "acceptance_length")
    assert [summary[name] for name in figures] == [10.0, 20.0, 30.0, 1.5, 2.5]
    assert summary_of(rows[:2] + rows[4:], config, environment) == {}


def test_a_table_shows_what_rows_have_and_says_what_it_means() -> None:
    best = {**blocks(1.5), "tuned": {"4": 3.0}, "drafter": "embedded", "batch_size": 8, "acceptance_rate": 0.5}
    assert row_name(best) == "synchronous (best: 4 tree steps), embedded, 8 at a time"
    assert row_name(asynchronous("chain", 2.0, min_candidates=0)) == "asynchronous (chain, waits for 0)"
    shown = rows_table([PLAIN, best | {"draft_idle_fraction": 0.5}], ["draft_idle_fraction"])
    table, legend = shown.split("\n\n")
    header, _, first, second = table.splitlines()
    assert header.split() == ["mode", "x", "plain", "accepted"]
    assert (first.split()[-1], second.split()[-3:]) == ("1.00", ["1.50", "50", "%"])
    assert legend == "x plain: speed over plain decoding, median of the answers; accepted: of the judged candidates"
