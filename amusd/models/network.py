"""The weights of a causal language model and one forward pass through them, as a function of tensors alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from amusd.models.attention import Attention
from amusd.models.features import FeatureTaps
from amusd.models.kv_cache import KVMemory


class Network(Protocol):
    """The `Decoder` or `HuggingFaceNetwork` of a model.

    It never reads a value on the host. So a pass whose tensors live at fixed addresses can be captured once and
    replayed.
    """

    implementation: str
    """The author of the forward pass: `amusd` or `transformers`."""
    device: torch.device
    """The device of the weights."""
    cache_dtype: torch.dtype
    """The dtype of keys and values."""
    num_ids: int
    """Token ids that it takes in: `[0, num_ids)`; a reduced head scores fewer."""
    vocab_size: int
    """Columns of the logits."""
    feature_width: int
    """Numbers of the feature that each row starts from (`KVMemory.parents_of_pass`); 0: it reads none."""
    taps: FeatureTaps | None
    """The taps that write features for drafters; None: no drafter reads any."""
    fills_vectors: bool
    """Whether a row fills whole vectors of a CPU in every layer: other instructions compute a part of one."""
    weight_bytes: int
    """Bytes of the weights that one pass reads, the output head included; a row of the embedding is not counted."""
    parameter_bytes: int
    """Bytes of all weights; tied ones count once."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        memory: KVMemory,
        *,
        with_logits: bool,
        several: bool = False,
    ) -> Tensor | None:
        """Logits [rows, vocab] of `token_ids` [rows]; None without `with_logits`.

        `positions` [rows] are those of the model; `attention` says what each row sees. `memory` knows where rows are
        written (`slots_of_pass`). `several`: rows are of several sequences, so none may change another by more than
        rounding.
        """
        ...
