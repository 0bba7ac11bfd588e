"""The reading core writes what the engine writes, whatever its two processes do."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class Toy:
    """A model whose choice depends on the whole text before it; with `wrong` it differs now and then."""

    def __init__(self, wrong: random.Random | None = None) -> None:
        self.wrong = wrong
        self.network = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))

    def choices(self, text: list[int], count: int) -> list[int]:
        right = [hash(tuple(text[:end])) % 5 for end in range(len(text) - count + 1, len(text) + 1)]
        return right if self.wrong is None or self.wrong.random() < 0.7 else [(token + 1) % 5 for token in right]


def plain_text(length: int) -> list[int]:
    text = [1, 2]
    while len(text) < length:
        text += Toy().choices(text, 1)
    return text


@pytest.fixture(scope="module")
def nano() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(NANO)))


def decode_by_chance(nano: SimpleNamespace, chance: random.Random) -> Any:
    """Let both sides act and messages arrive in any order that the link allows; return the target at its end."""
    draft, target = nano.Draft(Toy(chance)), nano.Target(Toy(), [1, 2], 60)
    verdicts, candidates = deque([nano.Verdict(target.committed)]), deque()
    while len(target.committed) < target.max_length:
        (event,) = chance.choices(["hear", "step", "receive", "verify"], [2, 4, 4, 1])
        if event == "hear" and verdicts:
            draft.hear(verdicts.popleft())
        elif event == "step" and draft.may_draft:
            candidates.append((draft.text, draft.step()))
        elif event == "receive" and candidates:
            prefix, candidate = candidates.popleft()
            num_before = len(target.candidates)
            target.receive(candidate)
            if len(target.candidates) > num_before:
                assert target.committed + target.candidates[:-1] == prefix
        elif event == "verify":
            target.verify()
            verdicts.append(nano.Verdict(target.committed))
    return target


def test_a_candidate_is_verified_behind_the_prefix_it_was_drafted_from_whatever_comes_late(
    nano: SimpleNamespace,
) -> None:
    plain = plain_text(62)
    targets = [decode_by_chance(nano, random.Random(seed)) for seed in range(50)]
    assert all(target.committed == plain for target in targets)
    assert sum(target.accepted for target in targets) > 500
    assert sum(target.rollbacks for target in targets) > 500


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The answers of the engine, without a draft."""
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
