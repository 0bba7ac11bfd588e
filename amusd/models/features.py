"""The target's hidden states that drafters read, stored beside the keys and values of the same tokens.

They are kept and cut back with the sequence, so a late draft can be sent those of the whole prefix. Layers are counted
as in transformers' `hidden_states`: state `j` goes into layer `j`; the last one is behind the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from amusd.models.kv_cache import KVMemory


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The feature of a token that one drafter reads."""

    layers: tuple[int, ...]
    width: int
    reduce: torch.nn.Module | None = None
    """[rows, len(layers) * hidden] -> [rows, width], computed by the target; None: identity."""


class FeatureTaps:
    """Writes the states that drafters read from a pass into its memory."""

    def __init__(self, specs: Mapping[str, FeatureSpec], device: torch.device, dtype: torch.dtype) -> None:
        """`specs`: by drafter; `device` and `dtype`: of the hidden states."""
        self._parts = [(spec.layers, spec.reduce and spec.reduce.to(device, dtype)) for spec in specs.values()]
        self.layers = frozenset(layer for spec in specs.values() for layer in spec.layers)
        self.columns: dict[str, slice] = {}
        self.width = 0
        for name, spec in specs.items():
            self.columns[name] = slice(self.width, self.width + spec.width)
            self.width += spec.width

    def write(self, states: Mapping[int, Tensor], memory: KVMemory) -> None:
        """Write the features of a pass's rows. `states`: [rows, hidden] of each of the `layers`."""
        features = []
        for layers, reduce in self._parts:
            joint = torch.cat([states[layer] for layer in layers], dim=-1)
            features.append(joint if reduce is None else reduce(joint))
        memory.write_features(torch.cat(features, dim=-1))
