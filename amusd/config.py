"""Every setting and its default, as frozen keyword-only dataclasses. Standard library only; knows no Hydra.

`RunConfig` is the whole of what a user can set; `settings.from_mapping` builds it from nested dictionaries. A value out
of its range is one `ConfigError` line: the key, the value, what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from amusd.errors import ConfigError
from amusd.types import Mode

DrafterKind: TypeAlias = Literal["embedded", "hf", "ngram", "synthetic"]
AsynchronousPolicy: TypeAlias = Literal["auto", "chain", "windowed", "branching"]
AcceptanceRule: TypeAlias = Literal["auto", "greedy", "matching", "rejection"]
DraftDtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32", "int8"]
ModelShape: TypeAlias = Literal[
    "smollm2-135m",
    "smollm2-135m-slice",
    "llama-1b",
    "llama-3b",
    "llama-8b",
    "llama-70b",
    "llama-70b-slice",
    "qwen3-0.6b",
    "qwen3-8b",
]
"""Shapes of public models that can be had with random weights; `models/synthetic.py` knows their sizes."""

MAX_BIASES = 1 << 16
"""Entries of `sampling.logit_bias` at most."""

MIN_VERIFY_WIDTH = 8
"""Rows of a padded target pass unless longer blocks are asked for: verifying 8 rows costs a CPU what 1 row does."""


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value}: {allowed}")


def _check_model(key: str, kind: str, model: str | None) -> None:
    if kind == "hf" and not model:
        raise ConfigError(f"{key}.model: required with {key}=hf (a folder or hub name of a transformers checkpoint)")
    if kind != "hf" and model:
        raise ConfigError(f"{key}.model={model}: only allowed with {key}=hf, not with {key}={kind}")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What each token of an answer is drawn from, and with which noise. Both workers apply it."""

    temperature: float = 0.0
    """0: greedy decoding. Above: the target's distribution is sampled, sharper below 1 and flatter above."""
    top_k: int = 0
    """Sample from this many most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Sample from the tokens that are at least this share as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by this if positive, else multiplied; 1: none."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer holds already."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs [token id, bias]: added to the token's logit before anything else."""
    acceptance: AcceptanceRule = "auto"
    """How candidates are accepted. `auto`: `greedy` at temperature 0, above it `matching` (shared noise)."""
    seed: int = 0
    """Of all noise: with `matching`, an answer is a function of prompt, parameters and seed; the draft has no say."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            _require(math.isfinite(getattr(self, name)), f"sampling.{name}", getattr(self, name), "must be finite")
        _require(self.temperature >= 0, "sampling.temperature", self.temperature, "must be at least 0")
        _require(self.top_k >= 0, "sampling.top_k", self.top_k, "must be at least 0")
        _require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "sampling.min_p", self.min_p, "must be between 0 and 1")
        _require(self.repetition_penalty > 0, "sampling.repetition_penalty", self.repetition_penalty, "must be above 0")
        _require(
            len(self.logit_bias) <= MAX_BIASES,
            "sampling.logit_bias",
            f"({len(self.logit_bias)} entries)",
            f"at most {MAX_BIASES} are allowed",
        )
        for token_id, bias in self.logit_bias:
            _require(
                token_id >= 0 and math.isfinite(bias),
                "sampling.logit_bias",
                [token_id, bias],
                "must be a token id, at least 0, and a finite number",
            )
        _require(0 <= self.seed < 1 << 63, "sampling.seed", self.seed, "must be between 0 and 2^63 - 1")
        fitting = ("auto", "greedy") if self.temperature == 0 else ("auto", "matching", "rejection")
        _require(
            self.acceptance in fitting,
            "sampling.acceptance",
            self.acceptance,
            f"at sampling.temperature={self.temperature:g} allowed: {', '.join(fitting)}",
        )

    @property
    def rule(self) -> AcceptanceRule:
        """The rule that holds: never `auto`."""
        if self.acceptance != "auto":
            return self.acceptance
        return "greedy" if self.temperature == 0 else "matching"

    @property
    def is_argmax(self) -> bool:
        """Whether each token is simply that of the largest logit."""
        return self.temperature == 0 and self._leaves_logits

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the temperature stands between the model's distribution and the one that is sampled."""
        has_filters = (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
        return self._leaves_logits and (self.temperature == 0 or not has_filters)

    @property
    def _leaves_logits(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.logit_bias) == (1.0, 0.0, ())


GREEDY = Distribution()
"""Each token is that of the largest logit."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Distribution):
    """How one answer is sampled and when it ends."""

    max_new_tokens: int = 128
    """Tokens of the answer at most."""
    stop: tuple[str, ...] = ()
    """The answer ends where one of these strings is completed; the text is cut before it."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (for measurements)."""
    logprobs: bool = False
    """Report the log-probability of each token of the answer: the target's own, before anything above is applied."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.max_new_tokens >= 1, "sampling.max_new_tokens", self.max_new_tokens, "must be at least 1")
        _require(all(self.stop), "sampling.stop", list(self.stop), "a stop string must not be empty")

    @property
    def distribution(self) -> Distribution:
        """The part that the draft is told."""
        return Distribution(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Distribution)})


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The schedule of one request; any two requests of an engine may differ in it."""

    mode: Mode = Mode.ASYNCHRONOUS
    policy: AsynchronousPolicy = "auto"
    """Asynchronous mode only. `chain`: the draft follows its best guess; `windowed`: it fills one window while another
    is verified; `branching`: it prepares for several verdicts (not with `sampling.acceptance=rejection`); `auto`: that
    where it can, and waits as long as it finds worth it."""
    num_speculative_tokens: int = 4
    """Synchronous mode: candidates per verification; `windowed`: tokens of a window."""
    max_lookahead: int = 16
    """Chain, branching, auto: how many tokens the draft may be ahead of the committed prefix it knows."""
    min_candidates: int = 2
    """Chain, branching: candidates the target waits for where the draft starts anew, as after a rejection."""
    max_wait_passes: float = 1.0
    """Chain, branching, auto: that wait never lasts longer than this many target passes."""
    tokens_per_message: int = 1
    """Chain: candidates are sent once this many are ready."""
    fan_out: int = 8
    """Branching: candidates that the draft prepares behind each token at most."""
    rows_per_step: int = 8
    """Branching: tokens of its tree that the draft computes in one step at most."""
    verify_breadth: int = 3
    """Branching, auto: candidates of one position that a target pass verifies at most, in rows that cost next to
    nothing (on a CPU with `verify_width=fixed`, on a GPU with `bucketed`); elsewhere one path, as with 1."""
    draft_timeout_seconds: float = 10.0
    """Synchronous mode, windowed: how long the target waits for a block before it goes on alone."""
    max_silence_seconds: float = 0.3
    """How long the target waits, all in all, without hearing from the draft; then it waits no more until it does."""

    def __post_init__(self) -> None:
        counts = ("num_speculative_tokens", "max_lookahead", "tokens_per_message", "fan_out", "rows_per_step")
        for name in (*counts, "verify_breadth"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        _require(self.min_candidates >= 0, "min_candidates", self.min_candidates, "must be at least 0")
        _require(
            self.min_candidates <= self.max_lookahead,
            "min_candidates",
            self.min_candidates,
            f"must be at most max_lookahead ({self.max_lookahead}), or the target waits for what cannot come",
        )
        _require(
            self.tokens_per_message <= self.max_lookahead,
            "tokens_per_message",
            self.tokens_per_message,
            f"must be at most max_lookahead ({self.max_lookahead})",
        )
        _require(self.max_wait_passes >= 0, "max_wait_passes", self.max_wait_passes, "must be at least 0")
        for name in ("draft_timeout_seconds", "max_silence_seconds"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which model verifies."""

    kind: Literal["embedded", "hf"] = "embedded"
    model: str | None = None
    """`hf`: a folder or hub name of a transformers checkpoint."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    model_impl: Literal["auto", "amusd", "transformers"] = "auto"
    """Whose forward pass: our lean decoder, transformers' own, or (`auto`) ours where it covers the model."""

    def __post_init__(self) -> None:
        _check_model("target", self.kind, self.model)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What proposes candidates."""

    kind: DrafterKind = "embedded"
    model: str | None = None
    """`hf`: a folder or hub name of a transformers checkpoint with the target's tokenizer."""
    dtype: DraftDtype = "auto"
    """Of the model's weights. `int8`: with a scale a row, on CPUs; `auto`: that for the embedded draft, which ships so,
    where the CPU has fast products for it, else bfloat16."""
    model_impl: Literal["auto", "amusd", "transformers"] = "auto"
    """As of the target."""
    tokens_per_replay: int = 4
    """On GPUs with graphs: draft steps in one replay."""
    vocab_size: int = 8192
    """`embedded`: how many token ids its model can propose (the most frequent ones)."""
    min_lookup: int = 4
    """`embedded`: shortest repeated suffix whose continuation is proposed in the model's place; 0: never, and what
    followed shorter ones is not mixed into the guesses of a tree either."""
    max_lookup: int = 12
    """`embedded`: longest suffix that is looked up for that."""
    shape: ModelShape | None = None
    """`synthetic`: of which model's size a step costs; None: a smaller one than a synthetic target, else `embedded`."""
    accept: float = 0.8
    """`synthetic`: probability of each candidate to be the target's own token; exact with `verify_width=fixed`."""
    accept_next: float = 0.4
    """`synthetic`, branching: probability that a further guess is right where those before it are wrong."""
    max_ngram: int = 4
    """`ngram`: longest suffix that is looked up."""
    min_ngram: int = 2
    """`ngram`: shortest suffix that is looked up."""

    def __post_init__(self) -> None:
        _check_model("drafter", self.kind, self.model)
        _require(self.tokens_per_replay >= 1, "drafter.tokens_per_replay", self.tokens_per_replay, "must be at least 1")
        _require(self.vocab_size >= 2, "drafter.vocab_size", self.vocab_size, "must be at least 2")
        _require(
            0 <= self.min_lookup <= self.max_lookup,
            "drafter.min_lookup",
            self.min_lookup,
            f"must be between 0 and drafter.max_lookup ({self.max_lookup})",
        )
        _require(
            self.kind == "synthetic" or self.shape is None,
            "drafter.shape",
            self.shape,
            f"only allowed with drafter=synthetic, not with drafter={self.kind}",
        )
        for name in ("accept", "accept_next"):
            _require(0 <= getattr(self, name) <= 1, f"drafter.{name}", getattr(self, name), "must be between 0 and 1")
        _require(
            1 <= self.min_ngram <= self.max_ngram,
            "drafter.min_ngram",
            self.min_ngram,
            f"must be between 1 and drafter.max_ngram ({self.max_ngram})",
        )

    @property
    def can_branch(self) -> bool:
        """It can draft trees: it has probabilities to rank its guesses by."""
        return self.kind != "ngram"


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """The link between the workers."""

    kind: Literal["auto", "shared_memory", "zeromq", "gloo", "nccl"] = "auto"
    """`auto`: `zeromq` where an address is given, else `shared_memory` where it works, else `zeromq` locally."""
    address: str | None = None
    """`ipc://PATH` or `tcp://HOST:PORT`; None picks a private one. The target binds it, the draft connects."""
    insecure: bool = False
    """Allow an address that is not on this machine, unencrypted and unauthenticated."""
    keys: str | None = None
    """A folder of `amusd keys FOLDER`: encrypt the link at `address`, and let in only those whose key lies there."""
    delay_ms: float = 0.0
    """Hand over every message this long after it was sent: what distance costs. Both workers on one machine."""

    def __post_init__(self) -> None:
        _require(0 <= self.delay_ms <= 10_000, "transport.delay_ms", self.delay_ms, "must be between 0 and 10000")
        _require(
            self.kind != "shared_memory" or self.address is None,
            "transport.address",
            self.address,
            "not with transport=shared_memory, which picks its own; leave it out, or use transport=zeromq",
        )
        _require(
            self.keys is None or (self.address is not None and not self.insecure),
            "transport.keys",
            self.keys,
            "protects the link at transport.address, which has to be given; not with transport.insecure=true",
        )
        _require(
            self.keys is None or self.kind in ("auto", "zeromq"),
            "transport.keys",
            self.keys,
            f"protects ZeroMQ's links, not those of transport={self.kind}",
        )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Which devices the workers use."""

    devices: tuple[str, ...] = ()
    """Device of each rank of the target, then of the draft: `cuda:0`, `cpu` ... One name repeated is for all. Empty: a
    GPU each if there are enough, else the CPU."""
    pin_cores: bool = True
    """On CPUs: give each worker its own core, where there are at least two."""
    num_threads: int = 1
    """On CPUs: threads of each worker."""
    cuda_graphs: bool = True
    """On GPUs: replay captured passes instead of launching each operator anew."""
    synthetic: ModelShape | None = None
    """Measure without a checkpoint: the target is a model of this size with random weights."""

    def __post_init__(self) -> None:
        _require(self.num_threads >= 1, "hardware.num_threads", self.num_threads, "must be at least 1")
        _require(len(self.devices) != 1, "hardware.devices", list(self.devices), "name two: the target's, the draft's")


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Where prompts come from."""

    path: str | None = None
    """JSON lines with `prompt`, `turns` or `conversation`; None takes the prompts that ship with the package."""
    num_prompts: int = 4
    """How many of them, from the start of the file."""
    raw: bool = False
    """Do not apply the target's chat template."""

    def __post_init__(self) -> None:
        _require(self.num_prompts >= 1, "workload.num_prompts", self.num_prompts, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What `amusd compare` runs beside plain decoding."""

    drafters: tuple[DrafterKind, ...] = ()
    """Drafters to compare, by kind; empty: the configured one."""
    synchronous_lengths: tuple[int, ...] = (2, 4, 7)
    """Values of num_speculative_tokens tried; the table shows the best, named."""
    policies: tuple[AsynchronousPolicy, ...] = ()
    """Asynchronous policies to compare; empty: the configured one."""

    def __post_init__(self) -> None:
        _require(
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
    context_length: int = 200
    """Tokens in the cache before each pass."""
    num_rounds: int = 15
    """How often each pass and each chain of draft steps is timed, in turns."""
    num_decoding_rounds: int = 5
    """How often plain decoding and its peer are timed, in turns."""
    num_tokens: int = 24
    """Tokens of each of these decodings."""
    num_messages: int = 2000
    """Messages over each link."""
    num_pair_prompts: int = 4
    """Prompts that the pair answers in each mode."""
    num_pair_tokens: int = 48
    """Tokens of each of these answers."""
    peer: bool = True
    """Time `transformers.generate` on the same weights beside plain decoding."""

    def __post_init__(self) -> None:
        _require(
            bool(self.widths) and min(self.widths) >= 1, "bench.widths", list(self.widths), "name at least one, from 1"
        )
        _require(
            self.context_length >= max(self.widths),
            "bench.context_length",
            self.context_length,
            "at least the widest pass",
        )
        for name in (
            "num_rounds",
            "num_decoding_rounds",
            "num_tokens",
            "num_messages",
            "num_pair_prompts",
            "num_pair_tokens",
        ):
            _require(getattr(self, name) >= 1, f"bench.{name}", getattr(self, name), "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """What `amusd simulate` assumes beyond `accept`, `verify_ms`, `draft_ms` and `delay_ms`, and what it tries."""

    overhead_ms: float | None = None
    """Time of the target's host after each pass; None: as calibrated, else 0."""
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
    """The same of a draft step."""
    knee_rows: int | None = None
    """Rows of a pass or step beyond which it costs in proportion to them, because computing takes longer than reading
    the weights; None: never."""
    jitter: float = 0.0
    """Standard deviation of passes and draft steps, relative to their time, on top of what was calibrated.

    Without any, draft and target stay in step, so that how much of a step a rollback loses is the same every time.
    """
    tokens_per_step: int = 1
    """Tokens that the draft makes in one step where it runs ahead (several in one replay on GPUs)."""
    num_answers: int = 16
    """Answers that are simulated, at least one for each place of the batch; a calibrated replay has the run's own."""
    num_tokens: int = 512
    """Tokens of each of them."""
    seed: int = 0
    """Of the acceptance and of all drawn times; the same seed gives the same figures."""
    synchronous_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    """Values of num_speculative_tokens tried for synchronous decoding."""
    min_candidates: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Values of min_candidates tried for the chain and for branching."""
    grid: bool = False
    """Also map which policy wins over `grid_accepts` and `grid_ratios`: in the result, and as a picture, `map.svg`."""
    grid_accepts: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    """Acceptance rates of the map."""
    grid_ratios: tuple[float, ...] = (2, 4, 8, 16)
    """Draft steps per target pass of the map; the draft's time per token follows from it."""
    points: tuple[str, ...] = ()
    """Run directories of `compare` or `generate` that the map's picture shows where they were measured, besides
    `calibration`."""

    def __post_init__(self) -> None:
        overhead = self.overhead_ms
        _require(overhead is None or 0 <= overhead < math.inf, "simulate.overhead_ms", overhead, "must be at least 0")
        for name in ("row_ms", "sequence_ms", "draft_sequence_ms"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"simulate.{name}", value, "must be at least 0")
        row_ms = self.draft_row_ms
        _require(row_ms is None or 0 <= row_ms < math.inf, "simulate.draft_row_ms", row_ms, "must be at least 0")
        _require(0 <= self.jitter <= 0.5, "simulate.jitter", self.jitter, "must be between 0 and 0.5")
        for name in ("tokens_per_step", "num_answers", "num_tokens", "batch_size"):
            _require(getattr(self, name) >= 1, f"simulate.{name}", getattr(self, name), "must be at least 1")
        knee = self.knee_rows
        _require(knee is None or knee >= 1, "simulate.knee_rows", knee, "must be at least 1")
        _require(
            self.batch_size == 1 or not self.grid,
            "simulate.batch_size",
            self.batch_size,
            "must be 1 with simulate.grid=true, whose map is of one sequence at a time",
        )
        for name, least in (("synchronous_lengths", 1), ("min_candidates", 0)):
            values = getattr(self, name)
            _require(
                bool(values) and min(values) >= least,
                f"simulate.{name}",
                list(values),
                f"name at least one, each at least {least}",
            )
        _require(
            bool(self.grid_accepts) and all(0 <= accept <= 1 for accept in self.grid_accepts),
            "simulate.grid_accepts",
            list(self.grid_accepts),
            "name at least one, each between 0 and 1",
        )
        _require(
            bool(self.grid_ratios) and all(1 <= ratio < math.inf for ratio in self.grid_ratios),
            "simulate.grid_ratios",
            list(self.grid_ratios),
            "name at least one, each at least 1",
        )
        _require(self.grid or not self.points, "simulate.points", list(self.points), "needs simulate.grid=true")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built from: models, link, devices, numerics."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafters: tuple[DrafterConfig, ...] = (DrafterConfig(),)
    """What requests may name, by kind; the first is the default. None at all: plain decoding only."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    verify_width: Literal["bucketed", "fixed"] = "fixed"
    """`fixed`: every target pass is padded to `max_verify_width` rows, so that no timing can reach the numbers."""
    max_verify_width: int = MIN_VERIFY_WIDTH
    """Rows of a target pass at most: the last committed token and its candidates."""
    max_model_len: int = 2048
    """Longest sequence, prompt included; the model's own limit still holds."""
    startup_timeout_seconds: float = 300.0
    """How long the workers wait for each other to load."""
    target_tensor_parallel_size: int = 1
    """Processes that share the target's weights and cache, each on a device of its own."""
    draft_tensor_parallel_size: int = 1
    """The same of the draft, whose only drafter has a model."""

    def __post_init__(self) -> None:
        _require(self.max_verify_width >= 2, "max_verify_width", self.max_verify_width, "must be at least 2")
        _require(self.max_model_len >= 2, "max_model_len", self.max_model_len, "must be at least 2")
        _require(
            self.startup_timeout_seconds > 0,
            "startup_timeout_seconds",
            self.startup_timeout_seconds,
            "must be above 0",
        )
        _require(
            self.target_tensor_parallel_size >= 1,
            "target_tensor_parallel_size",
            self.target_tensor_parallel_size,
            "must be at least 1",
        )
        _require(
            self.draft_tensor_parallel_size >= 1,
            "draft_tensor_parallel_size",
            self.draft_tensor_parallel_size,
            "must be at least 1",
        )
        devices = self.hardware.devices
        _require(
            len(devices) in (0, self.num_ranks) or len(set(devices)) == 1,
            "hardware.devices",
            list(devices),
            "name two: the target's, the draft's"
            if self.num_ranks == 2
            else f"name {self.num_ranks}: the target's {self.target_tensor_parallel_size}, the draft's"
            f"{'' if self.draft_tensor_parallel_size == 1 else f' {self.draft_tensor_parallel_size}'}",
        )
        _require(
            self.hardware.synthetic is None or self.target.kind != "hf",
            "hardware.synthetic",
            self.hardware.synthetic,
            "not with target=hf, which has weights of its own",
        )
        for drafter in self.drafters:
            self._check_fits_target(drafter)
        if self.draft_tensor_parallel_size > 1:
            self._check_has_one_model()

    @property
    def num_ranks(self) -> int:
        """Processes that compute: the target's, then the draft's."""
        return self.target_tensor_parallel_size + self.draft_tensor_parallel_size

    def _check_has_one_model(self) -> None:
        kinds = [drafter.kind for drafter in self.drafters]
        _require(
            "ngram" not in kinds,
            "draft_tensor_parallel_size",
            self.draft_tensor_parallel_size,
            "drafter=ngram has no model to share; allowed: 1",
        )
        _require(
            len(kinds) < 2,
            "draft_tensor_parallel_size",
            self.draft_tensor_parallel_size,
            f"ranks share the model of one drafter, not of {', '.join(kinds)}; allowed: 1",
        )

    def _check_fits_target(self, drafter: DrafterConfig) -> None:
        shape = self.hardware.synthetic
        _require(
            shape is None or drafter.kind in ("ngram", "synthetic"),
            "drafter",
            drafter.kind,
            f"does not fit hardware.synthetic={shape}; allowed: ngram, synthetic",
        )
        _require(
            drafter.kind != "synthetic" or self.target.kind != "hf" or drafter.shape is not None,
            "drafter.shape",
            "null",
            f"required with target=hf; allowed: {', '.join(get_args(ModelShape))}",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a command line can set. The keys of `DecodingConfig` stand at the top level."""

    prompt: str | None = None
    """`generate`: the user's message; None takes the first prompt of the workload."""
    output: Literal["text", "json"] = "text"
    view: Literal["plain", "live"] = "plain"
    """`generate` on a terminal: `live` shows below the text what both workers are doing."""
    run_dir: str | None = None
    """Where the run keeps its files; None: `runs/<date>-<short hash>`."""
    accept: float | None = None
    """`drafter=synthetic`: short for drafter.accept. `simulate`: the share of right draft tokens."""
    verify_ms: float | None = None
    """`simulate`: time of one target pass; required unless `calibration` says it."""
    draft_ms: float | None = None
    """`simulate`: time of the draft for one token; required unless `calibration` says it."""
    delay_ms: float | None = None
    """`simulate`: time of a message, one way; None: as calibrated, else 0."""
    calibration: str | None = None
    """`simulate`: a run directory, whose measured times and outcomes hold where nothing else is given."""
    mode: Mode = DecodingConfig.mode
    policy: AsynchronousPolicy = DecodingConfig.policy
    num_speculative_tokens: int = DecodingConfig.num_speculative_tokens
    max_lookahead: int = DecodingConfig.max_lookahead
    min_candidates: int = DecodingConfig.min_candidates
    max_wait_passes: float = DecodingConfig.max_wait_passes
    tokens_per_message: int = DecodingConfig.tokens_per_message
    fan_out: int = DecodingConfig.fan_out
    rows_per_step: int = DecodingConfig.rows_per_step
    verify_breadth: int = DecodingConfig.verify_breadth
    draft_timeout_seconds: float = DecodingConfig.draft_timeout_seconds
    max_silence_seconds: float = DecodingConfig.max_silence_seconds
    verify_width: Literal["bucketed", "fixed"] = EngineConfig.verify_width
    max_verify_width: int | None = None
    """None: the smallest multiple of 8 that holds the longest synchronous block and the token before it."""
    max_model_len: int = EngineConfig.max_model_len
    startup_timeout_seconds: float = EngineConfig.startup_timeout_seconds
    target_tensor_parallel_size: int = EngineConfig.target_tensor_parallel_size
    draft_tensor_parallel_size: int = EngineConfig.draft_tensor_parallel_size
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)

    def __post_init__(self) -> None:
        for name, least in (("verify_ms", "above 0"), ("draft_ms", "above 0"), ("delay_ms", "at least 0")):
            value = getattr(self, name)
            enough = value is None or 0 < value < math.inf or (value == 0 and least == "at least 0")
            _require(enough, name, value, f"must be {least}")
        self.decoding()
        self.engine()

    def decoding(self) -> DecodingConfig:
        """The schedule part."""
        return DecodingConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(DecodingConfig)})

    def synchronous_lengths(self) -> tuple[int, ...]:
        """Block lengths that `compare` tries: the one that `mode=synchronous` names, else those of `compare`."""
        if self.mode is Mode.AUTOREGRESSIVE:
            return ()
        if self.mode is Mode.SYNCHRONOUS:
            return (self.num_speculative_tokens,)
        return self.compare.synchronous_lengths

    def asynchronous_policies(self) -> tuple[AsynchronousPolicy, ...]:
        """Policies that `compare` tries; none where `mode` names another one."""
        if self.mode is not Mode.ASYNCHRONOUS:
            return ()
        return self.compare.policies or (self.policy,)

    def engine_for(self, command: str) -> EngineConfig:
        """The target's engine for `command`: with room for every block that it will verify."""
        if command != "compare":
            return self.engine()
        windows = (self.num_speculative_tokens,) if "windowed" in self.asynchronous_policies() else ()
        return self.engine(longest_block=max((1, *self.synchronous_lengths(), *windows)))

    def engine(self, *, longest_block: int | None = None) -> EngineConfig:
        """The part an engine is built from. `longest_block`: candidates per verification that have to fit."""
        if longest_block is None:
            in_blocks = self.mode is Mode.SYNCHRONOUS or self.asynchronous_policies() == ("windowed",)
            longest_block = self.num_speculative_tokens if in_blocks else 1
        width = self.max_verify_width
        if width is None:
            width = MIN_VERIFY_WIDTH * -(-(longest_block + 1) // MIN_VERIFY_WIDTH)
        _require(
            longest_block + 1 <= width,
            "max_verify_width",
            width,
            f"must be at least {longest_block + 1}: {longest_block} candidates and the token before them",
        )
        kinds = self.compare.drafters or (self.drafter.kind,)
        if self.accept is not None:
            simulated = self.verify_ms is not None or self.calibration is not None
            _require(
                "synthetic" in kinds or simulated,
                "accept",
                self.accept,
                "only allowed with drafter=synthetic, or to simulate, with verify_ms or calibration",
            )
            _require(0 <= self.accept <= 1, "accept", self.accept, "must be between 0 and 1")
        return EngineConfig(
            target=self.target,
            drafters=tuple(self._drafter(kind) for kind in kinds),
            transport=self.transport,
            hardware=self.hardware,
            verify_width=self.verify_width,
            max_verify_width=width,
            max_model_len=self.max_model_len,
            startup_timeout_seconds=self.startup_timeout_seconds,
            target_tensor_parallel_size=self.target_tensor_parallel_size,
            draft_tensor_parallel_size=self.draft_tensor_parallel_size,
        )

    def _drafter(self, kind: DrafterKind) -> DrafterConfig:
        drafter = self.drafter if kind == self.drafter.kind else DrafterConfig(kind=kind)
        if kind == "synthetic" and self.accept is not None:
            return dataclasses.replace(drafter, accept=self.accept)
        return drafter
