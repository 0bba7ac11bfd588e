"""The reading core writes what transformers and the engine write (`test_golden.py`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from amusd.checkpoints.tokenizer import load_tokenizer
from tests.launch.processes import ROOT, run
from tests.test_golden import GREEDY, ids

NANO = ROOT / "examples" / "nano.py"
COUNT, SKY = GREEDY
"""The draft foresees most tokens of the first answer, and few of the other."""
NUM_TOKENS = 12


@pytest.mark.embedded
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prompt", [COUNT, pytest.param(SKY, marks=pytest.mark.long)])
def test_the_answer_is_that_of_transformers(embedded_folder: Path, prompt: str, tmp_path: Path) -> None:
    expected = load_tokenizer(embedded_folder).decode(ids(GREEDY[prompt])[:NUM_TOKENS])
    done = run([sys.executable, str(NANO), f"--max-new-tokens={NUM_TOKENS}", prompt], tmp_path, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z ]+)[,\n]", done.stderr)}
    assert counts["tokens"] == counts["target passes"] + counts["accepted"] == NUM_TOKENS
    assert not list(tmp_path.glob("*/model.safetensors"))


def test_one_folder_alone_is_a_mistake(tmp_path: Path) -> None:
    done = run([sys.executable, str(NANO), "--target", str(tmp_path), "hi"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("error: name both folders, --target and --draft, or none\n")
