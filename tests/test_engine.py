"""The facade, the comparison and the commands, over a pair of table models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from lines import logged
from models import tiny
from oracle import always_wrong
from runtime.pair import PROMPT, decoding, oracle, pair, params, reference

from amusd.commands.job import Job
from amusd.config import EngineConfig, RunConfig, TargetConfig
from amusd.console import Console
from amusd.drafters.synthetic import right_with_probability
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.settings import from_mapping
from amusd.tracing.recorder import Recorder
from amusd.types import Mode
from amusd.workload import prompts_of
from launch.commands import run_command

TEXT = "deafbead"
FACTORY = oracle(60, right_with_probability(0.7, 1))


def run_config(**changes: object) -> RunConfig:
    return from_mapping(
        RunConfig,
        {"drafter": {"kind": "ngram"}, "compare": {"synchronous_lengths": [2, 4]}, "max_lookahead": 8, **changes},
    )


def test_the_counts_of_an_engine_add_up_what_answers_count() -> None:
    with pair({"ngram": FACTORY}, pass_seconds=0.005) as (engine, draft):
        found = [engine.generate(PROMPT, params(20), decoding=decoding(mode)).metrics for mode in get_args(Mode)]
        assert (engine.draft.presence, engine.draft.failure) == ("present", None)
        counts = replace(engine.worker.counts)
        for name in ("num_passes", "num_tokens", "num_drafts", "num_verified", "num_accepted", "num_tokens_alone"):
            assert getattr(counts, name) == sum(getattr(metrics, name) for metrics in found), name
        assert counts.num_accepted > 0
        draft.link.kill()
        lost = engine.generate(PROMPT, params(20), decoding=decoding("asynchronous")).metrics
        assert engine.draft.presence == "failed"  # this engine starts no other one
        assert engine.draft.failure is not None
        assert engine.worker.counts.num_tokens_alone == counts.num_tokens_alone + lost.num_tokens_alone


class Commands:
    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        (tmp_path / "events").mkdir()

    def run(self, command: str, engine: Engine, config: RunConfig) -> int:
        console = Console(json_only=config.output == "json")
        return run_command(command, Job(config, console, self.directory, prompts_of(command, config), lambda: engine))

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return result


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def test_generate_streams_the_text_and_leaves_a_result(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    with pair({"ngram": FACTORY}) as (engine, _):
        config = run_config(prompt=TEXT, sampling={"max_new_tokens": 12})
        with logged() as lines:
            assert commands.run("generate", engine, config) == 0
        text = engine.tokenizer.decode(reference(12, tuple(engine.tokenizer.encode(TEXT)))[len(TEXT) :])
    shown = capsys.readouterr()
    assert shown.out == text + "\n"
    assert lines[-1].startswith("asynchronous: 12 tokens (length)")
    assert commands.result()["text"] == text


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_json_is_all_of_standard_output(commands: Commands, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pair({"ngram": FACTORY}) as (engine, _):
        config = run_config(prompt=TEXT, output="json", sampling={"max_new_tokens": 12}, workload={"num_prompts": 2})
        assert commands.run(command, engine, config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    document = json.loads(lines[0])
    assert document == commands.result()
    assert document["run_dir"] == str(commands.directory)


def test_a_lost_draft_gives_a_whole_answer_and_a_non_zero_exit(commands: Commands) -> None:
    with logged() as lines, pair({"ngram": oracle(60, always_wrong())}) as (engine, draft):
        draft.link.kill()
        config = run_config(prompt=TEXT, sampling={"max_new_tokens": 12})
        assert commands.run("generate", engine, config) == 1
        assert lines[-1].startswith("the draft was lost and the target went on alone")
        assert commands.result()["finish_reason"] == "length"
        engine.worker.recorder.is_whole = False  # nor are the events
        assert commands.run("generate", engine, config) == 2


def test_a_target_that_ranks_cannot_share_is_refused_before_anybody_is_called(tmp_path: Path) -> None:
    tiny.tiny_config("LlamaConfig").save_pretrained(tmp_path)  # with two key heads, and without weights
    config = EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path)), target_tensor_parallel_size=3)
    drafts, meeting = Mock(), Mock()
    with pytest.raises(ConfigError, match=r"^target_tensor_parallel_size=3: .* allowed: 1 to 2$"):
        Engine.connect(config, drafts, Recorder("target"), meeting=meeting)
    drafts.stop.assert_called_once_with()
    drafts.tell.assert_not_called()
    meeting.stop.assert_called_once_with()
