"""Prompts from files of JSON lines in common layouts, and the file of answers to them."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from amusd.config import RunConfig, WorkloadConfig
from amusd.config.commands import DEFAULT_PROMPTS
from amusd.errors import ConfigError
from amusd.files import cannot_write
from amusd.settings import Text, to_mapping

_EXPECTED = "expected an object with a text 'prompt' or 'question', texts 'turns' or an unanswered 'conversation'"


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """One prompt of a workload."""

    number: int
    """Line of the file, from 1."""
    turns: tuple[dict[str, str], ...]
    category: str | None

    @property
    def text(self) -> str:
        """The last message."""
        return self.turns[-1]["content"]

    @property
    def asked(self) -> str | list[dict[str, str]]:
        """The message if it is the only one, else all turns."""
        return self.text if len(self.turns) == 1 else list(self.turns)


def prompts_of(command: str, config: RunConfig) -> list[WorkloadPrompt]:
    """The prompts to answer; with `out`, those that are left, perhaps none.

    Raises `ConfigError` as `load_prompts` and `AnswersFile.num_done`.
    """
    if command == "generate" and config.out is not None:
        prompts = load_prompts(config.workload, sys.maxsize)
        return prompts[AnswersFile(config).num_done(prompts) :]
    if command == "generate" and config.prompt is not None:
        return [user_prompt(config.prompt)]
    if command == "generate":
        return load_prompts(dataclasses.replace(config.workload, num_prompts=1))
    return load_prompts(config.workload)


def load_prompts(config: WorkloadConfig, default: int = DEFAULT_PROMPTS) -> list[WorkloadPrompt]:
    """The first prompts: as many as are asked for, else `default` or all.

    Raises `ConfigError`, naming file and line, if there are none or too few, or one is bad.
    """
    wanted = config.num_prompts or default
    prompts: list[WorkloadPrompt] = []
    # Lines end where JSON Lines says: `splitlines` would also cut at U+2028 and U+0085, which strings may hold.
    for number, line in enumerate(_read(config).split("\n"), start=1):
        if line.strip() and len(prompts) < wanted:
            prompts.append(_parse(line, number, _name(config)))
    if not prompts:
        raise ConfigError(f"{_name(config)}: no prompts in it")
    if len(prompts) < (config.num_prompts or 0):
        raise ConfigError(f"workload.num_prompts={config.num_prompts}: {_name(config)} has only {len(prompts)}")
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


def user_prompt(text: str) -> WorkloadPrompt:
    """A prompt that is one message."""
    return WorkloadPrompt(1, ({"role": "user", "content": text},), None)


class _Turn(msgspec.Struct):
    role: str
    content: Text


class _Record(msgspec.Struct):
    """A line of a file of prompts; other keys are passed over."""

    prompt: Text | None = None
    question: Text | None = None
    turns: tuple[Text, ...] | None = None
    conversation: tuple[_Turn, ...] | None = None
    category: Any = None

    def asked(self) -> tuple[dict[str, str], ...]:
        if not self.conversation:
            texts = self.prompt, *(self.turns or ()), self.question
            return next((user_prompt(text).turns for text in texts if text is not None), ())
        answers = [place for place, turn in enumerate(self.conversation) if turn.role == "assistant"]
        turns = self.conversation[: answers[-1]] if answers else self.conversation
        return tuple({"role": turn.role, "content": turn.content} for turn in turns)


def _parse(line: str, number: int, source: str) -> WorkloadPrompt:
    try:
        record = msgspec.json.decode(line, type=_Record)
        if not (turns := record.asked()):
            raise ValueError("there is none of these")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: line {number}: {_EXPECTED} ({error})") from error
    category = None if record.category is None else " ".join(str(record.category).split())
    return WorkloadPrompt(number, turns, category)


_DECISIVE = ("target", "drafter", "sampling", "mode", "verify_width", "max_verify_width", "max_model_len", "accept")


class _Answer(msgspec.Struct):
    id: int
    prompt: Any
    settings: str


class AnswersFile:
    """The file `out`: answers to prompts in order, a JSON object a line; an incomplete line does not count.

    Each object has `id` (the line number of its prompt), `prompt`, the answer, and `settings`: a digest of all settings
    that can change an answer.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.out is not None
        self.path = Path(config.out)
        values = to_mapping(config)
        decisive = [*map(values.get, _DECISIVE), config.workload.raw, config.hardware.synthetic]
        self._settings = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:12]

    def num_done(self, prompts: Sequence[WorkloadPrompt]) -> int:
        """How many of `prompts` are done, up to the last one answered.

        Raises `ConfigError` if the file is unreadable, or has other answers or settings.
        """
        places, done = {prompt.number: place for place, prompt in enumerate(prompts)}, 0
        for number, line in enumerate(self._lines(), start=1):
            try:
                answer = msgspec.json.decode(line, type=_Answer)
            except (ValueError, RecursionError):
                raise self._refusal(number, "is no answer that `amusd generate` has written") from None
            if answer.settings != self._settings:
                raise self._refusal(number, "was answered with other settings")
            place = places.get(answer.id, -1)
            if place < done or prompts[place].asked != answer.prompt:
                raise self._refusal(number, "answers another prompt")
            done = place + 1
        return done

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, to append to. Raises `ConfigError` if it fails, or another run appends."""
        try:
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(sum(map(len, self._lines())))
                yield file
        except BlockingIOError:
            raise ConfigError(f"out={self.path}: another run writes to it") from None
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def line(self, prompt: WorkloadPrompt, answer: Mapping[str, Any]) -> bytes:
        """An answer as the file holds it."""
        record = {"id": prompt.number, "prompt": prompt.asked, **answer, "settings": self._settings}
        return json.dumps(record).encode() + b"\n"

    def _lines(self) -> Iterator[bytes]:
        try:
            if self.path.exists() and not self.path.is_file():
                raise ConfigError(f"out={self.path}: not a regular file, which can be read as well")
            with self.path.open("rb") as file:
                yield from (line for line in file if line.endswith(b"\n"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"out={self.path}: cannot be read ({error.strerror})") from None

    def _refusal(self, number: int, why: str) -> ConfigError:
        return ConfigError(f"out={self.path}: line {number} {why}; name another file")
