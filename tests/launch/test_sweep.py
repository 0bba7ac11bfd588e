"""A sweep: one folder, jobs that share workers, one summary, and an interruption that costs only its own job."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from amusd.errors import ConfigError
from amusd.files import KEYS, MEASURES, answers_jsonl, prompts_csv
from launch import sweep
from launch.compose import compose_config
from launch.job import Group
from launch.run_directory import create_run_directory
from launch.sweep_plan import groups_of, open_folder, plan_sweep
from tests.launch.processes import FAKE, amusd_command, run

ARGUMENTS = ["drafter.kind=ngram,embedded", "max_lookahead=8,16"]
"""Jobs 0 and 1 share an engine, so do jobs 2 and 3."""


class FakeGroups:
    """Stands in for `run_group`: what becomes of each job is given, by its number."""

    def __init__(self, **codes: int) -> None:
        self._codes = {int(name.removeprefix("job")): code for name, code in codes.items()}
        self.groups: list[list[int]] = []

    def __call__(self, group: Group, *, roles: str | None, json_only: bool) -> tuple[tuple[int, ...], int | None]:
        numbers = [int(job.run_directory.name) for job in group.jobs]
        self.groups.append(numbers)
        ended: list[int] = []
        for number, job in zip(numbers, group.jobs, strict=True):
            code = self._codes.get(number, 0)
            ended.append(code)
            if code == 0:
                rows = [{"mode": "asynchronous", "tokens_per_second": 12.345, "by_position": [1, 2]}]
                result = {"complete": True, "rows": rows, "environment": {"cpu": {"model": "A Processor"}}}
                (job.run_directory / "result.json").write_text(json.dumps(result))
                record = dict.fromkeys((*KEYS, *MEASURES), 1) | {"text": f"answer\u2028{number}", "token_ids": [number]}
                (job.run_directory / "answers.jsonl").write_text(answers_jsonl([record, record]))
                (job.run_directory / "prompts.csv").write_text(prompts_csv([record, record]))
            elif code != 2:
                break
        signum = ended[-1] - 128 if ended[-1] > 128 else None
        return tuple(ended), signum


Sweep = Callable[..., "tuple[int, list[dict[str, Any]]]"]


@pytest.fixture
def run_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    def run_with(groups: FakeGroups, *more: str) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(sweep, "run_group", groups)
        code = sweep.run_sweep("compare", [*ARGUMENTS, f"run_dir={tmp_path / 'out'}", *more])
        return code, json.loads((tmp_path / "out" / "sweep.json").read_text())["jobs"]

    return run_with


def test_jobs_with_equal_engines_share_workers_and_keep_their_own_folders(
    run_sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = FakeGroups()
    code, jobs = run_sweep(groups, "output=json")
    assert code == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == jobs
    assert groups.groups == [[0, 1], [2, 3]]
    assert [job["run_dir"] for job in jobs] == [str(tmp_path / "out" / number) for number in "0123"]
    assert [job["swept"] for job in jobs[:2]] == [
        {"drafter.kind": "ngram", "max_lookahead": "8"},
        {"drafter.kind": "ngram", "max_lookahead": "16"},
    ]
    assert "max_lookahead: 16" in (tmp_path / "out" / "1" / "config.yaml").read_text()


def test_jobs_that_are_alike_are_grouped_wherever_they_stand() -> None:
    plan = plan_sweep("compare", ["max_lookahead=8,16", "drafter.kind=ngram,embedded"])
    assert [[job.number for job in group] for group in groups_of("compare", plan.jobs)] == [[0, 2], [1, 3]]
    wide = plan_sweep("compare", ["mode=synchronous", "num_speculative_tokens=4,7,8"])
    assert [[job.number for job in group] for group in groups_of("compare", wide.jobs)] == [[0, 1], [2]]


def test_the_summary_is_a_table_a_file_for_spreadsheets_and_a_page(
    run_sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(FakeGroups(job3=1))
    table = capsys.readouterr().out.splitlines()
    header = ["job", "drafter.kind", "max_lookahead", "mode", "tokens/s", "x plain", "quartiles", "x best sync"]
    header.append("accepted")
    assert table[0].split() == " ".join([*header, "tokens/pass"]).split()
    assert [line.split()[:5] for line in table[2:]] == [
        ["0", "ngram", "8", "asynchronous", "12.3"],
        ["1", "ngram", "16", "asynchronous", "12.3"],
        ["2", "embedded", "8", "asynchronous", "12.3"],
        ["3", "embedded", "16", "exit", "1"],
    ]
    with (tmp_path / "out" / "sweep.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert records[2] == {
        "job": "2",
        "exit_code": "0",
        "swept.drafter.kind": "embedded",
        "swept.max_lookahead": "8",
        "mode": "asynchronous",
        "tokens_per_second": "12.345",
    }
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [(answer["job"], answer["text"]) for answer in answers] == [
        (job, f"answer\u2028{job}") for job in (0, 0, 1, 1, 2, 2)
    ]
    with (tmp_path / "out" / "prompts.csv").open(newline="") as file:
        prompts = list(csv.DictReader(file))
    assert [prompt["job"] for prompt in prompts] == ["0", "0", "1", "1", "2", "2"]
    assert list(prompts[0]) == ["job", "swept.drafter.kind", "swept.max_lookahead", *KEYS, *MEASURES]


def test_a_failed_job_does_not_stop_the_others(run_sweep: Sweep) -> None:
    groups = FakeGroups(job0=1, job2=2)
    code, jobs = run_sweep(groups)
    assert code == 1
    assert groups.groups == [[0, 1], [1], [2, 3]]  # the pair died with job 0; job 2 was only refused
    assert [job["exit_code"] for job in jobs] == [1, 0, 2, 0]


def test_an_interrupted_sweep_goes_on_where_it_stopped(
    run_sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, jobs = run_sweep(FakeGroups(job1=130))
    assert code == 130
    assert [job["exit_code"] for job in jobs] == [0, 130, None, None]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"the same command with run_dir={tmp_path / 'out'} goes on from here" in printed.err
    kept = (tmp_path / "out" / "0" / "result.json").stat().st_mtime_ns
    partial = tmp_path / "out" / "1"
    (partial / "result.json").write_text('{"complete": false, "rows": []}')
    (partial / "events" / "draft.jsonl").write_text("{}\n")
    again = FakeGroups()
    code, jobs = run_sweep(again)
    assert code == 0
    assert again.groups == [[1], [2, 3]]
    assert [job["exit_code"] for job in jobs] == [0, 0, 0, 0]
    assert (tmp_path / "out" / "0" / "result.json").stat().st_mtime_ns == kept
    assert list((partial / "events").iterdir()) == []
    assert "4 jobs in" in (told := capsys.readouterr().err)
    assert "1 of them done before" in told


def test_jobs_that_ran_elsewhere_in_their_folders_are_collected(run_sweep: Sweep, tmp_path: Path) -> None:
    """How a sweep is spread over machines that share a folder."""
    for number, keys in (
        (1, ["drafter.kind=ngram", "max_lookahead=16"]),
        (2, ["drafter.kind=embedded", "max_lookahead=8"]),
    ):
        directory = create_run_directory(compose_config([*keys, f"run_dir={tmp_path / 'out' / str(number)}"]))
        (directory / "result.json").write_text(json.dumps({"complete": True, "rows": [{"mode": "asynchronous"}]}))
    groups = FakeGroups()
    code, jobs = run_sweep(groups)
    assert code == 0
    assert groups.groups == [[0], [3]]
    assert [job["exit_code"] for job in jobs] == [0, 0, 0, 0]


def test_a_job_whose_draft_was_lost_is_run_again(run_sweep: Sweep, tmp_path: Path) -> None:
    run_sweep(FakeGroups())
    path = tmp_path / "out" / "2" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "draft_losses": ["killed"]}))
    again = FakeGroups()
    run_sweep(again)
    assert again.groups == [[2]]


def test_results_with_other_settings_are_refused_and_left_alone(run_sweep: Sweep, tmp_path: Path) -> None:
    run_sweep(FakeGroups())
    saved = tmp_path / "out" / "1" / "config.yaml"
    saved.write_text(saved.read_text().replace("num_prompts: null", "num_prompts: 5"))
    with pytest.raises(ConfigError, match=r"job 1 was measured with other settings \(1/config.yaml\)"):
        run_sweep(FakeGroups())


def test_a_mistake_in_the_last_job_is_found_before_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = FakeGroups()
    monkeypatch.setattr(sweep, "run_group", groups)
    with pytest.raises(ConfigError, match="max_lookahead=0: must be at least 1"):
        sweep.run_sweep("compare", ["max_lookahead=4,0", f"run_dir={tmp_path}"])
    assert groups.groups == []
    assert list(tmp_path.iterdir()) == []


def test_real_workers_do_several_jobs_and_a_fresh_pair_takes_over_when_they_die(tmp_path: Path) -> None:
    """Job 1 is refused, job 2 crashes: jobs 0 to 2 share a pair, job 3 gets another."""
    done = run(amusd_command("compare", "-m", FAKE, "sampling.seed=0,1,2,3", "prompt=by seed", "run_dir=out"), tmp_path)
    assert done.returncode == 2, done.stderr
    jobs = json.loads((tmp_path / "out" / "sweep.json").read_text())["jobs"]
    assert [job["exit_code"] for job in jobs] == [0, 2, 1, 0]
    assert "amusd: prompt: refused\n" in done.stderr
    assert "ValueError: a bug in the target" in done.stderr
    assert done.stdout.splitlines()[:2] == ["compare 0", "compare 2"]
    pairs = {number: json.loads((tmp_path / "out" / number / "workers.json").read_text()) for number in ("0", "2", "3")}
    assert pairs["0"] == pairs["2"] != pairs["3"]
    assert not (tmp_path / "out" / "1").exists()


@pytest.mark.parametrize(
    ("name", "text", "refusal"),
    [
        ("config.yaml", "{}", "already holds a run"),
        ("result.json", "{}", "already holds a run"),
        ("sweep.json", "[", r"sweep\.json cannot be read"),
        ("sweep.json", '{"command": "generate", "jobs": JOBS}', "already holds another sweep"),
        ("sweep.json", '{"command": "compare", "jobs": JOBS[1:]}', "already holds another sweep"),
        ("sweep.json", '{"command": "compare", "jobs": JOBS}', None),
    ],
)
def test_the_folder_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, name: str, text: str, refusal: str | None
) -> None:
    plan = plan_sweep("compare", ["max_lookahead=4,8", f"run_dir={tmp_path}"])
    jobs = [{"overrides": list(job.overrides)} for job in plan.jobs]
    text = text.replace("JOBS[1:]", json.dumps(jobs[1:])).replace("JOBS", json.dumps(jobs))
    (tmp_path / name).write_text(text)
    with nullcontext() if refusal is None else pytest.raises(ConfigError, match=refusal):
        assert open_folder(plan) == tmp_path
    assert (tmp_path / name).read_text() == text
