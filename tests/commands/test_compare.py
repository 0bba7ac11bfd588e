"""`amusd compare`: its counts, files and tables, also if a draft is lost on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.draft_processes import survivor
from runtime.pair import TIMEOUT_SECONDS, decoding, pair
from runtime.test_synthetic import synthetic

from amusd.commands import compare
from amusd.commands.compare import Comparison
from amusd.commands.contestants import Contestant, contestants_of
from amusd.commands.job import Job
from amusd.commands.tables import advice, row_name, rows_table, summary_of
from amusd.config import RunConfig, SamplingParams
from amusd.console import Console
from amusd.drafters.ngram import NgramDrafter
from amusd.engine import Engine
from amusd.files import ANSWERS_FILE, RESULT_FILE
from amusd.settings import from_mapping
from amusd.workload import WorkloadPrompt, user_prompt

NGRAM = {"ngram": lambda: NgramDrafter(2)}
NUM_TOKENS = 12
KILLED_AT = 2


def numbered(text: str, number: int) -> WorkloadPrompt:
    return replace(user_prompt(text), number=number)


PROMPTS = [numbered("bad", 1), numbered("fade", 2), numbered("cafe", 3)]


def run_config(*sizes: int, **changes: object) -> RunConfig:
    values: dict[str, object] = {
        "mode": "synchronous",
        "num_speculative_tokens": 2,
        "max_silence_seconds": 60,
        "drafter": {"kind": "ngram"},
        "compare": {"batch_sizes": list(sizes or (1,))},
        "sampling": {"max_new_tokens": 9, "ignore_eos": True},
        **changes,
    }
    return from_mapping(RunConfig, values)


def job(engine: Engine, folder: Path, *sizes: int) -> Job:
    return Job(run_config(*sizes), Console(), folder, PROMPTS, lambda: engine)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory links are Linux's")
def test_a_draft_that_was_lost_is_there_again_before_anything_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(_label: str, done: int, _num_steps: int) -> None:
        """Kill the draft during the progress. The next one can come once it is waited for."""
        if done == KILLED_AT:
            lost.kill()
            assert lost.drafts.ended(TIMEOUT_SECONDS)
            lost.drafts.start = lambda: False  # or the next one may join before the answer's last token

    def let_the_next_come(line: str) -> None:
        notes.append(line)
        vars(lost.drafts).pop("start", None)

    notes: list[str] = []
    monkeypatch.setattr("amusd.commands.compare.show_progress", kill)
    monkeypatch.setattr("amusd.commands.compare.logger.info", let_the_next_come)
    schedule = decoding("asynchronous", policy="chain", max_silence_seconds=60.0)
    contestants = [Contestant(replace(schedule, mode="autoregressive"), None), Contestant(schedule, "oracle")]
    config = from_mapping(RunConfig, {"sampling": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}})
    with survivor("shared_memory") as lost:
        assert len(list(Comparison(lost.engine, config, contestants).turns(PROMPTS))) == len(PROMPTS)
        assert (len(lost.engine.draft.losses), lost.engine.draft.num_restarts) == (1, 1)
    assert [one.metrics.num_tokens_alone for one in contestants[1].answers] == [0, NUM_TOKENS, 0]
    assert notes == ["the draft was lost; nothing is measured before the next one is there"]


def test_what_was_answered_is_on_disk_before_the_next_prompt_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def look(*_: object) -> None:
        file = tmp_path / ANSWERS_FILE
        found.append(len(file.read_text().splitlines()) if file.exists() else 0)

    monkeypatch.setattr("amusd.commands.compare.show_progress", look)

    with pair(NGRAM) as (engine, _):
        compare.run(job(engine, tmp_path))
    assert found == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize("num_done", [3, 5])
def test_an_interrupted_comparison_keeps_the_turns_that_were_over_without_computing_anything(
    tmp_path: Path, num_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_label: str, done: int, _num_steps: int) -> None:
        if done == num_done:
            raise KeyboardInterrupt

    def answer_otherwise(own: Comparison, contestant: Contestant, *asked: Any) -> Any:
        (generation,), seconds = answered(own, contestant, *asked)
        number = 9 if contestant.drafter is None else 8
        return [replace(generation, token_ids=generation.token_ids[:number])], seconds

    answered = Comparison.answer
    monkeypatch.setattr("amusd.commands.compare.show_progress", interrupt)
    monkeypatch.setattr(Comparison, "answer", answer_otherwise)
    with pair(NGRAM) as (engine, _), pytest.raises(KeyboardInterrupt):
        compare.run(job(engine, tmp_path))
    result = json.loads((tmp_path / RESULT_FILE).read_text())
    assert (result["complete"], [row["num_prompts"] for row in result["rows"]]) == (False, [num_done // 2] * 2)
    different = {"num_prompts": num_done // 2, "num_identical": 0, "first_difference_gaps": [None] * (num_done // 2)}
    assert result["rows"][1]["identical_to_autoregressive"] == different


def test_the_answers_between_turns_are_plain_decodings_and_figures_are_kept_by_category(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"cpu": {"model": "A CPU", "allowed_cores": 2}, "gpus": ["Another GPU, 9 MiB, 1"], "commit": "c0ffee"}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    bad, fade, cafe = ({"role": "user", "content": text} for text in ("bad", "fade", "cafe"))
    prompts = [WorkloadPrompt(1, (bad,), "coding", "q1", (fade,)), WorkloadPrompt(2, (cafe,), "qa", "q2")]
    compared = {"drafter": {"kind": "synthetic"}, "compare": {"synchronous_lengths": [2]}}
    config = run_config(mode="asynchronous", policy="chain", **compared)
    with pair(synthetic(1.0)) as (engine, _):
        assert compare.run(Job(config, Console(), tmp_path, prompts, lambda: engine)) == 0
        answers = [json.loads(line) for line in (tmp_path / ANSWERS_FILE).read_text().splitlines()]
        plain = decoding("autoregressive")
        second = engine.generate(f"bad{answers[0]['text']}fade", config.sampling, decoding=plain).text
    asked = [(one["prompt"], one["turn"], one["category"], one["question_id"]) for one in answers[::3]]
    assert asked == [(1, 1, "coding", "q1"), (1, 2, "coding", "q1"), (2, 1, "qa", "q2")]
    assert {one["text"] for one in answers[3:6]} == {second}
    result = json.loads((tmp_path / RESULT_FILE).read_text())
    _, synchronous, asynchronous = result["rows"]
    ratios = [one["ms"] / own["ms"] for one, own in zip(answers[::3], answers[1::3], strict=True)]
    for name, prompts_of_it, speedup in (("coding", 2, sum(ratios[:2]) / 2), ("qa", 1, ratios[2])):
        own = synchronous["categories"][name]
        assert (own["num_prompts"], own["speedup_vs_autoregressive"]) == (prompts_of_it, pytest.approx(speedup))
        assert own["mean_acceptance_length"] == 3  # every block of two candidates is accepted
        assert own["tokens_per_second"] > 0
    shown = capsys.readouterr().out.rstrip("\n").split("\n")
    assert [line.split()[0] for line in shown if line.startswith(("coding", "qa"))] == ["coding"] * 3 + ["qa"] * 3
    summary = result["summary"]
    assert summary["ratio"] == asynchronous["tokens_per_second"] / synchronous["tokens_per_second"]
    assert shown[-1].startswith("machine: A CPU, 2 cores; pair: embedded, synthetic; autoregressive: ")
    assert shown[-1].endswith("; commit: c0ffee")


@pytest.fixture(scope="module")
def compared() -> Iterator[Comparison]:
    """Plain and synchronous decoding of three prompts (a fourth does not fit), at one, two and five at a time."""
    config = run_config(1, 2, 5)
    prompts = [PROMPTS[0], numbered("a" * 500, 4), PROMPTS[1], numbered("deafbead", 5)]
    with pair(NGRAM, max_num_seqs=config.engine_for("compare").max_num_seqs, pass_seconds=0.0) as (engine, _):
        comparison = Comparison(engine, config, contestants_of(config))
        list(comparison.turns(prompts))
        yield comparison


def test_every_mode_is_compared_at_each_size_and_all_with_plain_decoding_of_one(compared: Comparison) -> None:
    rows = compared.rows()
    documented = {
        "mode", "policy", "num_speculative_tokens", "num_prompts", "num_tokens", "tokens_per_second", "ms_per_token",
        "time_to_first_token_ms", "speedup_vs_autoregressive", "speedup_vs_best_synchronous", "acceptance_rate",
        "mean_acceptance_length", "acceptance_by_position", "num_rollbacks", "wasted_draft_fraction",
        "target_idle_fraction", "draft_idle_fraction", "num_devices", "tokens_per_second_per_device",
        "identical_to_autoregressive",
    }  # fmt: skip
    assert all(documented <= set(row) for row in rows)
    (refused,) = compared.refused
    assert refused.startswith("prompt 4 was left out: ")
    assert [(row["mode"], row["batch_size"]) for row in rows] == [
        (mode, size) for size in (1, 2, 5) for mode in ("autoregressive", "synchronous")
    ]
    assert [row["num_prompts"] for row in rows] == [3, 3, 3, 3, 6, 6]  # each twice where there are five places
    for row, contestant in zip(rows, compared.contestants, strict=True):
        number, is_plain = row["num_prompts"], row["mode"] == "autoregressive"
        assert row["identical_to_autoregressive"]["num_identical"] == number
        assert row["num_tokens"] == 9 * number
        assert 0 < row["p50_inter_token_ms"] <= row["p99_inter_token_ms"]
        assert (row["speedup_vs_autoregressive"] == 1) == is_plain
        assert row["speedup_vs_best_synchronous"] == (None if is_plain else 1)
        if row["batch_size"] > 1:
            assert row["tokens_per_second"] == row["num_tokens"] / contestant.seconds
            assert row["target_idle_fraction"] is row["draft_idle_fraction"] is row["speedup_quartiles"] is None
    assert len({row["contestant"] for row in rows}) == 6
    found = [(one["prompt"], one["batch_size"]) for one in compared.records() if one["mode"] == "synchronous"]
    assert found == [(prompt, size) for prompt in (1, 2, 5) for size in (1, 2, 5, 5)]
    assert {one["identical"] for one in compared.records()} == {True}


@pytest.mark.parametrize(("address", "number"), [(None, 1), ("tcp://10.0.0.2:1", 2)])
def test_a_draft_elsewhere_has_a_device_of_its_own(address: str | None, number: int) -> None:
    drafter, hardware = {"kind": "hf", "model": "s", "address": address}, {"devices": ["cuda:0"]}
    plain, *drafting = contestants_of(run_config(drafter=drafter, hardware=hardware, transport={"insecure": True}))
    assert (plain.num_devices, {one.num_devices for one in drafting}) == (1, {number})


def test_an_answer_that_only_ends_earlier_has_no_gap(compared: Comparison) -> None:
    assert compare.first_gap(compared.engine, (5,), (6, 7), (6,)) is None


def test_the_best_of_several_blocks_stands_beside_running_ahead() -> None:
    config = run_config(mode="asynchronous", policy="chain", compare={"synchronous_lengths": [2, 4]})
    with pair(NGRAM) as (engine, _):
        comparison = Comparison(engine, config, contestants_of(config))
        list(comparison.turns(PROMPTS[:1]))
    _, best, asynchronous = comparison.rows()
    assert {*best["tuned"]} == {"2", "4"}
    assert asynchronous["policy"] == "chain"


def test_answers_are_in_the_order_of_their_prompts_whichever_ends_first(compared: Comparison) -> None:
    together = replace(compared.plain, batch_size=3, answers=[])
    prompts = [(5, 6), (7,), (8, 9, 10)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    found, seconds = compared.answer(together, prompts, params)
    expected = [compared.engine.generate(prompt, params, decoding=together.decoding).token_ids for prompt in prompts]
    assert [one.token_ids for one in found] == expected
    assert seconds > 0


def test_a_run_keeps_a_table_a_figure_and_every_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "environment.json").write_text("{}")
    with pair(NGRAM, max_num_seqs=4, pass_seconds=0.0) as (engine, _):
        assert compare.run(job(engine, tmp_path, 1, 4)) == 0
    header, _, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert header.split()[-1] == "identical"
    assert [line.split()[-1] for line in lines] == ["3/3", "3/3", "6/6", "6/6"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert [len(row["sequence_ids"]) for row in result["rows"]] == [3, 3, 6, 6]
    assert "synchronous (best: 2 tokens), ngram, 4 at a time" in (tmp_path / "comparison.svg").read_text()
    assert len((tmp_path / ANSWERS_FILE).read_text().splitlines()) == 18


# Names, columns and the advice under a table, for rows that are made up


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
