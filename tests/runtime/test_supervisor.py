"""The child finds the package of its parent, and looks for nothing in the current directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, paced_model, params, reference

import amusd
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, TransportConfig
from amusd.engine import Engine
from amusd.models.table import TableTokenizer
from amusd.runtime import supervisor
from amusd.types import Mode

PACKAGE = Path(amusd.__file__).parent


def config_of(kind: str) -> EngineConfig:
    """With a link of this kind, a drafter that needs no model, and far more time than a test has."""
    drafters = (DrafterConfig(kind="ngram"),)
    transport = TransportConfig(kind=kind)  # type: ignore[arg-type]  # the tests choose it
    return EngineConfig(drafters=drafters, transport=transport, startup_timeout_seconds=3600.0)


@pytest.fixture(autouse=True)
def _table_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.engine.load_with_followers", lambda *_: (paced_model(0.0), TableTokenizer(VOCAB_SIZE)))


def test_the_child_needs_no_path_of_its_own_and_looks_at_nothing_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("amusd", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Engine.start(config_of("shared_memory")) as engine:
        answer = engine.generate(PROMPT, params(8), decoding=DecodingConfig(mode=Mode.SYNCHRONOUS))
        assert answer.token_ids == reference(8)[len(PROMPT) :]
        assert engine.draft_losses == ()


@pytest.mark.parametrize("is_safe", ["", "1"])
def test_the_child_takes_the_package_that_it_lies_in_and_all_else_as_usual(tmp_path: Path, is_safe: str) -> None:
    (tmp_path / "amusd").symlink_to(PACKAGE)
    own = tmp_path / "own"
    own.mkdir()
    (own / "torch.py").write_text("import amusd\nraise SystemExit(amusd.__file__)")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "amusd" / "runtime" / supervisor._ENTRY.name)],
        env={**os.environ, "PYTHONPATH": str(own), "PYTHONSAFEPATH": is_safe},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip() == str(tmp_path / "amusd" / "__init__.py")
