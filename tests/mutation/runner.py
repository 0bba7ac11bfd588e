"""Runs tests on a copy of the package in which one rule is broken: they must fail, or they guard nothing.

The copy is a tree of links to the checkout, in which the mutated file alone is a file of its own. Its tests run in a
process forked from one that has imported torch and pytest, so that a rule takes seconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("amusd", "launch", "conf", "docs", "tests", "examples", "pyproject.toml")
SECONDS = 120.0
_PASSED, _FAILED = 0, 1
_CRASHED, _OTHER_COPY = 98, 99


@dataclass(frozen=True)
class Rule:
    what: str
    file: str
    old: str
    new: str
    tests: str


class BrokenRuleError(Exception):
    """The rule itself is wrong: its text is not found exactly once, or its tests cannot be run."""


def mutated(rule: Rule) -> str:
    """The text of the file with the defect. Raises `BrokenRuleError`."""
    file = ROOT / rule.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if (number := text.count(rule.old)) != 1:
        raise BrokenRuleError(f"{rule.what}: the old text is found {number} times in {rule.file}, not once")
    return text.replace(rule.old, rule.new)


def tree_of_links(folder: Path) -> Path:
    for name in COPIED:
        for file in (ROOT / name, *(ROOT / name).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                link = folder / file.relative_to(ROOT)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file)
    return folder


def is_killed(rule: Rule, tree: Path) -> bool:
    """True if the tests notice the defect. Raises `BrokenRuleError`."""
    text, file = mutated(rule), tree / rule.file
    link = file.readlink()
    file.unlink()
    file.write_text(text, encoding="utf-8")
    try:
        code = _run_tests(tree, rule.tests.split())
    finally:
        file.unlink()
        file.symlink_to(link)
    if code not in (_PASSED, _FAILED, None):
        raise BrokenRuleError(f"{rule.what}: pytest ended with exit code {code}; see {tree / 'log'}")
    return code != _PASSED


@functools.cache
def check_passes(tests: str, tree: Path) -> None:
    """Raise `BrokenRuleError` unless these tests pass without any defect: else they would notice every one."""
    if (code := _run_tests(tree, tests.split())) != _PASSED:
        raise BrokenRuleError(f"{tests}: fails without any defect (exit code {code}); see {tree / 'log'}")


def _run_tests(tree: Path, tests: list[str]) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch", "pytest"])
    process = context.Process(target=_pytest, args=(str(tree), tests), daemon=True)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _pytest(tree: str, tests: list[str]) -> None:
    """The whole of the process: pytest in the copy, with what it says in a file there."""
    log = os.open(f"{tree}/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    sys.path.insert(0, tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("amusd", "launch", "conftest")]:
        del sys.modules[name]
    code = _CRASHED
    try:
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not long"]
        code = int(pytest.main([*options, *tests]))
        if not str(getattr(sys.modules.get("amusd"), "__file__", tree)).startswith(tree):
            code = _OTHER_COPY
    finally:
        os._exit(code)
