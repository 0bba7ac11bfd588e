"""The advice under a table, for tables that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from amusd.commands.advice import advice

Row = dict[str, Any]


def option(mode: str, speedup: float, error: float = 0.005, tokens_per_pass: float = 1.0, **setting: Any) -> Row:
    half = error * speedup * 4 / 0.93 / 2
    figures = {"speedup_vs_autoregressive": speedup, "speedup_quartiles": [speedup - half, speedup + half]}
    return {
        "mode": mode,
        "policy": None,
        "mean_acceptance_length": tokens_per_pass,
        "num_prompts": 16,
        **figures,
        **setting,
    }


def blocks(speedup: float, error: float = 0.005, tokens_per_pass: float = 1.0) -> Row:
    return option("synchronous", speedup, error, tokens_per_pass, num_speculative_tokens=4, tree=True)


def chain(speedup: float, error: float = 0.005) -> Row:
    return option("asynchronous", speedup, error, policy="chain", min_candidates=0)


def auto(speedup: float, error: float = 0.005) -> Row:
    return option("asynchronous", speedup, error, policy="auto")


PLAIN = option("autoregressive", 1.0, 0.0)
BLOCKS = "mode=synchronous num_speculative_tokens=4 tree=true"
CHAIN, AUTO = "mode=asynchronous policy=chain min_candidates=0", "mode=asynchronous policy=auto"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [chain(2.8), blocks(2.0), auto(2.5)],
            f"Use {CHAIN}: 2.80 times as fast as plain decoding, and 1.40 times as fast as {BLOCKS}.",
        ),
        ([chain(2.8), auto(2.76)], f"Use {AUTO}: 2.76 times as fast as plain decoding."),
        (
            [blocks(2.0, error=0.05), auto(2.2, error=0.05)],
            f"Use {AUTO} or {BLOCKS}: both are about 2.20 times as fast as plain decoding.",
        ),
        (
            [blocks(0.8, tokens_per_pass=1.2), auto(0.5)],
            (
                f"Use mode=autoregressive: speculation does not pay on this pair, since even with {BLOCKS} a pass "
                "commits 1.20 tokens but takes 1.50 times as long, waits included."
            ),
        ),
        ([], ""),
    ],
    ids=["asynchronous", "auto beside a chain", "a tie in noise", "plain", "plain alone"],
)
def test_the_advice_names_the_fastest_setting_and_what_it_gains(options: list[Row], sentence: str) -> None:
    assert advice([PLAIN, *options]) == sentence
