"""Every setting and its default, as frozen keyword-only dataclasses. Standard library only; knows no Hydra.

`RunConfig` is the whole of what a user can set; `settings.from_mapping` builds it from nested dictionaries. A value out
of its range is one `ConfigError` line: the key, the value, what is allowed.
"""

from amusd.config.capabilities import CAPABILITIES, Capabilities, check_runs_ahead, runs_ahead
from amusd.config.commands import (
    HIDDEN,
    BenchConfig,
    CompareConfig,
    RayConfig,
    ServeConfig,
    SimulateConfig,
    WorkloadConfig,
)
from amusd.config.decoding import (
    GREEDY,
    MAX_BIASES,
    MAX_FAN_OUT,
    MAX_TOP_LOGPROBS,
    AcceptanceRule,
    AsynchronousPolicy,
    DecodingConfig,
    Distribution,
    PolicyName,
    SamplingParams,
)
from amusd.config.engine import (
    DEFAULT_DRAFTERS,
    MAX_NUM_SEQS,
    DraftDtype,
    DrafterConfig,
    DrafterKind,
    EngineConfig,
    HardwareConfig,
    ModelShape,
    TargetConfig,
    TransportConfig,
)
from amusd.config.run import RunConfig

__all__ = [
    "CAPABILITIES",
    "DEFAULT_DRAFTERS",
    "GREEDY",
    "HIDDEN",
    "MAX_BIASES",
    "MAX_FAN_OUT",
    "MAX_NUM_SEQS",
    "MAX_TOP_LOGPROBS",
    "AcceptanceRule",
    "AsynchronousPolicy",
    "BenchConfig",
    "Capabilities",
    "CompareConfig",
    "DecodingConfig",
    "Distribution",
    "DraftDtype",
    "DrafterConfig",
    "DrafterKind",
    "EngineConfig",
    "HardwareConfig",
    "ModelShape",
    "PolicyName",
    "RayConfig",
    "RunConfig",
    "SamplingParams",
    "ServeConfig",
    "SimulateConfig",
    "TargetConfig",
    "TransportConfig",
    "WorkloadConfig",
    "check_runs_ahead",
    "runs_ahead",
]
