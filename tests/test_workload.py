"""Prompts in every documented layout, and mistakes in one line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from lines import refusal

from amusd.config import RunConfig, WorkloadConfig
from amusd.errors import ConfigError
from amusd.workload import load_prompts, prompts_of


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return str(path)


USER, SYSTEM, ANSWER = ({"role": role, "content": role.title()} for role in ("user", "system", "assistant"))
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, str]], dict[str, Any]]] = {
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "User", "entry_point": "f", "canonical_solution": "", "test": "def check"},
        [USER],
        {},
    ),
    "MT-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["User", "Second"], "reference": ["a", "b"]},
        [USER],
        {"question_id": 81, "category": "writing"},
    ),
    "Spec-Bench": (
        {"question_id": 161, "category": "math  reasoning", "turns": ["User"]},
        [USER],
        {"question_id": 161, "category": "math reasoning"},
    ),
    "GSM8K": ({"question": "User", "answer": "#### 4"}, [USER], {}),
    "SPEED-Bench": (  # as its prepare.py writes it
        {
            "question_id": "0123456789abcdef0123456789abcdef", "category": "coding", "source": "s",
            "src_id": "1", "sub_category": None, "multiturn": True, "messages": [USER, {**USER, "content": "Second"}],
        },
        [USER],
        {"question_id": "0123456789abcdef0123456789abcdef", "category": "coding", "later": ("Second",)},
    ),
    "an unanswered conversation": ({"conversation": [USER, ANSWER, USER, ANSWER]}, [USER, ANSWER, USER], {}),
    "messages with answers": ({"messages": [SYSTEM, USER, ANSWER, USER]}, [SYSTEM, USER], {"later": ("User",)}),
    "keys that are not needed": ({"prompt": "User", "messages": "text", "turns": 3, "question": {}}, [USER], {}),
    "null": ({"turns": None, "question": "User", "category": None, "messages": None, "conversation": None}, [USER], {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(tmp_path: Path, layout: str) -> None:
    record, turns, told = LAYOUTS[layout]
    (prompt,) = load_prompts(WorkloadConfig(path=write(tmp_path / "prompts.jsonl", record)))
    assert prompt.turns == tuple(turns)
    found = (prompt.number, prompt.category, prompt.question_id, tuple(turn["content"] for turn in prompt.later))
    assert found == (1, told.get("category"), told.get("question_id"), told.get("later", ()))


def test_a_conversation_asks_its_messages_after_the_answers(tmp_path: Path) -> None:
    called, asked = {"role": "assistant", "content": None}, {**USER, "content": "Second"}
    record = {"messages": [USER, called, SYSTEM, asked, SYSTEM]}
    (first,) = load_prompts(WorkloadConfig(path=write(tmp_path / "prompts.jsonl", record)))
    second = first.following("told")
    assert second is not None
    assert second.asked == [USER, {**ANSWER, "content": "told"}, SYSTEM, asked]
    assert (first.turn, second.turn, first.num_turns, second.following("more")) == (1, 2, 2, None)


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\\n\\n{question}"
BAD = {
    "": "no prompts in it",
    '{"turns": "abc"}\n': r"line 1: .*at `\$\.turns`",
    '\n{"prompt": 3}\n': r"line 2: .*Expected `str \| null`, got `int` - at `\$\.prompt`",
    '{"prompt": "\\ud800"}\n': "line 1: expected an object",
    '{"conversation": [{"role": "assistant", "content": "x"}]}\n': "line 1: .*there is none of these",
    '{"messages": [{"role": "system", "content": "x"}]}\n': "line 1: .*there is none of these",
    '{"messages": [{"role": "user", "content": ""}]}\n': "line 1: .*a message has no text",
    '{"turns": ["a"]}\n{"prompt": "b"}\n{"messages": [{"role": "user", "content": "' + PLACEHOLDER + '"}]}\n': (
        "line 3: SPEED-Bench's placeholder; its prepare.py fetches the text"
    ),
    "[" * 100_000: "line 1: .*",
}


@pytest.mark.parametrize("content", BAD, ids=lambda content: ascii(content[:40]))
def test_a_bad_file_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    line = refusal(lambda: load_prompts(WorkloadConfig(path=str(path))))
    assert re.match(f"workload.path={path}: {BAD[content]}", line)


def test_what_json_allows_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    texts = ["one\u2028two", "one\u2029two", "one\u0085two", "\U0001f600"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")  # as Windows writes it
    prompts = load_prompts(WorkloadConfig(path=str(path)))
    assert [(prompt.number, prompt.text) for prompt in prompts] == list(enumerate(texts, start=1))


def asked(path: str | None, **keys: object) -> RunConfig:
    return RunConfig(workload=WorkloadConfig(path=path, **keys))  # type: ignore[arg-type]


def test_more_prompts_than_there_are_is_one_line_unless_nobody_asked_for_them(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert len(prompts_of("compare", asked(path))) == 2
    assert len(prompts_of("compare", asked(path, num_prompts=2))) == 2
    with pytest.raises(ConfigError, match=f"^workload.num_prompts=3: workload.path={path} has only 2$"):
        prompts_of("compare", asked(path, num_prompts=3))
    with pytest.raises(ConfigError, match=r"^workload\.num_prompts=99: the built-in file has only 16$"):
        prompts_of("compare", asked(None, num_prompts=99))


def test_files_that_cannot_be_read_again_are_refused() -> None:
    line = refusal(lambda: load_prompts(WorkloadConfig(path=os.devnull)))
    assert line == f"workload.path={os.devnull}: not a regular file; it has to be read more than once"
    line = refusal(lambda: prompts_of("generate", RunConfig(out=os.devnull)))
    assert line == f"out={os.devnull}: not a regular file; it has to be read, too"


def test_an_answer_needs_one_prompt_and_the_typed_one_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"bad": "line"})
    assert [prompt.text for prompt in prompts_of("generate", asked(path, num_prompts=9))] == ["a"]
    for command in ("generate", "compare"):
        assert [prompt.text for prompt in prompts_of(command, RunConfig(prompt="typed"))] == ["typed"]
