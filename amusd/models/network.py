"""A language model's weights and one forward pass, as a function of tensors alone.

A network never reads a value on the host, so a pass over fixed addresses can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from amusd.models.attention import Attention
from amusd.models.features import FeatureTaps
from amusd.models.kv_cache import KVMemory


@dataclass(kw_only=True, eq=False, repr=False)
class Network(ABC):
    """What `ModelRunner` needs of a network."""

    implementation = "amusd"
    device: torch.device
    cache_dtype: torch.dtype
    num_ids: int
    """Token ids that it takes in: `[0, num_ids)`."""
    vocab_size: int
    """Columns of the logits; a reduced head has fewer than `num_ids`."""
    weight_bytes: int
    """Bytes of weights that one pass reads at most (of all experts), with the head and without the embedding."""
    taps: FeatureTaps | None
    """Write features for drafters; None: no drafter reads any."""
    feature_width: int = 0
    """Width of the feature that each row reads (`KVMemory.parents_of_pass`); 0: none."""
    is_recurrent: bool = False
    """Layers keep states that cannot be cut back: `KVMemory.state_parts` has those of a pass."""
    attention_shape: tuple[int, int, int] | None = None
    """Query heads, key heads and their size. None: some width is no multiple of the CPU's vector.

    Other instructions may then compute the last numbers of a row.
    """

    @abstractmethod
    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: KVMemory, *, with_logits: bool
    ) -> Tensor:
        """Logits [rows, vocab_size] of `token_ids` [rows] at `positions` [rows]; no rows without `with_logits`.

        `memory`: written at its `slots_of_pass`, then read by `attention`.
        """
