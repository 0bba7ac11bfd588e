"""Every setting and its default, as frozen keyword-only dataclasses.

`RunConfig` is all that a user can set; `settings.from_mapping` builds it. A value out of range raises a `ConfigError`
of one line: the key, the value, what is allowed.
"""

from amusd.config.capabilities import CAPABILITIES, Capabilities
from amusd.config.commands import HIDDEN, CompareConfig, ServeConfig, SimulateConfig, WorkloadConfig
from amusd.config.decoding import GREEDY, MAX_TOP_LOGPROBS, DecodingConfig, Distribution, SamplingParams
from amusd.config.engine import DrafterConfig, EngineConfig, HardwareConfig, ModelShape, TargetConfig, TransportConfig
from amusd.config.run import RunConfig
