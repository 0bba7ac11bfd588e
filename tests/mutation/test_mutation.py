"""Every rule of `rules.py` is noticed by its tests; a rule whose text has gone from the code is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation.rules import RULES
from mutation.runner import Rule, check_passes, is_killed, mutated, tree_of_links


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_of_links(tmp_path_factory.mktemp("mutants"))


def test_the_text_of_every_rule_is_found_once_in_its_file() -> None:
    names = [rule.what for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert mutated(rule)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.file}: {rule.what}")
def test_a_defect_is_noticed(rule: Rule, tree: Path) -> None:
    check_passes(rule.tests, tree)
    assert is_killed(rule, tree)
