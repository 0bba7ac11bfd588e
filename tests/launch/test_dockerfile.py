"""The Dockerfile, read: no image is built here."""

from __future__ import annotations

import re

import pytest

from tests.launch.processes import ROOT


@pytest.mark.parametrize("name", ["TORCH", "PAIR"])
def test_versions_are_those_that_the_tests_run_with(name: str) -> None:
    (of_make,) = re.findall(rf"^{name} \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(rf"^ARG {name}=(\S*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE) == [of_make]
    assert of_make in (ROOT / "constraints.txt").read_text().splitlines()
