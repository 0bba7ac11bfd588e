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
from amusd.models.kv_cache import PassMemory


@dataclass(kw_only=True, eq=False, repr=False)
class Network(ABC):
    """The interface of a network to `ModelRunner`."""

    implementation = "amusd"
    device: torch.device
    cache_dtype: torch.dtype
    num_ids: int
    """Input token ids are in `[0, num_ids)`."""
    vocab_size: int
    """Columns of the logits; a reduced head has fewer than `num_ids`."""
    weight_bytes: int
    """Most bytes of weights that one pass reads: all experts and the head, without the embedding."""
    taps: FeatureTaps | None
    """Writes features for drafters; None: no drafter reads any."""
    feature_width: int = 0
    """Width of the feature that each row reads (`PassMemory.parents`); 0: none."""
    is_recurrent: bool = False
    """Whether layers keep states that cannot be truncated (`PassMemory.states`)."""
    attention_shape: tuple[int, int, int] | None = None
    """Query heads, key heads, head size. None: not known, or some width is no multiple of the CPU's vector, so that
    other instructions may compute the rest.
    """

    @abstractmethod
    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: PassMemory, *, with_logits: bool
    ) -> Tensor:
        """Logits [rows, vocab_size] of `token_ids` [rows] at `positions` [rows]; no rows without `with_logits`.

        `memory`: written by each layer, then read by `attention`.
        """
