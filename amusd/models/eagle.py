"""EAGLE: one decoder layer after the target's states, which drafts on its own states beyond them.

Row t reads token t and the feature of token t - 1: the target's if the memory has it, else what row t - 1 wrote.

References: Li et al., EAGLE, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858; EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Attention
from amusd.models.building import prepared
from amusd.models.cached_model import CachedModel
from amusd.models.checkpoint import one_line_errors
from amusd.models.decoder import Decoder, Norm
from amusd.models.decoder_weights import load_decoder, load_linear, load_norm
from amusd.models.draft_layouts import read_published
from amusd.models.kv_cache import KVMemory
from amusd.models.linear import Linear, Weights
from amusd.models.load_options import LoadOptions


@dataclass(kw_only=True, eq=False, repr=False)
class EagleDecoder(Decoder):
    """The layers of an EAGLE drafter as a `Network`."""

    fc: Linear | None
    """EAGLE-1, -2: reduces embedding and feature to one width; None: the first layer takes in both."""
    feature_norm: Norm
    norm_before_residual: bool
    """EAGLE-3: the first layer adds to the normed feature."""
    norm_output: bool
    """The next row reads the normed state."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: KVMemory, *, with_logits: bool
    ) -> Tensor:
        """See `Network`."""
        embedded = F.embedding(token_ids, self.embedding)  # [rows, width]
        rotation = self.rotation[positions]
        features = memory.features(self.feature_width, self.device)
        state = features.index_select(0, memory.parents_of_pass).to(embedded.dtype)  # [rows, width]
        if self.fc is not None:
            hidden = self.fc(torch.cat((embedded, state), dim=1))
            normed = self.norms[0](hidden)
        else:
            feature = self.feature_norm(state)
            normed = torch.cat((self.norms[0](embedded), feature), dim=1)
            hidden = feature if self.norm_before_residual else state
        for layer in self.layers:
            hidden, normed = layer(hidden, normed, rotation, attention, memory, self.norms[layer.index + 1])
        memory.write_features(normed if self.norm_output else hidden)
        return self.logits_of(normed) if with_logits else normed[:0]


def load_eagle(path: str | Path, target_path: str | Path, options: LoadOptions) -> CachedModel:
    """Load an EAGLE drafter for the target in `target_path`, whose embedding it may share.

    Raises as `read_published` and `load_model`.
    """
    draft = read_published(path, target_path, "eagle")
    config, weights = draft.config, draft.weights
    with one_line_errors(path), prepared(config, options) as max_length:
        decoder = load_decoder(weights, config, options, max_length)
        decoder.feature_width = int(config.hidden_size)
        network = EagleDecoder(
            **vars(decoder),
            fc=load_linear(Weights.pop(weights, "fc"), options) if "fc.weight" in weights else None,
            feature_norm=load_norm(weights.pop("hidden_norm.weight", None), config.rms_norm_eps, options),
            norm_before_residual=bool(draft.settings.get("norm_before_residual", False)),
            norm_output=bool(draft.settings.get("norm_output", False)),
        )
        return CachedModel(network, options, max_length, draft.output_ids)
