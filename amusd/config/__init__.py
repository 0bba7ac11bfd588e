"""Every setting and its default, as frozen keyword-only dataclasses.

`RunConfig` is all that a user can set; `settings.from_mapping` builds it. A value out of range is one `ConfigError`
line: the key, the value, what is allowed.
"""

from amusd.config.capabilities import CAPABILITIES as CAPABILITIES
from amusd.config.capabilities import Capabilities as Capabilities
from amusd.config.capabilities import check_runs_ahead as check_runs_ahead
from amusd.config.capabilities import runs_ahead as runs_ahead
from amusd.config.commands import HIDDEN as HIDDEN
from amusd.config.commands import CompareConfig as CompareConfig
from amusd.config.commands import ServeConfig as ServeConfig
from amusd.config.commands import SimulateConfig as SimulateConfig
from amusd.config.commands import WorkloadConfig as WorkloadConfig
from amusd.config.decoding import GREEDY as GREEDY
from amusd.config.decoding import MAX_BIASES as MAX_BIASES
from amusd.config.decoding import MAX_FAN_OUT as MAX_FAN_OUT
from amusd.config.decoding import MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS
from amusd.config.decoding import AcceptanceRule as AcceptanceRule
from amusd.config.decoding import AsynchronousPolicy as AsynchronousPolicy
from amusd.config.decoding import DecodingConfig as DecodingConfig
from amusd.config.decoding import Distribution as Distribution
from amusd.config.decoding import SamplingParams as SamplingParams
from amusd.config.engine import DEFAULT_DRAFTERS as DEFAULT_DRAFTERS
from amusd.config.engine import MAX_NUM_SEQS as MAX_NUM_SEQS
from amusd.config.engine import DrafterConfig as DrafterConfig
from amusd.config.engine import DrafterKind as DrafterKind
from amusd.config.engine import EngineConfig as EngineConfig
from amusd.config.engine import HardwareConfig as HardwareConfig
from amusd.config.engine import ModelShape as ModelShape
from amusd.config.engine import TargetConfig as TargetConfig
from amusd.config.engine import TransportConfig as TransportConfig
from amusd.config.run import RunConfig as RunConfig
