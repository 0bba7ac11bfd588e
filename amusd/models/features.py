"""The hidden states of a target that a drafter reads, written beside the keys and values of the same tokens.

So they are kept, moved and cut back with the sequence, and a draft that joins late is sent those of the whole prefix.

Layers are counted as in transformers' `hidden_states`: state `j` goes into layer `j`, and the last one has been through
the final norm.

References:
    EAGLE-3, https://arxiv.org/abs/2503.01840 (three layers, reduced to one state); Medusa,
    https://arxiv.org/abs/2401.10774 (the last state).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from amusd.models.kv_cache import KVMemory


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The numbers that one drafter reads of each token of the target."""

    layers: tuple[int, ...]
    """Which hidden states, side by side."""
    width: int
    """Numbers of a feature, as it is sent."""
    reduce: torch.nn.Module | None = None
    """[rows, len(layers) * hidden] -> [rows, width], computed beside the target; None: the states as they are."""


class FeatureTaps:
    """Takes the states that drafters read out of a pass and writes them into its memory."""

    def __init__(self, specs: Mapping[str, FeatureSpec], device: torch.device, dtype: torch.dtype) -> None:
        """`specs`: by the drafter's name; `device` and `dtype`: of the hidden states."""
        self._parts = [
            (
                spec.layers,
                None if spec.reduce is None else spec.reduce.to(device, dtype).requires_grad_(requires_grad=False),
            )
            for spec in specs.values()
        ]
        self.layers = frozenset(layer for spec in specs.values() for layer in spec.layers)
        self.columns: dict[str, slice] = {}
        """The columns of each drafter's feature in the memory."""
        self.width = 0
        for name, spec in specs.items():
            self.columns[name] = slice(self.width, self.width + spec.width)
            self.width += spec.width

    def write(self, states: Mapping[int, Tensor], memory: KVMemory) -> None:
        """Write the features of the rows of a pass. `states`: [rows, hidden] of each of the `layers`."""
        features = []
        for layers, reduce in self._parts:
            joint = torch.cat([states[layer] for layer in layers], dim=-1)
            features.append(joint if reduce is None else reduce(joint))
        memory.write_features(torch.cat(features, dim=-1))
