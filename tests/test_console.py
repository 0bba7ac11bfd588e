"""What is written where, and what happens when nobody reads it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amusd.console import Console

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("json_only", [False, True])
def test_a_reader_that_leaves_is_no_mistake(json_only: bool) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as out:
        console = Console(json_only=json_only, out=out, err=io.StringIO())
        os.close(read_end)
        for _ in range(3):
            console.text("an answer")
            console.document({"text": "an answer"})


def test_a_command_whose_output_is_cut_off_says_nothing_and_succeeds() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "launch.main", "generate", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
