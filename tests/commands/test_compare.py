"""What `amusd compare` counts and keeps, also where a draft is lost on the way. Its rows are in `test_engine.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.draft_processes import Survivor, survivor
from runtime.pair import TIMEOUT_SECONDS, decoding, pair

from amusd.answer import Answer
from amusd.commands import compare as command
from amusd.commands.compare import run_comparison
from amusd.commands.contestants import Comparison, Contestant
from amusd.commands.generate import Scripts
from amusd.config import RunConfig, SamplingParams
from amusd.console import Console
from amusd.drafters.ngram import NgramDrafter
from amusd.files import ANSWERS_FILE
from amusd.settings import from_mapping
from amusd.types import Mode
from amusd.workload import user_prompt

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory links are Linux's")

NUM_TOKENS = 12
KILLED_AT = 2
WAITING = "the draft was lost; nothing is measured before the next one is there"
PROMPTS = [user_prompt("bad", 1), user_prompt("fade", 2), user_prompt("cafe", 3)]


class Killing:
    """Hears of the progress, and kills the draft during it. The next one can come once it is waited for."""

    def __init__(self, pair: Survivor) -> None:
        self.pair = pair
        self.notes: list[str] = []

    def progress(self, _label: str, done: int, _num: int) -> None:
        if done == KILLED_AT:
            drafts = self.pair.drafts
            self.pair.kill()
            assert drafts.ending(TIMEOUT_SECONDS)
            drafts.ending = lambda _timeout: None  # or the next one may join before the answer's last token

    def note(self, line: str) -> None:
        self.notes.append(line)
        vars(self.pair.drafts).pop("ending", None)


def compare(lives: Mapping[int, str], **settings: object) -> tuple[Comparison, list[str], Survivor]:
    schedule = decoding(Mode.ASYNCHRONOUS, policy="chain", max_silence_seconds=60.0)
    contestants = [Contestant(replace(schedule, mode=Mode.AUTOREGRESSIVE), None), Contestant(schedule, "oracle")]
    comparison = Comparison(contestants, answers=[[], []])
    config = from_mapping(RunConfig, {"sampling": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}, **settings})
    with survivor("shared_memory", lives) as pair:
        killing = Killing(pair)
        run_comparison(pair.engine, config, PROMPTS, comparison, killing.progress, killing.note)
        return comparison, killing.notes, pair


def alone(comparison: Comparison) -> list[int]:
    return [answer.metrics.num_tokens_alone for answer in comparison.answers[1]]


def test_a_draft_that_was_lost_is_there_again_before_anything_else_is_measured() -> None:
    comparison, notes, pair = compare({})
    assert alone(comparison) == [0, NUM_TOKENS, 0]
    assert notes == [WAITING]
    assert (len(pair.engine.draft_losses), pair.engine.num_draft_restarts) == (1, 1)


def test_what_was_answered_is_on_disk_before_the_next_prompt_is_asked(tmp_path: Path) -> None:
    config = from_mapping(
        RunConfig,
        {"mode": "synchronous", "drafter": {"kind": "ngram"}, "sampling": {"max_new_tokens": 5, "ignore_eos": True}},
    )
    found: list[int] = []

    class Looking(Console):
        def progress(self, label: str, num_done: int, number: int) -> None:
            file = tmp_path / ANSWERS_FILE
            found.append(len(file.read_text().splitlines()) if file.exists() else 0)

    with pair({"ngram": lambda: NgramDrafter(2)}) as (engine, _):
        command.compare(config, engine, Looking(json_only=True), PROMPTS, tmp_path)
    assert found == [0, 0, 2, 2, 4, 4]


def test_answers_are_in_the_order_of_their_prompts_whichever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = command.in_flight

    def backwards(*arguments: Any) -> Iterator[tuple[int, Answer]]:
        return reversed([*in_flight(*arguments)])

    plain = Contestant(decoding(Mode.AUTOREGRESSIVE), None, batch_size=3)
    prompts, params = [(5, 6), (7,), (8, 9, 10)], SamplingParams(max_new_tokens=4, ignore_eos=True)
    with pair({"ngram": lambda: NgramDrafter(2)}, max_num_seqs=3, pass_seconds=0.0) as (engine, _):
        expected = [command.answer(Scripts(engine), plain, [prompt], params)[0][0].token_ids for prompt in prompts]
        monkeypatch.setattr(command, "in_flight", backwards)
        found, seconds = command.answer(Scripts(engine), plain, prompts, params)
    assert [one.token_ids for one in found] == expected
    assert len({one.token_ids for one in found}) == len(prompts)
    assert seconds > 0
