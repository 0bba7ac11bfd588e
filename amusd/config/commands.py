"""Settings of single commands beside those of a pair: their prompts, what is compared, measured or simulated."""

from __future__ import annotations

from dataclasses import dataclass

from amusd.config.decoding import PolicyName, check_policy
from amusd.settings import check_range, require

HIDDEN = "(hidden)"
"""The text that replaces a secret in a file that others may read."""
DEFAULT_PROMPTS = 4
"""The number of prompts that are taken by default."""
CONTEXT_LENGTH = 200
"""Tokens in the cache before each pass that `amusd bench` times."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """The source of prompts."""

    path: str | None = None
    """JSON lines with `prompt`, `question`, `turns` or `conversation`; None: the prompts that ship with the package."""
    num_prompts: int | None = None
    """The number of them, from the start of the file; None: 4, or all where there are fewer; with `out` all."""
    raw: bool = False
    """Do not apply the target's chat template."""

    def __post_init__(self) -> None:
        check_range(self, "workload.", "num_prompts", least=1)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What `amusd compare` runs beside plain decoding."""

    drafters: tuple[str, ...] = ()
    """Drafters to compare, each `KIND`, `KIND:FOLDER_OR_HUB_NAME` or `custom:FACTORY`, of different kinds; empty: the
    configured one."""
    synchronous_lengths: tuple[int, ...] = (2, 4, 7)
    """Values of num_speculative_tokens tried; the table shows the best, named."""
    trees: bool = False
    """Try trees of these lengths, too (`tree`), with drafters that can."""
    policies: tuple[PolicyName, ...] = ()
    """Asynchronous policies to compare; empty: the configured one."""
    batch_sizes: tuple[int, ...] = (1,)
    """Answers at a time: each mode answers all prompts with so many at work, for each of these numbers."""

    def __post_init__(self) -> None:
        for policy in self.policies:
            check_policy("compare.policies", policy)
        require(
            bool(self.batch_sizes) and min(self.batch_sizes) >= 1 and len({*self.batch_sizes}) == len(self.batch_sizes),
            "compare.batch_sizes",
            list(self.batch_sizes),
            "name at least one, each at least 1, and none twice",
        )
        kinds = [name.partition(":")[0] for name in self.drafters]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), "")
        require(not twice, "compare.drafters", list(self.drafters), f"names {twice} twice")
        require(
            bool(self.synchronous_lengths) and min(self.synchronous_lengths) >= 1,
            "compare.synchronous_lengths",
            list(self.synchronous_lengths),
            "name at least one length, each at least 1",
        )


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What `amusd bench` measures, and how often."""

    widths: tuple[int, ...] = (1, 4, 8, 16)
    """Rows of the target passes that are timed."""
    num_rounds: int = 15
    """How often each pass and each chain of draft steps is timed, and three times as often as plain decoding."""
    num_messages: int = 2000
    """Messages over each link."""
    peer: bool = True
    """Time `transformers.generate` on the same weights beside plain decoding."""

    def __post_init__(self) -> None:
        require(
            bool(self.widths) and 1 <= min(self.widths) <= max(self.widths) <= CONTEXT_LENGTH,
            "bench.widths",
            list(self.widths),
            f"name at least one, from 1 to {CONTEXT_LENGTH}",
        )
        check_range(self, "bench.", "num_rounds", "num_messages", least=1)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The address of `amusd serve`, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: on all IPv4 addresses of the machine, which is then to be protected otherwise."""
    port: int = 8000
    """0: any free port; the line that says the address has it."""
    api_key: str | None = None
    """What a client has to send as `Authorization: Bearer ...`; None: nothing. The environment variable AMUSD_API_KEY
    says it without showing it in the list of processes."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides this machine's own under which clients may address a server on loopback that has no key: a proxy's.
    Any other is refused with 403, so that a web page elsewhere cannot reach the server by a name of its own that it has
    made to mean this machine."""
    model_name: str | None = None
    """Name of the model for clients; None: the target's name."""
    max_queue: int = 64
    """Answers that may wait besides the `max_num_seqs` that are computed; a request beyond is refused with 429."""
    shutdown_seconds: float = 30.0
    """How long running answers may take to end after SIGTERM or Ctrl-C. A second signal ends them at once."""

    def __post_init__(self) -> None:
        check_range(self, "serve.", "port", least=0, most=65535)
        require(bool(self.host), "serve.host", self.host, "must not be empty")
        require(self.api_key != "", "serve.api_key", self.api_key, "must not be empty; null asks for none")
        require(self.model_name != "", "serve.model_name", self.model_name, "must not be empty")
        check_range(self, "serve.", "max_queue", "shutdown_seconds", least=0)


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Engines of `launch/ray_serve.py`, each a replica of Ray Serve's. All keys of `amusd serve` hold there, too."""

    min_replicas: int = 1
    """`launch/ray_serve.py`: engines that run at least."""
    max_replicas: int | None = None
    """`launch/ray_serve.py`: engines that run at most; None: as many as `ray.min_replicas`."""
    num_gpus: float = 0.0
    """GPUs that Ray sets aside for each engine: 2 for a target and a draft, or a share of one."""

    def __post_init__(self) -> None:
        check_range(self, "ray.", "min_replicas", least=1)
        most = self.max_replicas
        least = self.min_replicas
        require(most is None or most >= least, "ray.max_replicas", most, f"must be at least ray.min_replicas={least}")
        check_range(self, "ray.", "num_gpus", least=0)


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """What `amusd simulate` assumes beyond `accept`, `verify_ms`, `draft_ms` and `delay_ms`, and what it tries."""

    row_ms: float = 0.0
    """Added to a target pass for each row beyond the first: each candidate, and in a batch each further sequence's last
    token; 0, as with `verify_width=fixed`."""
    draft_row_ms: float | None = None
    """Added to a draft step for each row beyond the first: each further node of a tree, and in a batch each further
    sequence; None: as calibrated, else 0.06 times the draft's time for one token."""
    batch_size: int = 1
    """Answers that are decoded together: a target pass takes the candidates of all, a draft step their next tokens.

    What the rows and caches of several cost is not in a calibration, which is of one at a time: `row_ms`,
    `draft_row_ms`, `sequence_ms`, `draft_sequence_ms` and `knee_rows` say it (`amusd bench` times wider passes).
    """
    sequence_ms: float = 0.0
    """In a batch: added to a target pass for each sequence beyond the first, however many rows it has (its cache)."""
    draft_sequence_ms: float = 0.0
    """In a batch: added to a draft step for each sequence beyond the first."""
    knee_rows: int | None = None
    """Rows of a pass or step beyond which it costs in proportion to them, because computing takes longer than reading
    the weights; None: never."""
    jitter: float = 0.0
    """Standard deviation of passes and draft steps, relative to their time, on top of what was calibrated.

    Without any, draft and target stay in step, so that how much of a step a rollback loses is the same every time.
    """
    devices_apart: bool = False
    """Take the times that were calibrated while the other worker rested, as on devices that share no core or memory."""
    num_answers: int = 16
    """Answers that are simulated at most, at least one for each place of the batch: as many, from 4 on, as tell the
    speed of `auto` with a standard error of 1.5 %. A calibrated replay has the run's own."""
    num_tokens: int = 256
    """Tokens of each of them."""
    seed: int = 0
    """Seeds the acceptance and all drawn times; the same seed gives the same figures."""
    synchronous_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    """Values of num_speculative_tokens tried for synchronous decoding."""
    min_candidates: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Values of min_candidates tried for the chain and for branching."""
    rank_speedup: float | None = None
    """Also say what the draft's device is worth as a rank of the target, or as a replica: how many times as fast a
    target pass is on twice as many devices."""
    num_target_devices: int = 1
    """Devices of the target, on which its pass takes the given time; the draft has one more like them."""
    grid: bool = False
    """Also map which policy wins at which acceptance and number of draft steps per pass: in the result, and as a
    picture, `map.svg`."""

    def __post_init__(self) -> None:
        times = ("row_ms", "sequence_ms", "draft_sequence_ms", "draft_row_ms")
        counts = ("num_answers", "num_tokens", "batch_size", "knee_rows", "num_target_devices")
        check_range(self, "simulate.", *times, least=0)
        check_range(self, "simulate.", "jitter", least=0, most=0.5)
        check_range(self, "simulate.", *counts, least=1)
        check_range(self, "simulate.", "rank_speedup", least=0.5, most=2)
        require(
            self.batch_size == 1 or not self.grid,
            "simulate.batch_size",
            self.batch_size,
            "must be 1 with simulate.grid=true",
        )
        for name, least in (("synchronous_lengths", 1), ("min_candidates", 0)):
            values = getattr(self, name)
            require(
                bool(values) and min(values) >= least,
                f"simulate.{name}",
                list(values),
                f"name at least one, each at least {least}",
            )
