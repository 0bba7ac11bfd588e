"""A run's folder, and sweeps by Hydra: one engine for similar jobs, a folder for each, and resuming."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from amusd.config import RunConfig, SamplingParams
from amusd.errors import ConfigError
from launch.main import main
from launch.run_directory import (
    clear_run,
    create_run_directory,
    is_done,
    read_config,
    run_directory,
    summarize,
    summary_table,
)
from tests.launch.processes import SECONDS, amusd_command, environment, run
from tests.warm import Popen


def test_a_run_directory_holds_the_resolved_configuration_and_the_environment(tmp_path: Path) -> None:
    config = RunConfig(prompt="${x}: 'a'\n\u2028 ü", sampling=SamplingParams(stop=("no", "1e3", "~")))
    directory = create_run_directory(dataclasses.replace(config, run_dir=str(tmp_path / "deep" / "run")))
    assert sorted(path.name for path in directory.iterdir()) == ["config.yaml", "environment.json", "events"]
    saved = read_config(directory)
    assert (saved.prompt, saved.sampling, saved.run_dir) == (config.prompt, config.sampling, str(directory))
    environment = json.loads((directory / "environment.json").read_text())
    assert {"amusd", "python", "packages", "cpu", "gpus", "commit"} <= set(environment)
    assert {"torch", "transformers", "pyzmq", "hydra-core"} <= set(environment["packages"])
    assert environment["cpu"]["cores"] >= environment["cpu"]["allowed_cores"] >= 1


@pytest.mark.parametrize("mark", ["config.yaml", "sweep.json", "answers.jsonl", "partial.txt", "workers.json"])
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text("old")
    with pytest.raises(ConfigError, match=f"already holds a run \\({mark}\\)"):
        create_run_directory(RunConfig(run_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [mark]
    assert (tmp_path / mark).read_text() == "old"


def test_a_refused_run_leaves_the_answers_that_it_was_to_add_to(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("old")
    config = RunConfig(run_dir=str(tmp_path), out=str(tmp_path / "answers.jsonl"))
    with pytest.raises(ConfigError, match="no"), run_directory(config):
        raise ConfigError("no")
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_an_interrupted_run_is_cleared_for_another_try_and_notes_stay(tmp_path: Path) -> None:
    clear_run(tmp_path / "nowhere")
    directory = create_run_directory(RunConfig(run_dir=str(tmp_path / "run")))
    for name in (
        "workers.json",
        "result.json",
        "answers.jsonl",
        "partial.txt",
        "comparison.png",
        "timeline.svg",
        "events/draft.jsonl",
        "notes.txt",
    ):
        (directory / name).write_text("{}")
    clear_run(directory)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    assert create_run_directory(RunConfig(run_dir=str(directory))) == directory


pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def pair(small_pair: list[str]) -> list[str]:
    return [*small_pair, "prompt=a sentence", "sampling.max_new_tokens=8"]


def job(folder: Path, number: int, *overrides: str, **result: Any) -> Path:
    directory = create_run_directory(RunConfig(run_dir=str(folder / str(number))))
    (directory / "overrides.json").write_text(json.dumps({"job": number, "overrides": overrides}))
    if result:
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def test_the_summary_is_a_table_and_a_file(tmp_path: Path) -> None:
    rows = [{"mode": "asynchronous", "tokens_per_second": 12.345, "by_position": [1, 2]}]
    for number, length in enumerate((8, 16)):
        job(tmp_path / "in one", number, f"max_lookahead={length}", "drafter=ngram", complete=True, rows=rows)
    job(tmp_path, 2, "max_lookahead=4", "drafter=ngram")
    document = summarize(tmp_path)
    assert document == json.loads((tmp_path / "sweep.json").read_text())
    assert [one["swept"] for one in document["jobs"]] == [{"max_lookahead": value} for value in ("8", "16", "4")]
    table = summary_table(document).partition("\n\n")[0].splitlines()
    assert table[0].split()[:4] == ["job", "max_lookahead", "mode", "tokens/s"]
    assert [line.split()[:4] for line in table[2:]] == [
        ["0", "8", "asynchronous", "12.3"],
        ["1", "16", "asynchronous", "12.3"],
        ["2", "4", "no", "result"],
    ]


def test_a_job_that_was_whole_has_a_row_though_its_command_has_none(tmp_path: Path) -> None:
    job(tmp_path, 0, "max_lookahead=8", complete=True, out="answers.jsonl", tokens_per_second=12.345)
    job(tmp_path, 1, "max_lookahead=4", complete=True, target={})  # as of `bench`
    document = summarize(tmp_path)
    assert all(one["rows"] for one in document["jobs"])
    table = summary_table(document).partition("\n\n")[0].splitlines()
    assert [line.split() for line in table[2:]] == [["0", "8", "complete", "12.3"], ["1", "4", "complete"]]


def test_a_sweep_over_drafters_holds_over_that_of_a_pair(tmp_path: Path) -> None:
    small = ["simulate.num_tokens=8", "simulate.synchronous_lengths=[1]", "simulate.min_candidates=[0]"]
    given = ["accept=0.8", "verify_ms=25", "draft_ms=2.5", *small, "run_dir=out"]
    done = run(amusd_command("simulate", "-m", "pair=qwen3_8b", "drafter=ngram,self", *given), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [read_config(tmp_path / "out" / name).drafter.kind for name in "01"] == ["ngram", "self"]


@pytest.mark.parametrize(
    ("typed", "folder"), [("run_dir=", "runs/*"), ("run_dir=null", "runs/*"), ("++run_dir=own", "own")]
)
def test_a_sweep_takes_every_form_of_its_folder(
    typed: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "-m", "accept=0.8", "verify_ms=25", "draft_ms=2.5", "simulate.num_tokens=8", typed]) == 0
    assert [path.parent.match(folder) for path in tmp_path.rglob("sweep.json")] == [True]


def test_a_folder_is_for_one_sweep_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["simulate", "-m", "accept=0.8", "verify_ms=25", "draft_ms=2.5", f"run_dir={tmp_path}"]
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another sweep does
    assert main([*sweep, "simulate.num_tokens=8"]) == 2
    assert capsys.readouterr() == ("", f"amusd: run_dir={tmp_path}: another sweep writes to it\n")
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)
    assert main([*sweep, "promt=x"]) == 2  # which gives the folder back
    assert main([*sweep, "simulate.num_tokens=8"]) == 0
    assert (tmp_path / "sweep.json").is_file()


def test_a_job_is_done_if_it_was_whole_had_a_draft_all_along_and_the_same_settings(tmp_path: Path) -> None:
    done = job(tmp_path, 0, complete=True)
    assert is_done(done, RunConfig(run_dir=str(done), output="json"))
    assert not is_done(job(tmp_path, 1), RunConfig())
    assert not is_done(job(tmp_path, 2, complete=False), RunConfig())
    assert not is_done(job(tmp_path, 3, complete=True, draft_losses=["killed"]), RunConfig())
    with pytest.raises(ConfigError, match="was measured with other settings"):
        is_done(done, RunConfig(run_dir=str(done), max_lookahead=5))


@pytest.mark.parametrize("subdir", ["${hydra.job.num}", "job_{x}/max_lookahead=${max_lookahead}"])
def test_jobs_share_an_engine_and_a_refused_one_stops_no_other(pair: list[str], tmp_path: Path, subdir: str) -> None:
    arguments = ["-m", "output=json", "run_dir=out", f"hydra.sweep.subdir='{subdir}'", "max_lookahead=4,0,8", *pair]
    done = run(amusd_command("generate", *arguments), tmp_path)
    assert done.returncode == 2, done.stderr
    assert "amusd: max_lookahead=0: " in done.stderr
    assert done.stderr.count("target: ") == 1  # loaded once
    (line,) = done.stdout.splitlines()
    jobs = json.loads(line)["jobs"]
    assert [(one["swept"], len(one["rows"])) for one in jobs] == [
        ({"max_lookahead": "4"}, 1),
        ({"max_lookahead": "0"}, 0),
        ({"max_lookahead": "8"}, 1),
    ]
    assert [one["job"] for one in jobs] == [0, 1, 2]
    folders = [Path(jobs[number]["run_dir"]) for number in (0, 2)]
    for folder in folders:
        assert {path.name for path in (folder / "events").iterdir()} == {"draft.jsonl", "target.jsonl"}
    answers = [json.loads((folder / "result.json").read_text())["token_ids"] for folder in folders]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


def test_an_interrupted_sweep_goes_on_where_it_stopped(pair: list[str], tmp_path: Path) -> None:
    command = amusd_command("generate", "-m", "run_dir=out", "sampling.seed=1,2,3", *pair)
    process = Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    first, deadline = tmp_path / "out" / "0" / "result.json", time.monotonic() + SECONDS
    while not first.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    kept = first.stat().st_mtime_ns
    if process.returncode:  # else it was too late for the signal
        assert process.returncode == 130, err
        assert b"the same command with run_dir=out goes on from here" in err
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "amusd: job 0: done before\n" in done.stderr
    assert first.stat().st_mtime_ns == kept
    assert [len(one["rows"]) for one in json.loads((tmp_path / "out" / "sweep.json").read_text())["jobs"]] == [1, 1, 1]
