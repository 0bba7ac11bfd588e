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
class Prompt:
    """One prompt of a workload."""

    number: int
    """Line of the file, from 1."""
    text: str
    category: str | None


def load_prompts(config: WorkloadConfig) -> list[Prompt]:
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
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and len(prompts) < config.num_prompts:
            prompts.append(_parse(line, number, source))
    if not prompts:
        raise ConfigError(f"workload.path={config.path}: no prompts in it")
    return prompts


def _parse(line: str, number: int, source: str) -> Prompt:
    try:
        record: dict[str, Any] = json.loads(line)
        text = _text(record)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"workload.path={source}: line {number}: expected JSON with 'prompt', 'turns' or 'conversation' ({error})"
        ) from error
    return Prompt(number, text, record.get("category"))


def _text(record: dict[str, Any]) -> str:
    if "prompt" in record:
        text = record["prompt"]
    elif "turns" in record:
        text = record["turns"][0]
    else:
        text = _conversation(record["conversation"])
    if not isinstance(text, str) or not text:
        raise ValueError("empty or not a string")
    return text


def _conversation(turns: list[dict[str, str]]) -> str:
    """Everything up to the last assistant turn, as one message."""
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=len(turns))
    return "\n\n".join(turn["content"] for turn in turns[:last])
