"""One rank, from its first instruction to its exit code.

Rank 0 is the target, the last rank the draft; ranks between them share the model of one of the two. All but rank 0
supervise the process that does the work, so that its death does not make torchrun end the target. Exit codes: 0 done, 2
the user's mistake (one line on stderr), 128 + signal interrupted, 1 all else (with a traceback). Started by `amusd`,
the first rank of a machine tells its code in a file, and all exit with 0: torchrun then has nothing to say.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence

from amusd.errors import ConfigError

from .draft import run_draft_process, supervise_draft
from .follower import run_follower_process, supervise_follower
from .job import Options
from .lifetime import Interrupted, end_with_parent, ignore_signals, raise_on_signals
from .outcome import tell_exit_code
from .store import Place, place_from_environment
from .target import run_target_process
from .terminal import tell


def run_rank(arguments: Sequence[str]) -> int:
    """Do what this rank is there for; return the exit code of the process."""
    raise_on_signals()
    end_with_parent()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    options = Options()
    try:
        options = Options.parse(arguments)
        place = place_from_environment()
        code = _role(options, place)(options, place)
    except ConfigError as error:
        if is_first:  # the ranks of a machine read the same arguments: one line
            tell(str(error))
        code = 2
    except Interrupted as interruption:
        code = 128 + interruption.signum
    except Exception:  # noqa: BLE001 - the end of the process: told in full, and the exit code says so
        traceback.print_exc()
        code = 1
    ignore_signals()
    if options.outcome_file is None or options.incarnation is not None:
        return code
    if is_first:
        tell_exit_code(options.outcome_file, code)
    return 0


def _role(options: Options, place: Place) -> Callable[[Options, Place], int]:
    if place.rank == 0:
        return run_target_process
    if place.is_draft:
        return supervise_draft if options.incarnation is None else run_draft_process
    return supervise_follower if options.incarnation is None else run_follower_process
