"""The reading core writes what transformers and the engine write (`test_golden.py`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from amusd.models.embedded_draft import export_draft
from amusd.models.tokenizer import load_tokenizer
from tests.launch.processes import ROOT, run
from tests.test_golden import GREEDY, ids

NANO = ROOT / "examples" / "nano.py"
COUNT, SKY = GREEDY
"""The draft foresees most tokens of the first answer, and few of the other."""
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def pair(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    draft = tmp_path_factory.mktemp("models") / "draft"
    export_draft(embedded_folder, draft)
    return ["--target", str(embedded_folder), "--draft", str(draft), f"--max-new-tokens={NUM_TOKENS}"]


@pytest.mark.embedded
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prompt", [COUNT, pytest.param(SKY, marks=pytest.mark.long)])
def test_the_answer_is_that_of_transformers(
    pair: list[str], embedded_folder: Path, prompt: str, tmp_path: Path
) -> None:
    expected = load_tokenizer(embedded_folder).decode(ids(GREEDY[prompt])[:NUM_TOKENS])
    done = run([sys.executable, str(NANO), *pair, prompt], tmp_path)
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z ]+)[,\n]", done.stderr)}
    assert counts["tokens"] == counts["target passes"] + counts["accepted"] == NUM_TOKENS
