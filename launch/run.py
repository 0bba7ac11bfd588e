"""What `amusd` and torchrun start: the target of a pair, or a rank, from its first instruction to its exit code.

`amusd` starts the target, which starts its draft. Where a role has several ranks, and by hand (`torchrun --standalone
--nproc-per-node=2 launch/run.py prompt="..."`), torchrun starts ranks: rank 0 is the target, the last rank the draft;
between them are the target's other ranks and then the draft's, where target_tensor_parallel_size and
draft_tensor_parallel_size say so. By hand the arguments are those of `amusd` (the command is `generate` unless it comes
first); rank 0 reads them, once, for all.

All but rank 0 supervise the process that does the work, so that its death does not make torchrun end the target. Exit
codes: 0 done, 2 the user's mistake (one line on stderr), 128 + signal interrupted, 1 all else (with a traceback).
Started by `amusd`, the first process of a machine tells its code in a file, and all exit with 0: torchrun then has
nothing to say.
"""

from __future__ import annotations

import os
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
from .follower import run_follower_process, supervise_follower
from .job import Options
from .scratch import tell_exit_code
from .signals import end_with_parent, exit_code_of, raise_on_signals
from .store import place_from_environment
from .target import run_pair, run_target_rank


def main(arguments: Sequence[str]) -> int:
    """Do what this process is there for; return its exit code."""
    raise_on_signals()
    end_with_parent()
    options = Options()

    def work() -> int:
        nonlocal options
        options = Options.parse(arguments)
        if options.group_file is not None:  # socket files are to go with the folder, however the processes end
            tempfile.tempdir = str(options.group_file.parent)
        return run_pair(options) if options.starts_draft else _run_rank(options)

    code = exit_code_of(work)
    if options.outcome_file is None or options.is_child:
        return code
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell_exit_code(options.outcome_file, code)
    return 0


def _run_rank(options: Options) -> int:
    place = place_from_environment()
    if place.rank == 0:
        return run_target_rank(options, place)
    if place.is_draft:
        return run_draft_rank(options, place)
    return (run_follower_process if options.is_child else supervise_follower)(options, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
