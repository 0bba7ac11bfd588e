"""Settings of single commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from amusd.config.decoding import check_policy
from amusd.settings import Amount, Count, CountFromZero, Settings, Text

HIDDEN = "(hidden)"
"""Stands for a secret in files that others may read."""
DEFAULT_PROMPTS = 4
_Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(Settings):
    """The source of prompts."""

    section = "workload"

    path: str | None = None
    """JSON lines with `prompt`, `question`, `turns`, `conversation` or `messages`; None: the package's own prompts."""
    num_prompts: Count | None = None
    """Number of prompts, from the start; None: at most 4, or all with `out`."""
    raw: bool = False
    """Do not apply the target's chat template."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """The drafters and schedules that `amusd compare` runs beside plain decoding."""

    section = "compare"

    drafters: tuple[str, ...] = ()
    """Drafters to compare, of different kinds: `KIND`, `KIND:FOLDER_OR_HUB_NAME` or `custom:FACTORY`; empty: the
    configured drafter.
    """
    synchronous_lengths: _Counts = (2, 4, 7)
    """Values of num_speculative_tokens to try; the table shows the best."""
    trees: bool = False
    """Also try trees (`tree`) of `synchronous_lengths` steps, if the drafter can."""
    policies: tuple[str, ...] = ()
    """Asynchronous policies to compare; empty: the configured policy."""
    batch_sizes: _Counts = (1,)
    """Numbers of answers at a time; each mode answers all prompts at each number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for policy in self.policies:
            check_policy("compare.policies", policy)
        kinds = [name.partition(":")[0] for name in self.drafters]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), "")
        self.require(not twice, "drafters", f"names {twice} twice")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """The address of `amusd serve`, and its limits."""

    section = "serve"

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine. Only loopback needs no `api_key`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free port; the line with the address names it."""
    api_key: Text | None = None
    """Key that clients send as `Authorization: Bearer ...`; None: no key.

    The environment variable AMUSD_API_KEY keeps the key out of the list of processes.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Further host names, such as a proxy's, for a server on loopback without a key.

    Requests for other names get 403, which prevents DNS rebinding.
    """
    model_name: Text | None = None
    """Name of the model for clients; None: the target's name."""
    max_queue: CountFromZero = 64
    """Answers that may wait besides the `max_num_seqs` at work; a further request is refused with 429."""
    shutdown_seconds: Amount = 30.0
    """How long running answers may take to end after SIGTERM or Ctrl-C. A second signal ends the server at once."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Settings):
    """Engines of `launch/ray_serve.py`, each a replica of Ray Serve. All keys of `amusd serve` apply, too."""

    section = "ray"

    min_replicas: Count = 1
    max_replicas: Count | None = None
    """Greatest number of engines; None: `ray.min_replicas`."""
    num_gpus: Amount = 0.0
    """GPUs that Ray sets aside for each engine: 2 for a target and a draft, or a share of a GPU."""


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Settings):
    """Further assumptions of `amusd simulate` (`verify_ms` and others are at the top level), and values to try."""

    section = "simulate"

    batch_size: Count = 1
    """Answers that are decoded together.

    A calibration has one answer at a time; `sequence_ms` and `knee_rows` give the cost of more answers (`amusd bench`
    times wider passes).
    """
    sequence_ms: Amount = 0.0
    """Added to a target pass for the cache of each sequence beyond the first; a draft step grows by the same share."""
    knee_rows: Count | None = None
    """Rows beyond which a pass or step takes time in proportion. None: no such limit; each further node of a draft step
    costs as calibrated, else 0.06 of the draft's time for one token.
    """
    num_tokens: Count = 256
    """Tokens of each answer; there are four answers, or `batch_size` if more. A replay has the run's answers."""
    synchronous_lengths: _Counts = (1, 2, 3, 4, 5, 6, 7)
    """Values of num_speculative_tokens to try for synchronous decoding."""
    min_candidates: Annotated[tuple[CountFromZero, ...], Meta(min_length=1)] = (0, 1, 2, 3, 4, 5)
    """Values of min_candidates to try for chain and branching."""
