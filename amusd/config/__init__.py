"""Every setting and its default, as frozen keyword-only dataclasses.

`RunConfig` holds all that a user can set. A wrong value raises a `ConfigError`, one line: key, value, what is allowed.
"""

from amusd.config.capabilities import CAPABILITIES, Capabilities
from amusd.config.commands import HIDDEN, CompareConfig, ServeConfig, SimulateConfig, WorkloadConfig
from amusd.config.decoding import GREEDY, MAX_TOP_LOGPROBS, DecodingConfig, Distribution, SamplingParams
from amusd.config.engine import DrafterConfig, EngineConfig, HardwareConfig, ModelShape, TargetConfig, TransportConfig
from amusd.config.run import RunConfig
