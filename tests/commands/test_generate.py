"""`amusd generate out=FILE`: the whole file in its order, resumed after an interruption."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from full_disk import files_of_at_most
from runtime.pair import plain_engine

from amusd.commands.generate import generate as answer_one
from amusd.commands.generate import generate_file, in_flight
from amusd.commands.job import Job
from amusd.config import RunConfig
from amusd.console import Console
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.settings import from_mapping
from amusd.workload import AnswersFile, prompts_of

TEXTS = ["bad", "fade", "cafe", "a" * 500, "face", "bead", "deaf"]
TOO_LONG = 4


def write_prompts(folder: Path, records: Sequence[dict[str, Any]]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def talk_of(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    values = {
        "mode": "autoregressive",
        "out": str(tmp_path / "answers.jsonl"),
        "workload": {"path": write_prompts(tmp_path, [{"prompt": text} for text in TEXTS])},
        "sampling": {"max_new_tokens": 9, "ignore_eos": True},
    }
    return from_mapping(RunConfig, values)


def generate(config: RunConfig, engine: Engine) -> dict[str, Any]:
    return generate_file(Job(config, Console(), Path(str(config.out)).parent, [], lambda: engine), engine)[0]


def written(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(str(config.out)).read_text().splitlines()]


def test_a_file_is_answered_in_its_order_whoever_ends_first(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter(range(40, 0, -6))
    with plain_engine(3) as engine:
        submit = engine.submit

        def shorter(prompt: Any, params: Any = None, **options: Any) -> Any:
            return submit(prompt, type(params)(max_new_tokens=next(lengths), ignore_eos=True), **options)

        monkeypatch.setattr(engine, "submit", shorter)
        result = generate(config, engine)
    lines = written(config)
    assert [(line["id"], line["prompt"]) for line in lines] == [
        (number, text) for number, text in enumerate(TEXTS, start=1) if number != TOO_LONG
    ]
    assert [line["metrics"]["num_tokens"] for line in lines] == [40, 34, 28, 22, 16, 10]
    assert (result["num_answers"], result["num_refused_prompts"], result["num_tokens"]) == (6, 1, 150)


def test_a_second_run_goes_on_after_the_last_whole_line(config: RunConfig) -> None:
    with plain_engine() as engine:
        generate(config, engine)
        file = Path(str(config.out))
        lines = file.read_text().splitlines(keepends=True)
        for keep, half in ((2, '{"id": 1, "prompt"'), (5, lines[-1].rstrip("\n"))):
            file.write_text("".join(lines[:keep]) + half)
            generate(config, engine)
            assert [line["id"] for line in written(config)] == [1, 2, 3, 5, 6, 7]
        before = file.read_text()
        assert (prompts_of("generate", config), generate(config, engine)["num_prompts"]) == ([], 0)
        assert file.read_text() == before


TALKS = [["bad", "fade", "cafe"], ["face"], ["bead", "a" * 490, "deaf"], ["dead", "feed"]]


def test_a_conversation_goes_on_after_its_own_answers_also_in_a_second_run(config: RunConfig, tmp_path: Path) -> None:
    talks = [{"question_id": f"q{number}", "messages": talk_of(*talk)} for number, talk in enumerate(TALKS, start=1)]
    write_prompts(tmp_path, talks)
    file = Path(str(config.out))
    with plain_engine(2) as engine:
        result = generate(config, engine)
        lines = written(config)
        whole = file.read_text().splitlines(keepends=True)
        for keep in (1, 2, 4, 5):
            file.write_text("".join(whole[:keep]))
            generate(config, engine)
            assert [line | {"metrics": 0} for line in written(config)] == [line | {"metrics": 0} for line in lines]
    asked = [(line["id"], line["turn"], line["question_id"]) for line in lines]
    assert asked == [(1, 1, "q1"), (1, 2, "q1"), (1, 3, "q1"), (2, 1, "q2"), (3, 1, "q3"), (4, 1, "q4"), (4, 2, "q4")]
    said = [turn["content"] for turn in lines[2]["prompt"]]
    assert said == ["bad", lines[0]["text"], "fade", lines[1]["text"], "cafe"]
    assert (result["num_answers"], result["num_prompts"], result["num_refused_prompts"]) == (7, 4, 1)


class Ends:
    """An answer that is over after `num_steps` steps of the engine."""

    def __init__(self, name: str, num_steps: int) -> None:
        self.name, self.num_steps, self.all_tokens_at = name, num_steps, None

    @property
    def is_over(self) -> bool:
        return self.num_steps <= 0


def test_no_turn_is_left_out_whenever_the_answers_end() -> None:
    started: list[Ends] = []

    def step() -> None:
        for answer in started:
            answer.num_steps -= 1

    def conversation(name: str, steps: list[int], *, steps_between: bool) -> Iterator[Any]:
        for number, num_steps in enumerate(steps, start=1):
            if number > 1 and steps_between:
                step()
            started.append(Ends(f"{name}{number}", num_steps))
            yield started[-1]

    engine: Any = SimpleNamespace(scheduler=SimpleNamespace(step=step))
    talks = [conversation("a", [2, 1], steps_between=False), conversation("b", [1, 1], steps_between=True)]
    assert [answer.name for answer in cast("Any", in_flight(engine, iter(talks), 2))] == ["a1", "a2", "b1", "b2"]


def test_a_turn_that_fails_costs_no_answer_before_it(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt": "bad"}, {"prompt": "fade"}, {"messages": talk_of("bead", "deaf")}]
    write_prompts(tmp_path, records)
    with plain_engine(3) as engine:
        submit = engine.submit

        def failing(prompt: Any, *given: Any, **options: Any) -> Any:
            answer = submit(prompt, *given, **options)
            if len(answers := [*answers_of, answer]) == len(records):
                answer.fail(ValueError("not finite"))
            answers_of[:] = answers
            return answer

        answers_of: list[Any] = []
        monkeypatch.setattr(engine, "submit", failing)
        with pytest.raises(ValueError, match="not finite"):
            generate(config, engine)
    assert [line["id"] for line in written(config)] == [1, 2]


def test_one_conversation_is_shown_turn_by_turn(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(config, out=None)
    prompt = replace(prompts_of("generate", alone)[0], later=tuple(talk_of("fade")))
    with plain_engine() as engine:
        result, _, notes = answer_one(Job(alone, Console(), tmp_path, [prompt], lambda: engine), engine)
        first = engine.generate("bad", config.sampling).text
        assert result["text"] == engine.generate(f"bad{first}fade", config.sampling).text
    assert (result["turn"], [turn["content"] for turn in result["prompt"]]) == (2, ["bad", first, "fade"])
    assert len(list(notes)) == 2
    assert capsys.readouterr().out.split() == [">", "bad", first, ">", "fade", result["text"]]


def test_what_is_written_before_an_interruption_stays_and_is_not_answered_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(label: str, num_done: int, _number: int) -> None:
        assert label.endswith(" tokens/s")
        if num_done == 3:
            raise KeyboardInterrupt

    folder = Path(str(config.out)).parent
    with plain_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr("amusd.commands.generate.show_progress", interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(config, engine)
        assert not engine.scheduler.step()  # nothing goes on
        kept = json.loads((folder / "result.json").read_text())
        num_kept = len(written(config))
        assert (kept["complete"], kept["num_answers"]) == (False, num_kept)
        assert 1 <= num_kept <= 3
        assert generate(config, engine)["num_answers"] == 6 - num_kept
    assert [line["id"] for line in written(config)] == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"id": 1, "prompt": "bad", "settings": "others"}', "was answered with other settings"),
        ('{"id": 1, "prompt": "b", "settings": "SETTINGS"}', "answers another prompt"),
        ("[" * 100_000, "is no answer that `amusd generate` has written"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(config: RunConfig, content: str, told: str) -> None:
    Path(str(config.out)).write_text(content.replace("SETTINGS", AnswersFile(config)._settings) + "\n")
    with pytest.raises(ConfigError, match=f"^out={config.out}: line 1 {told}; name another file$"):
        prompts_of("generate", config)
    changed = replace(config, mode="synchronous")
    assert AnswersFile(changed)._settings != AnswersFile(config)._settings


def test_a_line_without_an_end_that_begins_no_answer_is_not_cut_off(config: RunConfig) -> None:
    Path(str(config.out)).write_text('{"prompt": "mine"}')
    with pytest.raises(ConfigError, match=f"^out={config.out}: line 1 is no answer that `amusd generate` has written"):
        prompts_of("generate", config)


def test_a_file_that_another_run_writes_to_is_refused(config: RunConfig) -> None:
    with Path(str(config.out)).open("ab") as file, plain_engine() as engine:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run writes to it"):
            generate(config, engine)


def test_an_error_of_the_engine_is_not_called_one_of_the_file(config: RunConfig) -> None:
    answers = AnswersFile(config)
    with pytest.raises(BlockingIOError), answers.opened():
        raise BlockingIOError
    with answers.opened() as file, files_of_at_most(0), pytest.raises(ConfigError, match="cannot be written"):
        answers.append(file, prompts_of("generate", config)[0], {"text": "a"})
