"""All that a user can set, and the parts that each command takes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

from amusd.config.capabilities import check_runs_ahead
from amusd.config.commands import HIDDEN, CompareConfig, RayConfig, ServeConfig, SimulateConfig, WorkloadConfig
from amusd.config.decoding import DecodingConfig, SamplingParams
from amusd.config.engine import MIN_VERIFY_WIDTH, Address, DrafterConfig, DrafterKind, EngineConfig, EngineKeys, Length
from amusd.errors import ConfigError
from amusd.settings import Amount, PositiveAmount, Share


@dataclass(frozen=True, kw_only=True)
class RunConfig(DecodingConfig, EngineKeys):
    """Everything that a command line can set. The keys of a schedule and of an engine are at the top level."""

    prompt: str | None = None
    """The user's message; None: the workload's prompts, for `generate` the first."""
    out: str | None = None
    """`generate`: answer all prompts of the workload, `max_num_seqs` at a time, into this file of JSON lines; an
    existing file is continued.
    """
    listen: Address | None = None
    """`draft`: `tcp://HOST:PORT` to listen on, for targets that name it as `drafter.address`."""
    output: Literal["text", "json"] = "text"
    run_dir: str | None = None
    """The folder of the run's files; None: `runs/<date>-<short hash>`."""
    accept: Share | None = None
    """`drafter=synthetic`: short for drafter.accept. `simulate`: share of draft tokens that are right."""
    verify_ms: PositiveAmount | None = None
    """`simulate`: time of one target pass; required without `calibration`."""
    draft_ms: PositiveAmount | None = None
    """`simulate`: the draft's time for one token; required without `calibration`."""
    delay_ms: Amount | None = None
    """`simulate`: time of a message, one way; None: as calibrated, else 0."""
    calibration: str | None = None
    """`simulate`: a run directory, for times and outcomes that are not given."""
    max_verify_width: Length | None = None
    """Most rows of a target pass; None: the least multiple of 8 for the longest block and the token before it."""
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drafter", self.drafter.for_target(self.target, self.hardware))
        is_text = self.prompt is None or not re.search("[\ud800-\udfff]", self.prompt)
        self.require(is_text, "prompt", "not UTF-8 text")
        has_one = self.out is None or self.prompt is None
        self.require(has_one, "prompt", f"not with out={self.out}, which takes many prompts")
        self.engine()

    def without_secrets(self) -> RunConfig:
        """A copy without secrets, for files that others may read."""
        serve = dataclasses.replace(self.serve, api_key=self.serve.api_key and HIDDEN)
        return dataclasses.replace(self, serve=serve)

    def decoding(self) -> DecodingConfig:
        """The settings of the schedule."""
        return DecodingConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(DecodingConfig)})

    def synchronous_lengths(self) -> tuple[int, ...]:
        """Block lengths that `compare` tries; with `mode=synchronous` only `num_speculative_tokens`."""
        if self.mode == "autoregressive":
            return ()
        if self.mode == "synchronous":
            return (self.num_speculative_tokens,)
        return self.compare.synchronous_lengths

    def asynchronous_policies(self) -> tuple[str, ...]:
        """Policies that `compare` tries; none unless `mode=asynchronous`."""
        if self.mode != "asynchronous":
            return ()
        return self.compare.policies or (self.policy,)

    def engine_for(self, command: str) -> EngineConfig:
        """The engine for `command`, with room for its longest block and for its answers at a time."""
        has_ranks = command != "bench" or self.target_tensor_parallel_size == 1
        self.require(has_ranks, "target_tensor_parallel_size", "`amusd bench` measures one process a role; allowed: 1")
        is_right = (command == "draft") == (self.listen is not None)
        self.require(is_right, "listen", "required with `amusd draft`, and only there")
        is_here = self.drafter.address is None or command != "bench"
        self.drafter.require(is_here, "address", "`amusd bench` measures a draft of this machine; leave it out")
        if command == "compare":
            windows = (self.num_speculative_tokens,) if "windowed" in self.asynchronous_policies() else ()
            longest_block = max((1, *self.synchronous_lengths(), *windows))
            engine = self.engine(longest_block=longest_block, max_num_seqs=max(self.compare.batch_sizes))
            engine = dataclasses.replace(engine, prefix_caching=False)  # contestants get the same prompts
            return dataclasses.replace(engine, drafters=()) if self.mode == "autoregressive" else engine
        check_runs_ahead(self.drafter.kind, self.decoding())
        if command == "serve":  # a request may ask for synchronous decoding
            return self.engine(longest_block=self.num_speculative_tokens)
        engine = self.engine(max_num_seqs=1 if command == "generate" and self.out is None else None)
        has_none = command == "generate" and self.mode == "autoregressive"
        return dataclasses.replace(engine, drafters=()) if has_none else engine

    def engine(self, *, longest_block: int | None = None, max_num_seqs: int | None = None) -> EngineConfig:
        """The configuration of an engine.

        `longest_block`: most candidates of a synchronous or windowed pass. `max_num_seqs`: replaces the key.
        """
        if longest_block is None:
            in_blocks = self.mode == "synchronous" or self.asynchronous_policies() == ("windowed",)
            longest_block = self.num_speculative_tokens if in_blocks else 1
        least = longest_block + 1
        width = self.max_verify_width or MIN_VERIFY_WIDTH * -(-least // MIN_VERIFY_WIDTH)
        allowed = f"must be at least {least}: {longest_block} candidates and the token before them"
        self.require(least <= width, "max_verify_width", allowed)
        names = self.compare.drafters or (self.drafter.kind,)
        is_used = "synthetic" in names or self.verify_ms is not None or self.calibration is not None
        allowed = "only allowed with drafter=synthetic, or to simulate, with verify_ms or calibration"
        self.require(self.accept is None or is_used, "accept", allowed)
        keys = {f.name: getattr(self, f.name) for f in dataclasses.fields(EngineKeys)}
        keys["max_num_seqs"] = max_num_seqs or self.max_num_seqs
        if self.listen is not None:
            devices = self.hardware.devices[-1:] * (self.target_tensor_parallel_size + 1)
            keys["hardware"] = dataclasses.replace(self.hardware, devices=devices)
            keys["transport"] = dataclasses.replace(self.transport, address=self.listen)
        return EngineConfig(**keys, drafters=tuple(map(self._drafter, names)), max_verify_width=width)

    def _drafter(self, name: str) -> DrafterConfig:
        kind, _, source = name.partition(":")
        kind = DrafterConfig().for_target(self.target, self.hardware).kind if kind == "auto" else kind
        if kind not in get_args(DrafterKind):
            allowed = ", ".join(get_args(DrafterKind))
            raise ConfigError(f"compare.drafters={name}: allowed: {allowed}, or KIND:MODEL")
        given: dict[str, Any] = {"factory" if kind == "custom" else "model": source} if source else {}
        make = partial(dataclasses.replace, self.drafter) if kind == self.drafter.kind else DrafterConfig
        if kind == "synthetic" and self.accept is not None:
            given["accept"] = self.accept
        given["address"] = self.drafter.address
        return make(kind=cast("DrafterKind", kind), **given)
