"""Every example runs, on a small pair that is made here; the reading core writes what transformers writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from amusd.checkpoints.tokenizer import load_tokenizer
from tests.launch import processes
from tests.launch.processes import ROOT
from tests.test_golden import GREEDY, ids

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(600)


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    done = processes.run(command, folder, **variables)
    assert done.returncode == 0, done.stderr
    return done


def script(name: str, models: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pair = ["--target", str(models / "target"), "--drafter", str(models / "draft"), "--max-new-tokens=8"]
    return run([sys.executable, str(EXAMPLES / name), *pair, *arguments], folder)


def test_one_answer_is_streamed(small_models: Path, tmp_path: Path) -> None:
    done = script("stream.py", small_models, tmp_path, "--prompt", "a sentence")
    assert done.stdout.strip()
    assert done.stderr.startswith("8 tokens, ")


@pytest.mark.long
def test_several_prompts_are_answered_at_a_time(small_models: Path, tmp_path: Path) -> None:
    done = script("many.py", small_models, tmp_path)
    assert sorted(line.partition(":")[0] for line in done.stdout.splitlines()) == ["1", "2", "3", "4"]


def test_the_modes_are_compared_on_prompts_of_ones_own(small_models: Path, tmp_path: Path) -> None:
    done = script("compare.py", small_models, tmp_path, "--num-prompts=2")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["autoregressive", "synchronous", "asynchronous"]
    assert done.stdout.splitlines()[0].endswith("2 of 2 answers as plain decoding's")


@pytest.mark.long
def test_a_sweep_takes_further_keys(small_pair: list[str], tmp_path: Path) -> None:
    small = ["max_lookahead=4", "min_candidates=0,1", "sampling.max_new_tokens=4"]
    command = [str(EXAMPLES / "sweep.sh"), *small_pair, *small]
    run(command, tmp_path, AMUSD=f"{sys.executable} -m launch.main")
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    assert [job["swept"] for job in jobs] == [{"min_candidates": "0"}, {"min_candidates": "1"}]
    assert all(job["rows"] for job in jobs)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_example_says_so_in_one_line(tmp_path: Path) -> None:
    done = processes.run([sys.executable, str(EXAMPLES / "ray_data.py")], tmp_path)
    assert (done.returncode, done.stderr) == (1, "examples/ray_data.py needs Ray: pip install 'ray[data]'\n")


# The reading core


NANO = ROOT / "examples" / "nano.py"
COUNT, SKY = GREEDY
"""The draft foresees most tokens of the first answer, and few of the other."""
NUM_TOKENS = 12


@pytest.mark.embedded
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prompt", [COUNT, pytest.param(SKY, marks=pytest.mark.long)])
def test_the_answer_is_that_of_transformers(embedded_folder: Path, prompt: str, tmp_path: Path) -> None:
    expected = load_tokenizer(embedded_folder).decode(ids(GREEDY[prompt])[:NUM_TOKENS])
    done = processes.run(
        [sys.executable, str(NANO), f"--max-new-tokens={NUM_TOKENS}", prompt], tmp_path, TMPDIR=str(tmp_path)
    )
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z ]+)[,\n]", done.stderr)}
    assert counts["tokens"] == counts["target passes"] + counts["accepted"] == NUM_TOKENS
    assert not list(tmp_path.glob("*/model.safetensors"))


def test_one_folder_alone_is_a_mistake(tmp_path: Path) -> None:
    done = processes.run([sys.executable, str(NANO), "--target", str(tmp_path), "hi"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("error: name both folders, --target and --draft, or none\n")
