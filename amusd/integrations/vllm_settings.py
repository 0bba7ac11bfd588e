"""The settings of `AsyncProposer` (`amusd/integrations/vllm.py`), and the device that it takes beside vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, TargetConfig, TransportConfig
from amusd.config.engine import Device, Length
from amusd.errors import ConfigError
from amusd.protocol.messages import MAX_NUM_SEQS, MAX_TOKENS, Width
from amusd.runtime.devices import count_gpus, why_missing
from amusd.settings import Amount, Count, CountFromZero, PositiveAmount, Settings, Share, Text, from_mapping, shown
from amusd.transport.addresses import check_address


@dataclass(frozen=True, kw_only=True)
class ProposerConfig(Settings):
    """The settings under `amusd` in vLLM's `additional_config`."""

    section = "amusd"

    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """`{"kind": "hf", "model": FOLDER}`, `{"kind": "embedded"}` ..., but no drafter that reads hidden states."""
    keys: Text | None = None
    """Folder of `amusd keys FOLDER`, for a drafter with an `address` on another machine."""
    device: Device | None = None
    """The draft's device, by the numbers of vLLM's process; None: the first GPU that vLLM leaves, else `cpu`."""
    cores: tuple[CountFromZero, ...] = ()
    """CPU cores of the draft, which vLLM must not use; empty: the last core of vLLM's process."""
    rows_per_step: Width = 8
    """Most tokens that the draft computes for a row in one step, to be ready for vLLM's choice; 1: a chain."""
    min_chance: Share = 0.2
    """A candidate is proposed only if the draft gives it and all before it at least this probability."""
    wait_ms: Amount = 0.0
    """Longest wait of a pass for `min_candidates` of each row."""
    min_candidates: Count = 1
    """Candidates of each row for which a pass waits, `wait_ms` at most."""
    draft_up_to_rows: Count = 16
    """While vLLM's batch has more rows, the draft gets no verdicts and vLLM no candidates."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)] = 16
    """Most rows drafted for at a time; further rows get no candidates."""
    max_model_len: Length | None = None
    """Longest row, in tokens, that is drafted for; None: as long as half of the draft device's free memory allows."""
    startup_timeout_seconds: PositiveAmount = 300.0
    """How long vLLM's start waits for the draft to load."""

    def engine(self, vllm_config: Any) -> EngineConfig:
        """The configuration of the draft's process. Raises `ConfigError`."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if (number := parallel.pipeline_parallel_size) > 1:  # batches take turns
            allowed = "AsyncProposer has to see every row after each pass; allowed: 1"
            raise ConfigError(f"pipeline_parallel_size={number}: {allowed}")
        is_named = self.drafter.kind not in ("auto", "synthetic")
        self.require(is_named, "drafter", 'name one, as {"kind": "hf", "model": ...}')
        for part in self.drafter.stages:
            self.require(not part.can.needs_features, "drafter", "reads hidden states, which vLLM does not pass on")
        if self.drafter.address is not None:
            _, is_local = check_address(self.drafter.address, beyond=True, to_bind=False, key="drafter.address")
            self.require(is_local or self.keys is not None, "keys", "required for a drafter on another machine")
        needs_gpu = vllm_config.device_config.device_type == "cuda" and self.drafter.kind != "ngram"
        is_here = self.drafter.address is None
        device = self.device or (self._gpu_beside(parallel) if is_here and needs_gpu else "cpu")
        why = why_missing([device]) if is_here else None
        self.require(why is None, "device", str(why))
        last = os.sysconf("SC_NPROCESSORS_CONF") - 1
        self.require(max(self.cores, default=0) <= last, "cores", f"this machine has the cores 0 to {last}")
        return EngineConfig(
            target=TargetConfig(kind="hf", model=model.model),
            drafters=(self.drafter,),
            transport=TransportConfig(keys=self.keys),
            hardware=HardwareConfig(devices=("cpu", device), num_threads=max(1, len(self.cores))),
            max_model_len=min(model.max_model_len, self.max_model_len or MAX_TOKENS),
            max_num_seqs=self.max_num_seqs,
            fits_memory=self.max_model_len is None,
            startup_timeout_seconds=self.startup_timeout_seconds,
        )

    def _gpu_beside(self, parallel: Any) -> str:
        """The first visible GPU that no rank of vLLM has. Raises `ConfigError` where none is known to be free."""
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count_gpus())))).split(",")
        # With data parallelism an engine knows only the greatest number of ranks.
        num_ranks = parallel.local_world_size * (parallel.elastic_ep_max_dp_size or parallel.data_parallel_size)
        taken = [*map(str, parallel.assigned_physical_gpu_ids or visible[:num_ranks])]
        free = [f"cuda:{index}" for index, name in enumerate(visible) if name not in taken]
        is_known = len(taken) >= num_ranks and {*taken} <= {*visible}
        number = f"vLLM has {num_ranks} ranks here, and sees {len(visible) if visible[0] else 0} GPUs"
        self.require(is_known and bool(free), "device", f"{number}; let it see another one, or name the draft's device")
        return free[0]


def settings_of(vllm_config: Any) -> ProposerConfig:
    """The settings in vLLM's `additional_config`. Raises `ConfigError`."""
    given = vllm_config.additional_config
    found = given.get(ProposerConfig.section, {}) if isinstance(given, Mapping) else {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"amusd={shown(found)}: expected a mapping of settings")
    return from_mapping(ProposerConfig, found)
