"""The ways to decode that `amusd compare` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amusd.answer import Generation
from amusd.commands.tables import row_name, settings_of
from amusd.config import DecodingConfig, RunConfig
from amusd.runtime.devices import devices_of


@dataclass(eq=False)
class Contestant:
    """One way to decode, and its answers in the order of the prompts, which are repeated to fill a batch."""

    decoding: DecodingConfig
    drafter: str | None
    batch_size: int = 1
    num_devices: int = 1
    answers: list[Generation] = field(default_factory=list)
    seconds: float = 0.0
    """Total time of the turns."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that name the contestant in a row."""
        return {**settings_of(self.decoding), "drafter": self.drafter, "batch_size": self.batch_size}

    @property
    def name(self) -> str:
        """Name in tables and figures."""
        return row_name(self.settings)


def contestants_of(config: RunConfig) -> list[Contestant]:
    """For each batch size plain decoding, then each drafter's synchronous lengths and asynchronous policies.

    Plain decoding of one answer at a time comes first. `mode=synchronous` drops policies, `autoregressive` drafters.
    """
    decoding, devices = config.decoding(), devices_of(config.engine_for("compare"))
    plain = replace(decoding, mode="autoregressive")
    found: list[tuple[DecodingConfig, str | None]] = [(plain, None)]
    for drafter in config.engine().drafters:
        has_trees = config.compare.trees and drafter.can.tree and config.sampling.rule != "rejection"
        found += [
            (replace(decoding, mode="synchronous", num_speculative_tokens=length, tree=is_tree), drafter.kind)
            for is_tree in dict.fromkeys((decoding.tree, *((False, True) if has_trees else ())))
            for length in config.synchronous_lengths()
        ]
        policies = config.asynchronous_policies() if drafter.can.runs_ahead else ()
        found += [(replace(decoding, policy=policy), drafter.kind) for policy in policies]
    sized = dict.fromkeys([(plain, None, 1), *((*one, size) for size in config.compare.batch_sizes for one in found)])
    num_alone = count_devices(devices[:-1])
    num_devices = count_devices(devices) if config.drafter.address is None else num_alone + 1  # the draft's elsewhere
    return [Contestant(*one, num_devices=num_devices if one[1] else num_alone) for one in sized]


def count_devices(devices: Sequence[str]) -> int:
    """Number of devices: each GPU counts once, and a CPU for each rank (its cores)."""
    return len({*devices} - {"cpu"}) + devices.count("cpu")
