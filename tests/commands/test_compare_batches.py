"""`amusd compare compare.batch_sizes=[...]`: loads of several answers at a time, beside plain decoding of one."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from runtime.pair import pair

from amusd.commands.compare import run_comparison
from amusd.commands.contestants import Comparison, rows_of
from amusd.commands.run import answer
from amusd.config import RunConfig
from amusd.console import Console
from amusd.drafters.ngram import NgramDrafter
from amusd.settings import from_mapping
from amusd.workload import user_prompt

PROMPTS = [user_prompt("bad", 1), user_prompt("a" * 500, 2), user_prompt("fade", 3), user_prompt("deafbead", 5)]
NGRAM = {"ngram": lambda: NgramDrafter(2)}


def run_config(*sizes: int, **changes: object) -> RunConfig:
    values: dict[str, object] = {
        "mode": "synchronous",
        "num_speculative_tokens": 2,
        "drafter": {"kind": "ngram"},
        "compare": {"batch_sizes": list(sizes)},
        "sampling": {"max_new_tokens": 9, "ignore_eos": True},
        **changes,
    }
    return from_mapping(RunConfig, values)


def compared(config: RunConfig, **options: Any) -> tuple[Comparison, list[dict[str, Any]]]:
    comparison = Comparison.of(config)
    with pair(NGRAM, max_num_seqs=config.engine_for("compare").max_num_seqs, pass_seconds=0.0) as (engine, _):
        run_comparison(engine, config, PROMPTS, comparison, options.get("progress", lambda *_: None))
        return comparison, rows_of(comparison, engine)


def test_every_mode_is_compared_at_each_size_and_all_with_plain_decoding_of_one() -> None:
    comparison, rows = compared(run_config(1, 2, 5))
    assert [(row["mode"], row["batch_size"]) for row in rows] == [
        (mode, size) for size in (1, 2, 5) for mode in ("autoregressive", "synchronous")
    ]
    assert [row["num_prompts"] for row in rows] == [3, 3, 3, 3, 6, 6]  # each twice where there are five places
    for row in rows:
        number = row["num_prompts"]
        assert row["identical_to_autoregressive"]["num_identical"] == number
        assert row["num_tokens"] == 9 * number
        assert 0 < row["p50_inter_token_ms"] <= row["p99_inter_token_ms"]
        is_plain = row["mode"] == "autoregressive"
        assert (row["speedup_vs_autoregressive"] == 1) == is_plain
        assert row["speedup_vs_best_synchronous"] == (None if is_plain else 1)
        if row["batch_size"] > 1:
            index = [contestant.name for contestant in comparison.contestants].index(row["contestant"])
            assert row["tokens_per_second"] == row["num_tokens"] / comparison.seconds[index]
            assert row["target_idle_fraction"] is row["draft_idle_fraction"] is row["speedup_quartiles"] is None
    assert len({row["contestant"] for row in rows}) == 6


def test_a_run_keeps_a_table_a_figure_and_every_answer(tmp_path: Path) -> None:
    config = run_config(1, 4)
    (tmp_path / "environment.json").write_text("{}")
    out = io.StringIO()
    with pair(NGRAM, max_num_seqs=4, pass_seconds=0.0) as (engine, _):
        assert answer("compare", config, engine, Console(out=out), PROMPTS, tmp_path) == 0
    header, _, *lines = out.getvalue().partition("\n\n")[0].splitlines()
    assert header.split()[:4] == ["mode", "at", "a", "time"]
    assert [line.split()[-1] for line in lines[1:]] == ["3/3", "6/6", "6/6"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert [len(row["sequence_ids"]) for row in result["rows"]] == [3, 3, 6, 6]
    assert "synchronous (best: 2), ngram, 4 at a time" in (tmp_path / "comparison.svg").read_text()
    rows = list(csv.DictReader((tmp_path / "prompts.csv").read_text().splitlines()))
    assert [(row["prompt"], row["batch_size"], row["repeat"]) for row in rows if row["mode"] == "autoregressive"] == [
        (prompt, size, repeat) for prompt in "135" for size, repeat in (("1", "1"), ("4", "1"), ("4", "2"))
    ]
    assert {row["identical"] for row in rows} == {"True"}
