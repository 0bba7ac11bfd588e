"""What a drafter reads of its target: hidden states of chosen layers, reduced beside it where that is possible."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The feature of one position of the target."""

    layers: tuple[int, ...]
    """transformers' `hidden_states[j]` for each j; 0: the embedding; the number of layers: after the final norm."""
    width: int
    """Numbers of a feature."""
    reduce: torch.nn.Module | None = None
    """[rows, layers * hidden size] -> [rows, width], computed beside the target; None: the states side by side."""
