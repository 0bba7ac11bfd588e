"""Prompts from files of JSON lines, in the layouts that people have at hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from amusd.config import WorkloadConfig
from amusd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """One prompt of a workload."""

    number: int
    """Line of the file, from 1."""
    turns: tuple[dict[str, str], ...]
    """The conversation that waits for an answer: turns with `role` and `content`."""
    category: str | None

    @property
    def text(self) -> str:
        """The last message."""
        return self.turns[-1]["content"]


def load_prompts(config: WorkloadConfig) -> list[WorkloadPrompt]:
    """The first `num_prompts` prompts. Raises `ConfigError`, naming file and line, if there are none or one is bad."""
    if config.path is None:
        source = "the built-in prompts"
        lines = resources.files("amusd").joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    else:
        source = config.path
        try:
            lines = Path(config.path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"workload.path={config.path}: {error}") from error
    prompts: list[WorkloadPrompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and len(prompts) < config.num_prompts:
            prompts.append(_parse(line, number, source))
    if not prompts:
        raise ConfigError(f"workload.path={config.path}: no prompts in it")
    return prompts


def user_prompt(text: str, number: int = 1, category: str | None = None) -> WorkloadPrompt:
    """A prompt that is one message."""
    return WorkloadPrompt(number, ({"role": "user", "content": text},), category)


def _parse(line: str, number: int, source: str) -> WorkloadPrompt:
    try:
        record: dict[str, Any] = json.loads(line)
        turns = _turns(record)
        if not turns or not all(isinstance(turn["content"], str) and turn["content"] for turn in turns):
            raise ValueError("empty or not a string")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"workload.path={source}: line {number}: expected JSON with 'prompt', 'turns' or 'conversation' ({error})"
        ) from error
    return WorkloadPrompt(number, turns, record.get("category"))


def _turns(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    if "conversation" not in record:
        message = record["prompt"] if "prompt" in record else record["turns"][0]
        return user_prompt(message).turns
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in record["conversation"]]
    assistant = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    return tuple(turns[: assistant[-1]] if assistant else turns)
