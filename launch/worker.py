"""One process that `amusd` or torchrun has started, from its first instruction to its exit code.

`amusd` starts the target, which starts its draft. Where a role has several ranks, and by hand, torchrun starts ranks.

Rank 0 is the target, the last rank the draft; ranks between them share the model of one of the two. All but rank 0
supervise the process that does the work, so that its death does not make torchrun end the target. Exit codes: 0 done, 2
the user's mistake (one line on stderr), 128 + signal interrupted, 1 all else (with a traceback). Started by `amusd`,
the first rank of a machine tells its code in a file, and all exit with 0: torchrun then has nothing to say.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence

from .draft import run_draft_rank
from .follower import run_follower_process, supervise_follower
from .job import Options
from .lifetime import end_with_parent, exit_code_of, raise_on_signals
from .outcome import tell_exit_code
from .store import Place, place_from_environment
from .target import run_pair, run_target_process


def run_rank(arguments: Sequence[str]) -> int:
    """Do what this rank is there for; return the exit code of the process."""
    raise_on_signals()
    end_with_parent()
    options = Options()

    def work() -> int:
        nonlocal options
        options = Options.parse(arguments)
        if options.group_file is not None:  # socket files are to go with the folder, however the processes end
            tempfile.tempdir = str(options.group_file.parent)
        if options.starts_draft:
            return run_pair(options)
        place = place_from_environment()
        return _role(options, place)(options, place)

    code = exit_code_of(work)
    if options.outcome_file is None or options.is_child:
        return code
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell_exit_code(options.outcome_file, code)
    return 0


def _role(options: Options, place: Place) -> Callable[[Options, Place], int]:
    if place.rank == 0:
        return run_target_process
    if place.is_draft:
        return run_draft_rank
    return run_follower_process if options.is_child else supervise_follower
