"""The gains on each category of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime.pair import pair

from amusd.commands import compare as command
from amusd.commands.categories import by_category, category_table
from amusd.config import RunConfig
from amusd.console import Console
from amusd.drafters.ngram import NgramDrafter
from amusd.settings import from_mapping
from amusd.workload import user_prompt

PLAIN, SYNC, CHAIN, AUTO = "autoregressive", "synchronous, 2 tokens, hf", "asynchronous, chain, hf", "asynchronous, hf"


def row(contestant: str, speed: float, **changes: Any) -> dict[str, Any]:
    mode = contestant.split(",", maxsplit=1)[0]
    is_plain, policy = mode == PLAIN, "chain" if contestant == CHAIN else None
    own = {"mode": mode, "drafter": None if is_plain else "hf", "policy": policy, "tokens_per_second": speed}
    return {"contestant": contestant, **own, **changes}


ROWS = [row(PLAIN, 10), row(SYNC, 15), row(CHAIN, 20), row(AUTO, 18)]


def prompt(category: str | None, *ms: float) -> dict[str, Any]:
    return {"category": category, "ms_per_token": dict(zip((PLAIN, SYNC, CHAIN, AUTO), ms, strict=True))}


PER_PROMPT = [
    prompt("math", 60, 30, 20, 60),
    prompt(None, 60, 60, 60, 60),
    prompt("math", 60, 30, 10, 60),
    prompt("qa", 60, 40, 30, 60),
    prompt("math", 60, 30, 15, 60),
]


def test_each_category_has_the_medians_of_its_own_prompts() -> None:
    found = {
        one["category"]: (one["num_prompts"], one["speedup_vs_autoregressive"], one["speedup_vs_best_synchronous"])
        for one in by_category(ROWS, PER_PROMPT)
        if one["contestant"] == CHAIN
    }
    assert found == {"math": (3, 4, 2), "other": (1, 1, 1), "qa": (1, 2, pytest.approx(4 / 3))}


def test_rows_that_share_a_pass_are_not_counted() -> None:
    rows = [*ROWS[:2], row(CHAIN, 20, batch_size=4)]
    categories = by_category(rows, PER_PROMPT)
    assert {one["contestant"] for one in categories} == {SYNC}
    assert category_table(rows, categories) == ""


@pytest.mark.parametrize("category", ["letters", None])
def test_a_comparison_shows_and_keeps_them(category: str | None, tmp_path: Path) -> None:
    config = from_mapping(
        RunConfig,
        {
            "drafter": {"kind": "ngram"},
            "policy": "chain",
            "compare": {"synchronous_lengths": [2]},
            "sampling": {"max_new_tokens": 5, "ignore_eos": True},
        },
    )
    prompts = [user_prompt("bad", 1, category), user_prompt("fade", 2)]
    with pair({"ngram": lambda: NgramDrafter(2)}) as (engine, _):
        done = command.compare(config, engine, Console(json_only=True), prompts, tmp_path)
    assert {(one["category"], one["num_prompts"]) for one in done.result["by_category"]} == (
        {("letters", 1), ("other", 1)} if category else {("other", 2)}
    )
    assert ("\nletters " in done.text) == (category is not None)
