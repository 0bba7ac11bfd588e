"""Settings of single commands beside those of a pair: their prompts, what is compared, measured or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from amusd.config.decoding import check_policy
from amusd.settings import Amount, Count, CountFromZero, Settings, Text

HIDDEN = "(hidden)"
"""The text that replaces a secret in a file that others may read."""
DEFAULT_PROMPTS = 4
"""The number of prompts that are taken by default."""
_Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(Settings):
    """The source of prompts."""

    section = "workload"

    path: str | None = None
    """JSON lines with `prompt`, `question`, `turns` or `conversation`; None: the prompts that ship with the package."""
    num_prompts: Count | None = None
    """The number of them, from the start of the file; None: 4, or all where there are fewer; with `out` all."""
    raw: bool = False
    """Do not apply the target's chat template."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """What `amusd compare` runs beside plain decoding."""

    section = "compare"

    drafters: tuple[str, ...] = ()
    """Drafters to compare, each `KIND`, `KIND:FOLDER_OR_HUB_NAME` or `custom:FACTORY`, of different kinds; empty: the
    configured one."""
    synchronous_lengths: _Counts = (2, 4, 7)
    """Values of num_speculative_tokens tried; the table shows the best, named."""
    trees: bool = False
    """Try trees of these lengths, too (`tree`), with drafters that can."""
    policies: tuple[str, ...] = ()
    """Asynchronous policies to compare; empty: the configured one."""
    batch_sizes: _Counts = (1,)
    """Answers at a time: each mode answers all prompts with so many at work, for each of these numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for policy in self.policies:
            check_policy("compare.policies", policy)
        self.require(len({*self.batch_sizes}) == len(self.batch_sizes), "batch_sizes", "name none twice")
        kinds = [name.partition(":")[0] for name in self.drafters]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), "")
        self.require(not twice, "drafters", f"names {twice} twice")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """The address of `amusd serve`, and its limits."""

    section = "serve"

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0: on all IPv4 addresses of the machine, which is then to be protected otherwise."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free port; the line that says the address has it."""
    api_key: Text | None = None
    """What a client has to send as `Authorization: Bearer ...`; None: nothing. The environment variable AMUSD_API_KEY
    says it without showing it in the list of processes."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides this machine's own under which clients may address a server on loopback that has no key: a proxy's.
    Any other is refused with 403, so that a web page elsewhere cannot reach the server by a name of its own that it has
    made to mean this machine."""
    model_name: Text | None = None
    """Name of the model for clients; None: the target's name."""
    max_queue: CountFromZero = 64
    """Answers that may wait besides the `max_num_seqs` that are computed; a request beyond is refused with 429."""
    shutdown_seconds: Amount = 30.0
    """How long running answers may take to end after SIGTERM or Ctrl-C. A second signal ends them at once."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Settings):
    """Engines of `launch/ray_serve.py`, each a replica of Ray Serve's. All keys of `amusd serve` hold there, too."""

    section = "ray"

    min_replicas: Count = 1
    """`launch/ray_serve.py`: engines that run at least."""
    max_replicas: Count | None = None
    """`launch/ray_serve.py`: engines that run at most; None: as many as `ray.min_replicas`."""
    num_gpus: Amount = 0.0
    """GPUs that Ray sets aside for each engine: 2 for a target and a draft, or a share of one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.min_replicas
        self.require(
            (self.max_replicas or least) >= least, "max_replicas", f"must be at least ray.min_replicas={least}"
        )


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Settings):
    """What `amusd simulate` assumes beyond `accept`, `verify_ms`, `draft_ms` and `delay_ms`, and what it tries."""

    section = "simulate"

    batch_size: Count = 1
    """Answers that are decoded together: a target pass takes the candidates of all, a draft step their next tokens.

    What the rows and caches of several cost is not in a calibration, which is of one at a time: `sequence_ms`
    and `knee_rows` say it (`amusd bench` times wider passes).
    """
    sequence_ms: Amount = 0.0
    """In a batch: added to a target pass for each sequence beyond the first, however many rows it has (its cache). A
    draft step grows by the same share of its time."""
    knee_rows: Count | None = None
    """Rows of a pass or step beyond which it costs in proportion to them, because computing takes longer than reading
    the weights, and below which they are free; None: never, and each node of a draft step beyond the first costs as
    calibrated, else 0.06 times the draft's time for one token."""
    num_tokens: Count = 256
    """Tokens of each answer: four, or one for each place of the batch. A calibrated replay has the run's own."""
    synchronous_lengths: _Counts = (1, 2, 3, 4, 5, 6, 7)
    """Values of num_speculative_tokens tried for synchronous decoding."""
    min_candidates: Annotated[tuple[CountFromZero, ...], Meta(min_length=1)] = (0, 1, 2, 3, 4, 5)
    """Values of min_candidates tried for the chain and for branching."""
