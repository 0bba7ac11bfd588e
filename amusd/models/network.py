"""A language model's weights and one forward pass, as a function of tensors alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from amusd.models.attention import Attention
from amusd.models.features import FeatureTaps
from amusd.models.kv_cache import KVMemory


class Network(Protocol):
    """The `Decoder` or `HuggingFaceNetwork` of a model.

    It never reads a value on the host, so a pass over fixed addresses can be captured.
    """

    implementation: str
    device: torch.device
    cache_dtype: torch.dtype
    num_ids: int
    """Token ids that it takes in: `[0, num_ids)`; a reduced head scores fewer."""
    vocab_size: int
    feature_width: int
    """Width of the feature that each row reads (`KVMemory.parents_of_pass`); 0: none."""
    taps: FeatureTaps | None
    """Write features for drafters; None: no drafter reads any."""
    attention_shape: tuple[int, int, int] | None
    """Query heads, key heads and their size, if every width is a multiple of the CPU's vector.

    None: the rest of a width may be computed by other instructions.
    """
    weight_bytes: int
    """Bytes of weights that one pass reads, with the head and without the embedding."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        memory: KVMemory,
        *,
        with_logits: bool,
    ) -> Tensor | None:
        """Logits [rows, vocab] of `token_ids` [rows]; None without `with_logits`.

        `positions` [rows]: of the model; `attention`: what rows see; `memory`: where they are written
        (`slots_of_pass`).
        """
        ...
