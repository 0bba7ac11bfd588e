"""`amusd generate out=FILE` as a user runs it: interrupted, killed, gone on with, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.processes import SECONDS, amusd_command, environment, run
from tests.launch.small_pair import save_pair
from tests.warm import Popen

pytestmark = pytest.mark.timeout(600)

NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    pair = save_pair(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"sentence {number}"}) + "\n" for number in range(NUM_PROMPTS)))
    return amusd_command(
        "generate",
        *pair,
        f"workload.path={prompts}",
        "out=answers.jsonl",
        "max_num_seqs=3",
        "sampling.max_new_tokens=60",
    )


def lines(folder: Path) -> list[str]:
    file = folder / "answers.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def answers(folder: Path) -> list[tuple[int, list[int]]]:
    return [(record["id"], record["token_ids"]) for record in map(json.loads, lines(folder))]


def started(command: list[str], folder: Path) -> Any:
    before = len(lines(folder))
    process = Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + SECONDS
    while len(lines(folder)) <= before:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_an_interrupted_and_a_killed_run_are_gone_on_with(command: list[str], tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    done = run([*command, "mode=autoregressive"], whole)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"answers.jsonl: {NUM_PROMPTS} answers, {60 * NUM_PROMPTS} tokens in ")
    assert "up to 3 answers at a time, with a cache of 256 tokens each: " in done.stderr

    process = started(command, broken)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    num_kept = len(answers(broken))
    (directory,) = (broken / "runs").iterdir()
    kept = json.loads((directory / "result.json").read_text())
    assert (kept["complete"], kept["num_answers"]) == (False, num_kept)
    assert num_kept < NUM_PROMPTS

    process = started([*command, "run_dir=killed"], broken)
    os.kill(json.loads((broken / "killed" / "workers.json").read_text())["target"][0], signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert num_kept < len(lines(broken)) < NUM_PROMPTS

    done = run([*command, "output=json"], broken)
    assert done.returncode == 0, done.stderr
    assert answers(broken) == answers(whole)
    assert json.loads(done.stdout)["complete"]

    done = run([*command, "output=json"], broken)
    assert (done.returncode, done.stderr) == (0, "amusd: out=answers.jsonl: all prompts are answered\n")
    assert json.loads(done.stdout) == {"complete": True, "out": "answers.jsonl", "num_prompts": 0}
    done = run([*command, "sampling.seed=3"], broken)
    assert done.returncode == 2
    assert done.stderr.startswith("amusd: out=answers.jsonl: line 1 was answered with the default sampling.seed")
