"""Prompts from files of JSON lines in common layouts, and the file of their answers."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from amusd.config import RunConfig, WorkloadConfig
from amusd.config.commands import DEFAULT_PROMPTS
from amusd.errors import ConfigError
from amusd.files import cannot_write
from amusd.settings import Text, shown, to_mapping

_EXPECTED = (
    "expected an object with 'prompt', 'question', 'turns', an unanswered 'conversation' or 'messages' of the user"
)
_LAYOUTS = ("conversation", "prompt", "turns", "question", "messages")
"""Keys of the user's messages. A line's first key in this order counts; other keys may hold anything."""
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Placeholder for texts that SPEED-Bench does not publish (`docs/datasets.md`)."""


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """One prompt of a workload, and the later messages of its conversation."""

    number: int
    """Line of the file, from 1."""
    turns: tuple[dict[str, str], ...]
    category: str | None = None
    question_id: Any = None
    later: tuple[dict[str, str], ...] = ()
    """Later messages, without the assistant's."""
    turn: int = 1
    """Number of the user's message that is asked, from 1."""

    @property
    def text(self) -> str:
        """The message that is asked."""
        return self.turns[-1]["content"]

    @property
    def asked(self) -> str | list[dict[str, str]]:
        """The asked message if it is alone, else all turns."""
        return self.text if len(self.turns) == 1 else list(self.turns)

    @property
    def labels(self) -> dict[str, Any]:
        """Fields that identify the prompt beside its line number."""
        return {"turn": self.turn, "category": self.category, "question_id": self.question_id}

    def following(self, answer: str) -> WorkloadPrompt | None:
        """The prompt that asks the conversation's next message after `answer`; None without a next one."""
        if not self.later:
            return None
        asked = next(place for place, turn in enumerate(self.later, start=1) if turn["role"] == "user")
        turns = (*self.turns, {"role": "assistant", "content": answer}, *self.later[:asked])
        return dataclasses.replace(self, turns=turns, later=self.later[asked:], turn=self.turn + 1)

    @property
    def num_turns(self) -> int:
        """Number of answers that the rest of the conversation needs."""
        return 1 + sum(turn["role"] == "user" for turn in self.later)


def prompts_of(command: str, config: RunConfig) -> list[WorkloadPrompt]:
    """The prompts to answer; with `out`, only unanswered prompts, perhaps none.

    Raises `ConfigError` as `load_prompts` and `AnswersFile.rest`.
    """
    if command == "generate" and config.out is not None:
        return AnswersFile(config).rest(load_prompts(config.workload, sys.maxsize))
    if config.prompt is not None:
        return [user_prompt(config.prompt)]
    if command == "generate":
        return load_prompts(dataclasses.replace(config.workload, num_prompts=1))
    return load_prompts(config.workload)


def load_prompts(config: WorkloadConfig, default: int = DEFAULT_PROMPTS) -> list[WorkloadPrompt]:
    """The first `num_prompts` prompts; without `num_prompts`, at most `default`.

    Raises `ConfigError` with file and line if there are none or too few, or one is bad.
    """
    wanted = config.num_prompts or default
    # Not by `splitlines`, which also cuts at U+2028 and U+0085: a string of JSON may hold them.
    lines = ((number, line) for number, line in enumerate(_read(config).split("\n"), start=1) if line.strip())
    source = "the built-in file" if config.path is None else f"workload.path={config.path}"
    prompts = [_parse(line, number, source) for number, line in islice(lines, wanted)]
    if not prompts:
        raise ConfigError(f"{source}: no prompts in it")
    if len(prompts) < (config.num_prompts or 0):
        raise ConfigError(f"workload.num_prompts={config.num_prompts}: {source} has only {len(prompts)}")
    return prompts


def _read(config: WorkloadConfig) -> str:
    if config.path is None:
        return resources.files("amusd").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    path = Path(config.path)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"workload.path={path}: not a regular file; it has to be read more than once")
        return path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"workload.path={shown(path)}: cannot be read ({why})") from error


def user_prompt(text: str) -> WorkloadPrompt:
    """A prompt that is one message."""
    return WorkloadPrompt(1, ({"role": "user", "content": text},))


class _Turn(msgspec.Struct):
    role: str
    content: Any = None


class _Record(msgspec.Struct):
    """A line of a file of prompts, in one of `_LAYOUTS`."""

    conversation: tuple[_Turn, ...] = ()
    prompt: Text | None = None
    turns: tuple[Text, ...] = ()
    question: Text | None = None
    messages: tuple[_Turn, ...] = ()

    def asked(self) -> tuple[Sequence[_Turn], Sequence[_Turn]]:
        """The turns of the first request, and the later turns up to the user's last message."""
        if self.conversation:
            answers = [place for place, turn in enumerate(self.conversation) if turn.role == "assistant"]
            return self.conversation[: answers[-1] if answers else None], ()
        if self.messages:
            said = [turn for turn in self.messages if turn.role != "assistant"]
            ends = [place for place, turn in enumerate(said, start=1) if turn.role == "user"] or [0]
            return said[: ends[0]], said[ends[0] : ends[-1]]
        texts = filter(None, [self.prompt, *self.turns[:1], self.question])
        return [_Turn("user", text) for text in texts], ()


def _parse(line: str, number: int, source: str) -> WorkloadPrompt:
    if _PLACEHOLDER in line:
        raise ConfigError(f"{source}: line {number}: SPEED-Bench's placeholder; its prepare.py fetches the text")
    try:
        given = msgspec.json.decode(line, type=dict[str, Any])
        layout = next((name for name in _LAYOUTS if given.get(name) not in (None, [])), None)
        record = msgspec.convert({} if layout is None else {layout: given[layout]}, _Record)
        turns, later = (tuple(map(msgspec.to_builtins, part)) for part in record.asked())
        if not turns:
            raise ValueError("there is none of these")
        if not all(isinstance(turn["content"], str) and turn["content"] for turn in (*turns, *later)):
            raise ValueError("a message has no text")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: line {number}: {_EXPECTED} ({error})") from error
    category, question_id = given.get("category"), given.get("question_id")
    category = None if category is None else " ".join(str(category).split())
    return WorkloadPrompt(number, turns, category, question_id, later)


_NO_ANSWER = "is no answer that `amusd generate` has written"
_BEGINNING = b'{"id": '
_DECISIVE = ("target", "drafter", "sampling", "mode", "verify_width", "max_verify_width", "max_model_len", "accept")


class _Answer(msgspec.Struct):
    id: int
    prompt: Any
    settings: str
    text: str = ""
    turn: int = 1


class AnswersFile:
    """The file `out`: answers to prompts in order, a JSON object a line; an incomplete line does not count.

    Each object has `id` (the line number of its prompt), `turn`, the prompt's `category` and `question_id`,
    `prompt`, the answer, and `settings`: a digest of the models and of the settings that choose tokens.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.out is not None
        self.path = Path(config.out)
        values = to_mapping(config)
        decisive = [*map(values.get, _DECISIVE), config.workload.raw, config.hardware.synthetic]
        self._settings = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:12]

    def rest(self, prompts: Sequence[WorkloadPrompt]) -> list[WorkloadPrompt]:
        """The prompts still to answer, the next of a begun conversation included.

        Raises `ConfigError` if the file cannot be read, or has answers of other prompts or settings.
        """
        rest = list(prompts)
        for number, line in enumerate(self._lines(), start=1):
            try:
                answer = msgspec.json.decode(line, type=_Answer)
            except (ValueError, RecursionError):
                raise self._refusal(number, _NO_ANSWER) from None
            if answer.settings != self._settings:
                raise self._refusal(number, "was answered with other settings")
            place = next((place for place, prompt in enumerate(rest) if prompt.number == answer.id), None)
            if place is None or (rest[place].turn, rest[place].asked) != (answer.turn, answer.prompt):
                raise self._refusal(number, "answers another prompt")
            rest[: place + 1] = filter(None, [rest[place].following(answer.text)])
        return rest

    @contextmanager
    def opened(self) -> Iterator[FileIO]:
        """Open the file for `append`. Raises `ConfigError` if that fails, or while another run appends."""
        with ExitStack() as on_exit:
            try:
                file = self.path.open("ab", buffering=0)
                on_exit.callback(file.close)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(sum(map(len, self._lines())))
            except BlockingIOError:
                raise ConfigError(f"out={self.path}: another run writes to it") from None
            except OSError as error:
                raise cannot_write(self.path, error) from None
            yield file

    def append(self, file: FileIO, prompt: WorkloadPrompt, answer: Mapping[str, Any]) -> None:
        """Write an answer. Raises `ConfigError`."""
        record = {"id": prompt.number, **prompt.labels, "prompt": prompt.asked, **answer, "settings": self._settings}
        rest = json.dumps(record).encode() + b"\n"
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def _lines(self) -> Iterator[bytes]:
        try:
            if self.path.exists() and not self.path.is_file():
                raise ConfigError(f"out={self.path}: not a regular file; it has to be read, too")
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.endswith(b"\n"):
                        yield line
                    elif not _BEGINNING.startswith(line[: len(_BEGINNING)]):
                        raise self._refusal(number, _NO_ANSWER)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"out={self.path}: cannot be read ({error.strerror})") from None

    def _refusal(self, number: int, why: str) -> ConfigError:
        return ConfigError(f"out={self.path}: line {number} {why}; name another file")
