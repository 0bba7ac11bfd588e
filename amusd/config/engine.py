"""What an engine is built from: models, link, devices, numerics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from amusd.config.capabilities import CAPABILITIES, Capabilities, kinds_with
from amusd.config.plugins import DRAFTERS, check_named
from amusd.errors import ConfigError
from amusd.settings import check_range, check_seconds, convert_fields, require

DrafterKind: TypeAlias = Literal[
    "embedded", "hf", "eagle", "medusa", "dflash", "cascade", "ngram", "self", "synthetic", "custom"
]
TargetDtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32"]
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

MAX_REMEMBERED = 1 << 20
"""Tokens of earlier answers at most; the draft needs about 1 KB for each."""
MAX_NUM_SEQS = 1 << 12
"""Answers at a time at most."""
MIN_VERIFY_WIDTH = 8
"""Rows of a padded target pass unless longer blocks are asked for: verifying 8 rows costs a CPU what 1 row does."""
MAX_MATCH = 12
"""Tokens of the longest suffix that is looked up in a text."""
_ONLY_WITH = {
    "num_layers": "self",
    "shape": "synthetic",
    "remember": "ngram",
    "inner": "cascade",
    "inner_device": "cascade",
    "factory": "custom",
    "options": "custom",
}
"""Settings that a single kind of drafter has."""
DEFAULT_DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "ngram": "drafter=ngram (prompt lookup): none is named, and the embedded draft fits the embedded target alone; "
        "a small model of the target's family, drafter=FOLDER, is mostly faster",
        "synthetic": "drafter=synthetic: none is named, and the target's weights are random; drafter.accept says how "
        "often it is right",
    }
)
"""What is said where nobody named a drafter and the embedded one does not fit, by the kind that takes its place."""
CHECKPOINT = "a folder or hub name of a checkpoint"
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d*)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which model verifies."""

    kind: Literal["embedded", "hf"] = "embedded"
    model: str | None = None
    """`hf`: a folder or hub name of a transformers checkpoint. Alone, or as `target=MODEL`, it means `hf`."""
    dtype: TargetDtype = "auto"
    """`auto`: bfloat16, but float32 on CPUs that have no bfloat16 products."""
    model_impl: Literal["auto", "amusd", "transformers"] = "auto"
    """Whose forward pass: our lean decoder, transformers' own, or (`auto`) ours where it covers the model."""

    def __post_init__(self) -> None:
        convert_fields(self, "target.")
        _check_model("target", self.kind, self.model, ("hf",))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter: it proposes candidates."""

    kind: Literal["auto", DrafterKind] = "auto"
    """`auto`: `embedded` for the embedded target, `synthetic` for random weights, else `ngram`."""
    model: str | None = None
    """Folder or hub name of a checkpoint: of a model (`hf`), of a drafter that was trained for the target (`eagle`,
    `medusa`, `dflash`), of what judges the tokens of `inner` (`cascade`; None: the embedded draft)."""
    dtype: DraftDtype = "auto"
    """`auto`: `int8` for `embedded` and for drafters that read states, where the CPU multiplies it fast, else as of the
    target."""
    model_impl: Literal["auto", "amusd", "transformers"] = "auto"
    """As of the target."""
    num_layers: int | None = None
    """`self`: how many of the target's first layers draft, below its norm and its head; None: a quarter."""
    tokens_per_replay: int = 4
    """Draft steps at most before the host waits for them, on GPUs with graphs."""
    vocab_size: int = 8192
    """`embedded`: how many token ids its model can propose (the most frequent ones)."""
    min_lookup: int = 4
    """`embedded`, `eagle`: shortest repeated suffix whose continuation is proposed; 0: never, and a tree's guesses
    have nothing mixed in either."""
    shape: ModelShape | None = None
    """`synthetic`: of which model's size a step costs; None: a smaller one than a synthetic target, else `embedded`."""
    accept: float = 0.8
    """`synthetic`: probability that a candidate is right; exact with `verify_width=fixed`."""
    accept_next: float = 0.4
    """`synthetic`, trees: the same of a further guess where those before it are wrong."""
    min_ngram: int = 1
    """`ngram`: shortest suffix that is looked up."""
    remember: int = 0
    """`ngram`: tokens of earlier answers, other people's too, that are looked up as well; 0: none."""
    inner: str | None = None
    """`cascade`: what drafts for `model`: `ngram` (or None), `embedded`, a checkpoint."""
    inner_device: str | None = None
    """`cascade`: device of a process of its own for `inner`; None: that of `model`."""
    factory: str | None = None
    """`custom`: what makes it: `MODULE:FUNCTION`, `FILE.py:FUNCTION`, an entry point of `amusd.drafters`."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """`custom`: what that function is told, `drafter.options.NAME=VALUE`."""

    def __post_init__(self) -> None:
        convert_fields(self, "drafter.")
        if self.kind != "auto":
            self._check_kind()
        self._check_custom()
        self._check_inner()
        check_range(self, "drafter.", "num_layers", "tokens_per_replay", least=1)
        check_range(self, "drafter.", "vocab_size", least=2)
        check_range(self, "drafter.", "accept", "accept_next", least=0, most=1)
        check_range(self, "drafter.", "remember", least=0, most=MAX_REMEMBERED)
        check_range(self, "drafter.", "min_lookup", least=0, most=MAX_MATCH)
        check_range(self, "drafter.", "min_ngram", least=1, most=MAX_MATCH)

    def for_target(self, target: TargetConfig, hardware: HardwareConfig) -> DrafterConfig:
        """The same with the kind that fits this target where none is named."""
        if self.kind != "auto":
            return self
        random = hardware.synthetic is not None
        return replace(self, kind="ngram" if target.kind == "hf" else "synthetic" if random else "embedded")

    @property
    def can(self) -> Capabilities:
        """The abilities of its kind."""
        return CAPABILITIES[self.kind]

    @property
    def stages(self) -> tuple[DrafterConfig, ...]:
        """The drafter itself; of a cascade the one in the middle and the one that drafts for it, which share settings.

        The model in the middle makes its tokens in the pass that judges, so it never makes several between two waits.
        """
        if self.kind != "cascade":
            return (self,)
        alone = partial(replace, self, inner=None, inner_device=None)
        middle = alone(kind="hf" if self.model else "embedded", tokens_per_replay=1)
        if self.inner in (None, "ngram"):
            return middle, alone(kind="ngram", model=None)
        if self.inner == "embedded":
            return middle, alone(kind="embedded", model=None)
        return middle, alone(kind="hf", model=self.inner)

    def _check_kind(self) -> None:
        """Raise `ConfigError` for settings that other kinds have, or a checkpoint that is missing."""
        _check_model("drafter", self.kind, self.model, [kind for kind, can in CAPABILITIES.items() if can.checkpoint])
        for name, kind in _ONLY_WITH.items():
            value, allowed = getattr(self, name), f"only allowed with drafter={kind}, not with drafter={self.kind}"
            require(self.kind == kind or not value, f"drafter.{name}", value, allowed)

    def _check_custom(self) -> None:
        """Raise `ConfigError` unless code is named where it makes the drafter."""
        if self.kind == "custom":
            if not self.factory:
                raise ConfigError("drafter.factory: required with drafter=custom (MODULE:FUNCTION or FILE.py:FUNCTION)")
            check_named("drafter.factory", self.factory, DRAFTERS)

    def _check_inner(self) -> None:
        inner, device = self.inner, self.inner_device
        require(
            device is None or _DEVICE.fullmatch(device) is not None,
            "drafter.inner_device",
            device,
            "allowed: cpu, or cuda: and the number of a GPU, as in cuda:2",
        )
        require(
            inner in (None, "ngram", "embedded") or inner not in (*get_args(DrafterKind), ""),
            "drafter.inner",
            inner,
            "allowed: ngram, embedded, or a folder or hub name of a transformers checkpoint",
        )


def _check_model(key: str, kind: str, model: str | None, with_checkpoint: Sequence[str]) -> None:
    """Raise `ConfigError` unless a checkpoint is named where one is needed, and only there."""
    if kind in with_checkpoint and not model and kind != "cascade":
        raise ConfigError(f"{key}.model: required with {key}={kind} ({CHECKPOINT})")
    if kind not in with_checkpoint and model:
        allowed = " or ".join(f"{key}={kind}" for kind in with_checkpoint)
        raise ConfigError(f"{key}.model={model}: only allowed with {allowed}, not with {key}={kind}")


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
    """The delay of each message, to try what distance costs on one machine."""

    def __post_init__(self) -> None:
        convert_fields(self, "transport.")
        check_range(self, "transport.", "delay_ms", least=0, most=10_000)
        require(
            self.kind != "shared_memory" or self.address is None,
            "transport.address",
            self.address,
            "not with transport=shared_memory, which picks its own; leave it out, or use transport=zeromq",
        )
        require(
            self.keys is None or (self.address is not None and not self.insecure),
            "transport.keys",
            self.keys,
            "protects the link at transport.address, which has to be given; not with transport.insecure=true",
        )
        require(
            self.keys is None or self.kind in ("auto", "zeromq"),
            "transport.keys",
            self.keys,
            f"protects ZeroMQ's links, not those of transport={self.kind}",
        )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Which devices the workers use."""

    devices: tuple[str, ...] = ()
    """Device of each rank of the target, then the draft's: `cuda:0`, `cpu` ... One name repeated is for all. Empty: a
    GPU each, the target's first; with fewer GPUs than ranks they share; with none the CPU."""
    pin_cores: bool = True
    """On CPUs: give each worker its own core, where there are at least two."""
    num_threads: int = 1
    """On CPUs: threads of each worker."""
    cuda_graphs: bool = True
    """On GPUs: replay captured passes instead of launching each operator anew."""
    synthetic: ModelShape | None = None
    """Measure without a checkpoint: the target is a model of this size with random weights."""

    def __post_init__(self) -> None:
        convert_fields(self, "hardware.")
        check_range(self, "hardware.", "num_threads", least=1)
        require(len(self.devices) != 1, "hardware.devices", list(self.devices), "name two: the target's, the draft's")
        require(
            all(_DEVICE.fullmatch(device) for device in self.devices),
            "hardware.devices",
            list(self.devices),
            "allowed: cpu, or cuda: and the number of a GPU, as in cuda:0",
        )


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """What an engine is built from, as far as a run names it in the same way."""

    target: TargetConfig = field(default_factory=TargetConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    verify_width: Literal["bucketed", "fixed"] = "fixed"
    """`fixed`: every target pass is padded to `max_verify_width` rows, so that no timing can reach the numbers."""
    max_model_len: int = 2048
    """Longest sequence, prompt included; the model's own limit still holds."""
    max_num_seqs: int = 8
    """Answers that are computed at a time; further ones wait. Each has room for `max_model_len` tokens."""
    startup_timeout_seconds: float = 300.0
    """How long the workers wait for each other to load."""
    target_tensor_parallel_size: int = 1
    """Processes that share the target, each on a device of its own."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineKeys):
    """What an engine is built from: models, link, devices, numerics."""

    drafters: tuple[DrafterConfig, ...] = (DrafterConfig(),)
    """The drafters that requests may name, by kind; the first is the default. Empty: plain decoding only."""
    max_verify_width: int = MIN_VERIFY_WIDTH
    """Rows of a target pass at most: the last committed token and its candidates."""

    def __post_init__(self) -> None:
        convert_fields(self, "")
        check_range(self, "", "max_verify_width", "max_model_len", least=2)
        check_range(self, "", "target_tensor_parallel_size", least=1)
        check_range(self, "", "max_num_seqs", least=1, most=MAX_NUM_SEQS)
        check_seconds("startup_timeout_seconds", self.startup_timeout_seconds)
        devices = self.hardware.devices
        require(
            len(devices) in (0, self.num_ranks) or len(set(devices)) == 1,
            "hardware.devices",
            list(devices),
            "name two: the target's, the draft's"
            if self.num_ranks == 2
            else f"name {self.num_ranks}: the target's {self.target_tensor_parallel_size}, the draft's",
        )
        require(
            self.hardware.synthetic is None or self.target.kind != "hf",
            "hardware.synthetic",
            self.hardware.synthetic,
            "not with target=hf, which has weights of its own",
        )
        fitting = tuple(drafter.for_target(self.target, self.hardware) for drafter in self.drafters)
        object.__setattr__(self, "drafters", fitting)
        for drafter in self.drafters:
            self._check_fits_target(drafter)

    @property
    def num_ranks(self) -> int:
        """Processes that compute: the target's, then the draft's one."""
        return self.target_tensor_parallel_size + 1

    def _check_fits_target(self, drafter: DrafterConfig) -> None:
        shape = self.hardware.synthetic
        require(
            shape is None or drafter.can.any_target,
            "drafter",
            drafter.kind,
            f"does not fit hardware.synthetic={shape}; allowed: {kinds_with('any_target')}",
        )
        if self.target.kind == "hf" and drafter.kind == "cascade" and drafter.model is None:
            raise ConfigError(f"drafter.model: required with drafter=cascade and target=hf ({CHECKPOINT})")
        if self.target.kind == "hf" and drafter.kind == "synthetic" and drafter.shape is None:
            raise ConfigError(f"drafter.shape: required with target=hf; allowed: {', '.join(get_args(ModelShape))}")
