"""The reading core writes what the engine writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from amusd.config import EngineConfig, SamplingParams, TargetConfig
from amusd.engine import Engine
from amusd.models.embedded_draft import export_draft
from tests.launch.processes import ROOT, run

NANO = ROOT / "examples" / "nano.py"
COUNT, RAIN = "Count from one to ten.", "Write a haiku about rain."
"""The draft's first token is right for the one and wrong for the other. The target waits for it, however late it is."""
NUM_TOKENS = 12
"""The best token of each step is 0.15 or more ahead of the second: no rounding of float32 changes these answers."""


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    config = EngineConfig(target=TargetConfig(kind="embedded", dtype="float32"), drafters=())
    with Engine.start(config) as engine:
        params = SamplingParams(max_new_tokens=NUM_TOKENS)
        return {prompt: engine.generate(prompt, params).text for prompt in (COUNT, RAIN)}


@pytest.fixture(scope="module")
def pair(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    draft = tmp_path_factory.mktemp("models") / "draft"
    export_draft(embedded_folder, draft)
    return ["--target", str(embedded_folder), "--draft", str(draft), f"--max-new-tokens={NUM_TOKENS}"]


@pytest.mark.embedded
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prompt", [COUNT, pytest.param(RAIN, marks=pytest.mark.long)])
def test_the_answer_is_the_engines(pair: list[str], expected: dict[str, str], prompt: str, tmp_path: Path) -> None:
    done = run([sys.executable, str(NANO), *pair, prompt], tmp_path)
    assert (done.returncode, done.stdout) == (0, expected[prompt] + "\n"), done.stderr
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z ]+)[,\n]", done.stderr)}
    assert counts["tokens"] == counts["target passes"] + counts["accepted"] == NUM_TOKENS
