"""Shared by the tests of scripts that train drafts. These scripts import each other by their plain names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MODULES = ("dataset", "losses", "progress", "student", "teacher", "label", "train", "package", "evaluate")
MODULES += ("layouts", "networks", "train_drafter")
Call = Callable[..., None]


@pytest.fixture(scope="package")
def scripts() -> Iterator[dict[str, ModuleType]]:
    before = list(sys.path)
    sys.path[:0] = [str(EXPERIMENTS / "drafters"), str(EXPERIMENTS / "embedded_draft")]
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def call(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the script of this name as the command with these arguments and options."""

    def run(name: str, *arguments: str, **options: object) -> None:
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        monkeypatch.setattr(sys, "argv", [name, *arguments, *given])
        scripts[name].main()

    return run


@pytest.fixture
def text(scripts: dict[str, ModuleType]) -> Any:
    """Twenty random rows of up to 40 tokens, the first ten of each a prompt."""
    random = np.random.default_rng(0)
    length, columns = random.integers(24, 40, 20), np.arange(40)
    answer = (columns >= 10) & (columns < length[:, None])
    return scripts["dataset"].Text(random.integers(17, 97, (20, 40)), length, answer, np.ones(20, np.float32), 4)
