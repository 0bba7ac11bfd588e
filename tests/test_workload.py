"""Prompts in every documented layout, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amusd.config import RunConfig, WorkloadConfig
from amusd.errors import ConfigError
from amusd.workload import load_prompts, prompts_of


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return str(path)


def test_every_layout_is_read(tmp_path: Path) -> None:
    turns = zip(("user", "assistant") * 2, ("One", "Two", "Three", "Four"), strict=True)
    conversation = [{"role": role, "content": content} for role, content in turns]
    path = write(
        tmp_path / "prompts.jsonl",
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        {"turns": ["First", "Second"], "category": "writing"},
        {"conversation": conversation},
        {"question": "How many?", "answer": "#### 4"},
        {"turns": None, "question": "q", "category": None},
        {"conversation": None, "turns": ["a"], "prompt": None},
    )
    prompts = load_prompts(WorkloadConfig(path=path), default=9)
    assert [prompt.text for prompt in prompts] == ["def f():\n", "First", "Three", "How many?", "q", "a"]
    assert prompts[2].turns == tuple(conversation[:3])
    assert [prompt.number for prompt in prompts] == [1, 2, 3, 4, 5, 6]
    assert prompts[1].category == "writing"


BAD = {
    "": "no prompts in it",
    '{"turns": "abc"}\n': r"line 1: .*at `\$\.turns`",
    '\n{"prompt": 3}\n': r"line 2: .*Expected `str \| null`, got `int` - at `\$\.prompt`",
    '{"prompt": "\\ud800"}\n': "line 1: expected an object",
    '{"conversation": [{"role": "assistant", "content": "x"}]}\n': "line 1: .*there is none of these",
    "[" * 100_000: "line 1: .*",
}


@pytest.mark.parametrize("content", BAD, ids=lambda content: ascii(content[:40]))
def test_a_bad_file_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"^workload.path={path}: {BAD[content]}") as caught:
        load_prompts(WorkloadConfig(path=str(path)))
    assert "\n" not in str(caught.value)


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


def test_an_answer_needs_one_prompt_and_the_typed_one_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"bad": "line"})
    assert [prompt.text for prompt in prompts_of("generate", asked(path, num_prompts=9))] == ["a"]
    assert [prompt.text for prompt in prompts_of("generate", RunConfig(prompt="typed"))] == ["typed"]
