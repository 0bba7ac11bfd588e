"""The process that torchrun starts: `torchrun --standalone --nproc-per-node=2 launch/run.py prompt="..."`.

It is a rank of the target, or looks after the draft (`torchrun.py`). The arguments are those of `amusd`, the command
being `generate` unless it comes first. Exit codes are those of `amusd`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: become a module of the folder it lies in (PEP 366)
    _folder = Path(__file__).resolve().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __import__(__package__)

from amusd.huge_pages import restart_with_huge_pages

from .jobs import exit_code_of
from .signals import Interrupted, end_with_parent, raise_on_signals
from .torchrun import run


def main(arguments: Sequence[str]) -> int:
    """Do what this process is there for; return its exit code."""
    try:
        raise_on_signals()
        end_with_parent()
        return exit_code_of(lambda: run(arguments))
    except Interrupted as interruption:
        return 128 + interruption.signum


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))
