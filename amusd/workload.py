"""Prompts from files of JSON lines, in the layouts that people have at hand."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from amusd.config import RunConfig, WorkloadConfig
from amusd.config.commands import DEFAULT_PROMPTS
from amusd.errors import ConfigError

_EXPECTED = "expected an object with 'prompt', 'turns' or 'conversation'"


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


def prompts_of(command: str, config: RunConfig) -> list[WorkloadPrompt]:
    """What `generate` or `compare` is to answer. Raises `ConfigError` as `load_prompts`, and if there are too few."""
    workload = config.workload
    if command == "generate":
        if config.prompt is not None:
            return [user_prompt(config.prompt)]
        workload = dataclasses.replace(workload, num_prompts=1)
    prompts = load_prompts(workload)
    asked = workload.num_prompts
    if asked is not None and len(prompts) < asked:
        raise ConfigError(f"workload.num_prompts={asked}: {_name(workload)} has only {len(prompts)}")
    return prompts


def load_prompts(config: WorkloadConfig) -> list[WorkloadPrompt]:
    """The first prompts, as many as asked for or there are.

    Raises `ConfigError`, naming file and line, if there are none or one is bad.
    """
    wanted = config.num_prompts or DEFAULT_PROMPTS
    prompts: list[WorkloadPrompt] = []
    # Lines end where JSON Lines says: `splitlines` would also cut at U+2028 and U+0085, which strings may hold.
    for number, line in enumerate(_read(config).split("\n"), start=1):
        if line.strip() and len(prompts) < wanted:
            prompts.append(_parse(line, number, _name(config)))
    if not prompts:
        raise ConfigError(f"{_name(config)}: no prompts in it")
    return prompts


def _name(config: WorkloadConfig) -> str:
    return "the built-in file" if config.path is None else f"workload.path={config.path}"


def _read(config: WorkloadConfig) -> str:
    if config.path is None:
        return resources.files("amusd").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    path = Path(config.path)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"workload.path={path}: not a regular file, which can be read more than once")
        return path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.path={path}: not UTF-8 text (byte {error.start}: {error.reason})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"workload.path={path}: {error}") from error


def user_prompt(text: str, number: int = 1, category: str | None = None) -> WorkloadPrompt:
    """A prompt that is one message."""
    return WorkloadPrompt(number, ({"role": "user", "content": text},), category)


def _parse(line: str, number: int, source: str) -> WorkloadPrompt:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise TypeError("not an object")
        turns = _turns(record)
        if not turns:
            raise ValueError("no turns to answer")
        for text in (text for turn in turns for text in turn.values()):
            _check_text(text)
    except KeyError as error:
        raise ConfigError(f"{source}: line {number}: {_EXPECTED} (no {error})") from error
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"{source}: line {number}: {_EXPECTED} ({error})") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: line {number}: {_EXPECTED} (nested too deeply)") from error
    return WorkloadPrompt(number, turns, record.get("category"))


def _turns(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    if "conversation" not in record:
        message = record["prompt"] if "prompt" in record else _listed(record, "turns")[0]
        return user_prompt(message).turns
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in _listed(record, "conversation")]
    assistant = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    return tuple(turns[: assistant[-1]] if assistant else turns)


def _listed(record: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(record[key], list):
        raise TypeError(f"{key!r} is no list")
    return list(record[key])


def _check_text(text: Any) -> None:
    """Raise `ValueError` unless it is a text that a tokenizer and a file can take."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{str(text)[:40]!r} is empty or not a string")
    text.encode()  # a lone surrogate is half a character
