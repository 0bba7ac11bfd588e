"""The entry torchrun starts in every rank: `torchrun --standalone --nproc-per-node=2 launch/run.py prompt="..."`.

Rank 0 is the target, the last rank the draft; between them are the target's other ranks and then the draft's, where
target_tensor_parallel_size and draft_tensor_parallel_size say so. Started by hand, the arguments are those of `amusd`
(the command is `generate` unless it comes first); rank 0 reads them, once, for all. `amusd` itself starts it with a
finished run directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: become a module of the folder it lies in (PEP 366)
    _folder = Path(__file__).resolve().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __import__(__package__)


def main() -> int:
    """Run this rank; return its exit code."""
    from .worker import run_rank

    return run_rank(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
