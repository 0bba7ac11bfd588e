"""Prompts in every documented layout, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amusd.config import WorkloadConfig
from amusd.errors import ConfigError
from amusd.workload import load_prompts


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return str(path)


def test_every_layout_is_read(tmp_path: Path) -> None:
    conversation = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "Four"},
    ]
    path = write(
        tmp_path / "prompts.jsonl",
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        {"turns": ["First", "Second"], "category": "writing"},
        {"conversation": conversation},
    )
    prompts = load_prompts(WorkloadConfig(path=path, num_prompts=10))
    assert [prompt.text for prompt in prompts] == ["def f():\n", "First", "Three"]
    assert prompts[2].turns == tuple(conversation[:3])
    assert [prompt.number for prompt in prompts] == [1, 2, 3]
    assert prompts[1].category == "writing"


def test_only_the_first_prompts_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", *({"prompt": str(i)} for i in range(9)))
    assert len(load_prompts(WorkloadConfig(path=path, num_prompts=3))) == 3


def test_prompts_ship_with_the_package() -> None:
    prompts = load_prompts(WorkloadConfig(num_prompts=100))
    assert len(prompts) >= 16
    assert len({prompt.text for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", "not json\n", "[1]\n", '{"text": "x"}\n', '{"turns": []}\n', '{"prompt": ""}\n', '{"prompt": 3}\n'],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_prompts(WorkloadConfig(path=str(path)))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(WorkloadConfig(path="/nowhere/prompts.jsonl"))
