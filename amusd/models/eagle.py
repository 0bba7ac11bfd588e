"""EAGLE: one decoder layer after the target's states, which drafts on its own states beyond them.

Row t reads token t and the feature of token t - 1: the target's if the memory has it, else what row t - 1 wrote.

References: Li et al., EAGLE, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858; EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Attention
from amusd.models.cached_model import CachedModel
from amusd.models.decoder import Decoder, Norm
from amusd.models.draft_layouts import PublishedDraft, read_published
from amusd.models.huggingface import build_model
from amusd.models.kv_cache import KVMemory
from amusd.models.linear import Weights
from amusd.models.load_options import LoadOptions


class EagleDecoder(Decoder):
    """The layers of an EAGLE drafter as a `Network`."""

    def __init__(self, draft: PublishedDraft, options: LoadOptions, max_positions: int) -> None:
        """`max_positions`: see `Decoder`, which takes the weights out of `draft`."""
        weights = draft.weights
        super().__init__(weights, draft.config, options, max_positions)
        self.feature_width = int(draft.config.hidden_size)
        self._norm_before_residual = bool(draft.settings.get("norm_before_residual", False))
        self._norm_output = bool(draft.settings.get("norm_output", False))
        self._feature_norm: Norm | None = None
        self._fc = None
        if "fc.weight" in weights:
            self._fc = options.linear(Weights.pop(weights, "fc"))
        else:
            norm = weights.pop("hidden_norm.weight")
            self._feature_norm = Norm(norm, draft.config.rms_norm_eps, self.device, self._embedding.dtype)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: KVMemory, *, with_logits: bool
    ) -> Tensor | None:
        """See `Decoder`."""
        embedded = F.embedding(token_ids, self._embedding)  # [rows, width]
        rotation = self._rotation[positions]
        features = memory.features(self.feature_width, self.device)
        state = features.index_select(0, memory.parents_of_pass).to(embedded.dtype)  # [rows, width]
        first, *others = self._layers
        if self._fc is not None:
            hidden = self._fc(torch.cat((embedded, state), dim=1))
            inputs = first.normed(hidden)
        else:
            assert self._feature_norm is not None
            normed = self._feature_norm(state)
            inputs = torch.cat((first.normed(embedded), normed), dim=1)
            hidden = normed if self._norm_before_residual else state
        hidden = first(hidden, inputs, rotation, attention, memory, 0)
        for index, layer in enumerate(others, start=1):
            hidden = layer(hidden, layer.normed(hidden), rotation, attention, memory, index)
        normed = self._norm(hidden)
        memory.write_features(normed if self._norm_output else hidden)
        return self._logits(normed) if with_logits else None


def load_eagle(path: str | Path, target_path: str | Path, options: LoadOptions) -> CachedModel:
    """Load an EAGLE drafter for the target in `target_path`, whose embedding it may share.

    Raises as `read_published` and `load_model`.
    """
    draft = read_published(path, target_path, "eagle")
    return build_model(draft.config, options, partial(EagleDecoder, draft, options), draft.output_ids)
