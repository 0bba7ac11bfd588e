"""Variables of torch and its libraries, and their threads.

Thread pools keep the settings that they find when torch is imported, so threads are set first.
"""

from __future__ import annotations

import os
import sys

from amusd.config import EngineConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Settings that torch's NCCL groups read when made, for links (`transport=nccl`) and ranks.

TORCH_NCCL_ASYNC_ERROR_HANDLING=2: a dead or late peer ends only the transfer; by default, and as torchrun sets it (1),
the process ends. TORCH_NCCL_DUMP_ON_TIMEOUT=0: no thread looks for a signal in the ranks' file, which is gone, or
writes traces to /tmp.
"""


def set_environment(config: EngineConfig) -> None:
    """Set variables of torch and its libraries for this process and its children, before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_threads(config.hardware.num_threads)
    if config.transport.kind == "nccl" or config.num_ranks > 2:
        os.environ.update(NCCL_SETTINGS)


def set_threads(num_threads: int) -> None:
    """Set the threads of numeric libraries in this process and its children."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)
    if "torch" in sys.modules:  # too late for the variables
        import torch

        torch.set_num_threads(num_threads)
