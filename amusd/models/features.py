"""Features: the target's hidden states that drafters read, stored beside the keys and values of the same tokens.

They are truncated with the sequence, and a late draft can get those of the whole prefix. States are numbered as in
transformers' `hidden_states`: state `j` is the input of layer `j`; the last state comes after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.kv_cache import PassMemory

INPUT_NORMS = ("input_norm.", "fc_norm.")


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The feature of a token that one drafter reads: states side by side, perhaps reduced by the target."""

    layers: tuple[int, ...]
    width: int
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """`fc` and optional norms, by the names of published drafters; empty: features are the states."""
    epsilon: float = 0.0
    """Added to the norms' mean square."""

    def to(self, device: torch.device, dtype: torch.dtype) -> FeatureSpec:
        """Move the weights."""
        return replace(self, weights={name: weight.to(device, dtype) for name, weight in self.weights.items()})

    def reduce(self, states: Tensor) -> Tensor:
        """[rows, len(layers) * hidden] -> [rows, width]."""
        if not self.weights:
            return states
        norms = sorted(
            (name for name in self.weights if name.startswith(INPUT_NORMS)), key=lambda name: (len(name), name)
        )
        if norms:
            parts = zip(states.chunk(len(norms), dim=-1), norms, strict=True)
            states = torch.cat([self._norm(part, name) for part, name in parts], dim=-1)
        features = F.linear(states, self.weights["fc.weight"], self.weights.get("fc.bias"))
        return self._norm(features, "hidden_norm.weight") if "hidden_norm.weight" in self.weights else features

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self.weights[name], self.epsilon)


class FeatureTaps:
    """Writes the states that drafters read from a pass into its memory."""

    def __init__(self, specs: Mapping[str, FeatureSpec], device: torch.device, dtype: torch.dtype) -> None:
        """`specs`: by drafter; `device` and `dtype`: of the hidden states."""
        self._specs = [spec.to(device, dtype) for spec in specs.values()]
        self.layers = frozenset(layer for spec in self._specs for layer in spec.layers)
        self.columns, self.width = dict[str, slice](), 0
        for name, spec in specs.items():
            self.columns[name] = slice(self.width, self.width + spec.width)
            self.width += spec.width

    def write(self, states: Mapping[int, Tensor], memory: PassMemory) -> None:
        """Write the features of a pass's rows. `states`: [rows, hidden] of each of the `layers`."""
        features = [spec.reduce(torch.cat([states[layer] for layer in spec.layers], dim=-1)) for spec in self._specs]
        memory.write_features(torch.cat(features, dim=-1))
