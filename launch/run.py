"""The process that `amusd` and torchrun start: the target of a pair, or a rank, from its start to its exit code.

`amusd` starts the target, which starts its draft. By hand (`torchrun --standalone --nproc-per-node=2 launch/run.py
prompt="..."`, or on two machines) torchrun starts two ranks: 0 is the target, 1 looks after the draft. The
arguments are those of `amusd` then (the command is `generate` unless it comes first); rank 0 reads them, once, for
all. `two_nodes.sh` does the same without torchrun. Where the target has several ranks, its process starts the others;
or torchrun starts more ranks on one machine, of which those in the middle look after further ranks of the target
(`nodes.py`).

Exit codes: 0 done, 2 the user's mistake (one line on stderr), 128 + signal interrupted, 1 all else (with a traceback).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: become a module of the folder it lies in (PEP 366)
    _folder = Path(__file__).resolve().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __import__(__package__)

from .draft import run_draft_rank
from .job import Options
from .ranks import run_further_ranks
from .scratch import tell_exit_code
from .signals import end_with_parent, exit_code_of, raise_on_signals
from .store import place_from_environment
from .target import run_pair, run_target_rank


def main(arguments: Sequence[str]) -> int:
    """Do what this process is there for; return its exit code."""
    raise_on_signals()
    options = Options()

    def work() -> int:
        nonlocal options
        options = Options.parse(arguments)
        if options.group_file is not None:
            end_with_parent()
            tempfile.tempdir = str(options.group_file.parent)  # socket files go with it, however the processes end
            return run_pair(options)
        place = place_from_environment()
        if not place.is_by_itself:
            end_with_parent()
        place.check_address(options.overrides)
        if place.rank == 0:
            return run_target_rank(options, place)
        return (run_draft_rank if place.rank == place.size - 1 else run_further_ranks)(options, place)

    code = exit_code_of(work)
    tell_exit_code(options.outcome_file, code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
