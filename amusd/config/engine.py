"""The settings of an engine: models, link, devices, numerics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, get_args

from msgspec import Meta

from amusd.config.capabilities import CAPABILITIES, Capabilities, kinds_with
from amusd.config.plugins import is_reference
from amusd.errors import ConfigError
from amusd.protocol.messages import MAX_NUM_SEQS, MAX_TOKENS
from amusd.settings import Count, PositiveAmount, Settings, Share, Text

DrafterKind: TypeAlias = Literal[
    "embedded", "hf", "eagle", "medusa", "dflash", "cascade", "ngram", "self", "synthetic", "custom"
]
ModelShape: TypeAlias = Literal[
    "smollm2-135m", "smollm2-135m-slice", "llama-1b", "llama-8b", "llama-70b", "llama-70b-slice"
]
"""Shapes of public models, for random weights; `checkpoints/synthetic.py` has their sizes."""

MAX_REMEMBERED = 1 << 20
"""Most tokens of `drafter.remember`; the draft needs about 1 KB for each token."""
MIN_VERIFY_WIDTH = 8
"""Fewest rows of a padded target pass: 8 rows cost a CPU as much as 1 row."""
MAX_MATCH = 12
"""Longest looked-up suffix, in tokens."""
DEFAULT_DRAFTERS: Mapping[str, str] = {
    "ngram": "drafter=ngram (prompt lookup): none is named, and the embedded draft fits the embedded target only; "
    "a small model of the target's family, drafter=FOLDER, is usually faster",
    "synthetic": "drafter=synthetic: none is named, and the target's weights are random; drafter.accept says how "
    "often it is right",
}
"""The line for a user who named no drafter, by the kind that was chosen."""
_OF_ONE_KIND = {
    **dict.fromkeys(("inner", "inner_device"), "cascade"),
    **dict.fromkeys(("factory", "options"), "custom"),
    "remember": "ngram",
    "num_layers": "self",
    "shape": "synthetic",
}
Device: TypeAlias = Annotated[str, Meta(pattern=r"^(cpu|cuda:(0|[1-9][0-9]*))\Z", description="cpu or cuda:NUMBER")]
Address: TypeAlias = Annotated[str, Meta(pattern=r"^(tcp://.+:[0-9]+|ipc://.+)\Z", description="tcp://HOST:PORT")]
Length: TypeAlias = Annotated[int, Meta(ge=2, le=MAX_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Settings):
    """The model that verifies."""

    section = "target"

    kind: Literal["embedded", "hf"] = "embedded"
    model: str | None = None
    """`hf`: a folder or hub name of a transformers checkpoint. `target=MODEL` sets kind and model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto`: bfloat16; where missing or slower, float32 with float16 weights (CPUs) or float16 (GPUs)."""
    model_impl: Literal["auto", "transformers"] = "auto"
    """Forward pass: our lean decoder where it covers the model (`auto`), or transformers' own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_right = bool(self.model) == (self.kind == "hf")
        self.require(is_right, "model", "a folder or hub name is needed with target=hf, and only there")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Settings):
    """A drafter, which proposes candidates."""

    section = "drafter"

    kind: Literal["auto", DrafterKind] = "auto"
    """`auto`: `embedded` for the embedded target, `synthetic` for random weights, else `ngram`."""
    model: str | None = None
    """Folder or hub name of a checkpoint: a model (`hf`), a drafter trained for the target (`eagle`, `medusa`,
    `dflash`), or a model to judge the tokens of `inner` (`cascade`; None: the embedded draft).
    """
    dtype: Literal["auto", "bfloat16", "float16", "float32", "int8"] = "auto"
    """`auto`: `int8` for `embedded` and drafters that read states, on CPUs that multiply it fast; else bfloat16; where
    missing, float32 (CPUs) or float16 (GPUs).
    """
    num_layers: Count | None = None
    """`self`: how many of the target's first layers draft, with its norm and head; None: a quarter."""
    min_lookup: Annotated[int, Meta(ge=0, le=MAX_MATCH)] | None = None
    """`embedded`, `eagle`, `ngram`: shortest suffix whose continuation is proposed; None: 1 for `ngram`, else 4.

    With 0 `embedded` and `eagle` look nothing up, not even for trees.
    """
    shape: ModelShape | None = None
    """`synthetic`: shape of the computed model; None: one size below a synthetic target, else `embedded`."""
    accept: Share = 0.8
    """`synthetic`: probability that a candidate is right; exact with `verify_width=fixed`."""
    remember: Annotated[int, Meta(ge=0, le=MAX_REMEMBERED)] = 0
    """`ngram`: number of tokens of earlier answers, other users' too, for lookup; 0: none."""
    inner: Text | None = None
    """`cascade`: drafter for `model`: `ngram` (or None), `embedded`, a checkpoint."""
    inner_device: Device | None = None
    """`cascade`: device of a separate process for `inner`; None: that of `model`."""
    factory: str | None = None
    """`custom`: function that makes the drafter: `MODULE:FUNCTION` or `FILE.py:FUNCTION`."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """`custom`: `context.options` of the factory."""
    address: Address | None = None
    """`tcp://HOST:PORT` of an `amusd draft`, which has the model; None: start a draft process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            object.__setattr__(self, "options", json.loads(json.dumps(self.options)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"drafter.options: expected what JSON can hold ({error})") from None
        has_no_model = self.inner in get_args(DrafterKind) and self.inner not in ("ngram", "embedded")
        self.require(not has_no_model, "inner", "allowed: ngram, embedded, or a folder or hub name of a checkpoint")
        if self.kind == "auto":
            return
        fits = bool(self.model) == self.can.checkpoint or self.kind == "cascade" or self.is_elsewhere
        wanted = "required" if self.can.checkpoint else f"only allowed with {', '.join(kinds_with('checkpoint'))}, not"
        self.require(fits, "model", f"{wanted} with drafter={self.kind}")
        for name, kind in _OF_ONE_KIND.items():
            allowed = f"only allowed with drafter={kind}, not with drafter={self.kind}"
            self.require(self.kind == kind or not getattr(self, name), name, allowed)
        has_factory = self.kind != "custom" or is_reference(self.factory or "")
        self.require(has_factory, "factory", "allowed: MODULE:FUNCTION, FILE.py:FUNCTION")

    def for_target(self, target: TargetConfig, hardware: HardwareConfig) -> DrafterConfig:
        """This drafter, with `auto` replaced by a fitting kind."""
        if self.kind != "auto":
            return self
        random = hardware.synthetic is not None
        return replace(self, kind="ngram" if target.kind == "hf" else "synthetic" if random else "embedded")

    @property
    def can(self) -> Capabilities:
        """Abilities of the drafter's kind."""
        return CAPABILITIES[self.kind]

    @property
    def is_elsewhere(self) -> bool:
        """Whether only an `amusd draft` needs the drafter's model."""
        return self.address is not None and not self.can.needs_features

    @property
    def stages(self) -> tuple[DrafterConfig, ...]:
        """The drafter alone, or a cascade's middle and inner drafters."""
        if self.kind != "cascade":
            return (self,)
        alone = partial(replace, self, inner=None, inner_device=None)
        middle = alone(kind="hf" if self.model else "embedded")
        inner = self.inner or "ngram"
        is_kind = inner in ("ngram", "embedded")
        return middle, alone(kind=inner, model=None) if is_kind else alone(kind="hf", model=inner)


@dataclass(frozen=True, kw_only=True)
class TransportConfig(Settings):
    """The link between the workers."""

    section = "transport"

    kind: Literal["auto", "shared_memory", "zeromq", "gloo", "nccl"] = "auto"
    """`auto`: `zeromq` with an address, else `shared_memory` where it works, else `zeromq` locally."""
    address: Text | None = None
    """`ipc://PATH` or `tcp://HOST:PORT` at which the draft listens; None: a private address."""
    insecure: bool = False
    """Allow an address beyond this machine, unencrypted and unauthenticated."""
    keys: Text | None = None
    """Folder of `amusd keys FOLDER`: encrypts a TCP link, and admits only owners of the keys."""
    delay_ms: Annotated[float, Meta(ge=0, le=10_000)] = 0.0
    """Delay added to each message, to simulate distance on one machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_zeromq = self.kind in ("auto", "zeromq")
        self.require(not self.address or is_zeromq, "address", f"not with transport={self.kind}; allowed: null")
        self.require(not (self.keys and self.insecure), "keys", "not with transport.insecure=true")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Settings):
    """The devices of the workers."""

    section = "hardware"

    devices: tuple[Device, ...] = ()
    """Device of each rank of the target, then the draft's: `cuda:0`, `cpu` ... One name holds for all.

    Empty: a GPU for each, the target's first; too few GPUs are shared; without GPUs the CPU.
    """
    pin_cores: bool = True
    """On CPUs: give each rank cores of its own, `num_threads` each, if there are enough."""
    num_threads: Count = 1
    cuda_graphs: bool = True
    """On GPUs: replay captured passes instead of launching each operator anew."""
    synthetic: ModelShape | None = None
    """Measure without a checkpoint: a target of this size with random weights."""


@dataclass(frozen=True, kw_only=True)
class EngineKeys(Settings):
    """The settings that an engine and a run share."""

    target: TargetConfig = field(default_factory=TargetConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    verify_width: Literal["auto", "bucketed", "fixed"] = "auto"
    """`fixed`: every target pass has the bits of a pass of `max_verify_width` rows, whatever the timing.

    `bucketed`: little padding. `auto`: `fixed`, but `bucketed` for mixtures of experts and recurrent states.
    """
    max_model_len: Length = 2048
    """Longest sequence in tokens, prompt included; the model's own limit still holds."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)] = 8
    """Answers computed at a time; each has room for `max_model_len` tokens."""
    prefix_caching: bool = True
    """Reuse the cache of an earlier sequence that begins like the prompt; `compare` never does."""
    prefix_states_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 1024
    """Recurrent layers: most MB of states that a model keeps at ends of prompts and chunks."""
    startup_timeout_seconds: PositiveAmount = 300.0
    """How long the workers wait for each other to load."""
    target_tensor_parallel_size: Count = 1
    """Processes that share the target, each on its own device."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineKeys):
    """All settings of an engine."""

    drafters: tuple[DrafterConfig, ...] = (DrafterConfig(),)
    """Drafters that requests may name, by kind; the first is the default. Empty: plain decoding only."""
    max_verify_width: Length = MIN_VERIFY_WIDTH
    """Most rows of a target pass: the last committed token and the candidates after it."""
    fits_memory: bool = False
    """Whether the draft shortens its caches to fit half of the device's free memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        devices, number = self.hardware.devices, self.num_ranks
        shape, is_own = self.hardware.synthetic, self.target.kind == "hf"
        fits = len(devices) in (0, number) or len(set(devices)) == 1
        self.hardware.require(fits, "devices", f"name one for all, or {number}: the target's {number - 1}, the draft's")
        self.hardware.require(not (shape and is_own), "synthetic", "not with target=hf, which has weights of its own")
        fitting = tuple(drafter.for_target(self.target, self.hardware) for drafter in self.drafters)
        object.__setattr__(self, "drafters", fitting)
        has_address = self.transport.address is not None or self.draft_address is not None
        named = "protects the link at transport.address, drafter.address or listen; name one"
        self.transport.require(self.transport.keys is None or has_address, "keys", named)
        any_target, shapes = ", ".join(kinds_with("any_target")), ", ".join(get_args(ModelShape))
        kinds = [each.kind for each in fitting]
        for each in fitting:
            each.require(kinds.count(each.kind) == 1, "kind", "two of this kind; requests name a drafter by its kind")
            each.require(each.address == self.draft_address, "address", "one for all drafters")
            each.require(not shape or each.can.any_target, "kind", f"with hardware.synthetic allowed: {any_target}")
            lacks_model = is_own and each.kind == "cascade" and each.model is None
            each.require(not lacks_model, "model", "required with drafter=cascade and target=hf")
            lacks_shape = is_own and each.kind == "synthetic" and each.shape is None
            each.require(not lacks_shape, "shape", f"required with target=hf; allowed: {shapes}")

    @property
    def draft_address(self) -> str | None:
        """Address of the `amusd draft` that serves this target; None: the target starts a draft."""
        return self.drafters[0].address if self.drafters else None

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute: the target's ranks and the draft."""
        return self.target_tensor_parallel_size + 1
