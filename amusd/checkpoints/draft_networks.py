"""Networks of published drafters that work on their target's hidden states: EAGLE, Medusa and DFlash.

EAGLE is one decoder layer that drafts on its own states beyond the target's. Row t reads token t and the feature of
token t - 1: the target's if the memory has it, else what row t - 1 wrote.

Medusa's heads and DFlash's block of masks score several tokens after a feature at once.

References:
    Li et al., EAGLE, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858; EAGLE-3, arXiv:2503.01840. Cai et al., Medusa,
    arXiv:2401.10774. Chen et al., DFlash, arXiv:2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.checkpoints.building import prepared
from amusd.checkpoints.checkpoint import one_line_errors
from amusd.checkpoints.decoder_weights import load_decoder, load_linear, load_norm
from amusd.checkpoints.draft_layouts import DFLASH, MEDUSA, PublishedDraft, medusa_heads, read_published
from amusd.models.attention import Attention, AttentionInputs, attend_masked
from amusd.models.decoder import Decoder, Norm
from amusd.models.kv_cache import KVMemory, PassMemory
from amusd.models.linear import Linear, Weights
from amusd.runner.load_options import LoadOptions, loaded_dtype
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.sampler import send

BlockModel: TypeAlias = "MedusaModel | DFlashModel"


@dataclass(kw_only=True, eq=False, repr=False)
class EagleDecoder(Decoder):
    """The layers of an EAGLE drafter as a `Network`."""

    fc: Linear | None
    """EAGLE-1, -2: reduces embedding and feature to one width; None: the first layer takes in both."""
    feature_norm: Norm
    norm_before_residual: bool
    """EAGLE-3: the residual is the normed feature, else the feature."""
    norm_output: bool
    """True: the next row reads the normed state."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, memory: PassMemory, *, with_logits: bool
    ) -> Tensor:
        """See `Network`."""
        embedded = F.embedding(token_ids, self.embedding)  # [rows, width]
        assert memory.parents is not None
        features = memory.shared.features(self.feature_width, self.device)
        state = features.index_select(0, memory.parents).to(embedded.dtype)  # [rows, width]
        if self.fc is not None:
            hidden = self.fc(torch.cat((embedded, state), dim=1))
            normed = self.norms[0](hidden)
        else:
            feature = self.feature_norm(state)
            normed = torch.cat((self.norms[0](embedded), feature), dim=1)
            hidden = feature if self.norm_before_residual else state
        hidden, normed = self._run_layers(hidden, normed, positions, attention, memory)
        memory.write_features(normed if self.norm_output else hidden)
        return self.logits_of(normed) if with_logits else normed[:0]


class MedusaModel:
    """Heads over the target's last state; the first head scores the token after the next."""

    output_ids = None

    def __init__(
        self, target: Any, blocks: Sequence[Sequence[Linear]], outputs: Sequence[Linear], options: LoadOptions
    ) -> None:
        """`target`: a configuration; `blocks`: residual layers of each head; `outputs`: one per head, or for all."""
        self.device = torch.device(options.device)
        self.max_length, self.max_depth = options.max_model_len, len(blocks)
        self.feature_width = int(target.hidden_size)
        self.num_ids = self.vocab_size = int(target.vocab_size)
        self._blocks, self._outputs, self._dtype = blocks, outputs, loaded_dtype(options.dtype)

    def new_state(self) -> MedusaState:
        """A sequence's state, without features."""
        return MedusaState(self)

    def score(self, feature: Tensor, first: int) -> Tensor:
        """Scores [heads from `first` on, columns] on the device, for a feature [width] on the host."""
        with torch.inference_mode():
            state = send(feature.unsqueeze(0), self.device).to(self._dtype)
            rows = []
            for blocks in self._blocks[first:]:
                row = state
                for block in blocks:
                    row = row + F.silu(block(row))
                rows.append(row)
            if len(self._outputs) == 1:
                return self._outputs[0](torch.cat(rows))
            outputs = zip(self._outputs[first:], rows, strict=True)
            return torch.cat([output(row) for output, row in outputs])


class MedusaState:
    """The latest feature of a sequence."""

    def __init__(self, model: MedusaModel) -> None:
        self._model = model
        self._last, self._feature = -1, torch.empty(0)

    def truncate(self, length: int) -> None:
        """Keep the features of the first `length` positions, which the next sequence shares."""
        if self._last >= length:
            self._last, self._feature = -1, torch.empty(0)

    def take(self, start: int, features: Tensor) -> None:
        """Take in features [rows, width], on the host, of positions from `start` on, perhaps late or again."""
        last = start + len(features) - 1
        if last > self._last:
            self._last, self._feature = last, features[-1].clone()

    def score(self, position: int, token_id: int) -> Tensor:  # noqa: ARG002 - the text is in the feature
        """[depths, columns]: row d scores the token d + 1 places after the root, which is at `position`.

        With an old feature only later heads score; without a feature, none.
        """
        late = position - 1 - self._last
        if not len(self._feature) or not 0 <= late < self._model.max_depth:
            return torch.empty(0, self._model.vocab_size)
        return self._model.score(self._feature, late)


class DFlashModel:
    """Layers over a block of rows: the root, then masks. All rows see all features and each other."""

    def __init__(self, draft: PublishedDraft, network: Decoder, max_length: int) -> None:
        """`network`: of `draft`, for positions up to a block beyond `max_length`."""
        self.block_size, self.mask_token_id = (int(draft.settings[name]) for name in ("block_size", "mask_token_id"))
        self.num_skipped = 0 if draft.settings.get("sample_from_anchor") else 1
        """First rows of the block whose scores are unused: the root's or none."""
        self.max_depth = self.block_size - self.num_skipped
        self.max_length, self.num_slots = max_length, max_length + self.block_size
        self.feature_width = int(draft.config.hidden_size)
        self.network, self.device = network, network.device
        self.output_ids = None if draft.output_ids is None else draft.output_ids.to(self.device)
        self.vocab_size, self.num_ids = network.vocab_size, network.num_ids

    def new_state(self) -> DFlashState:
        """A sequence's state, without features."""
        return DFlashState(self)


class DFlashState:
    """Keys and values of a sequence's features, one slot per position, and of a block after them."""

    def __init__(self, model: DFlashModel) -> None:
        self._model = model
        self._memory = KVMemory(model.num_slots, model.network.cache_dtype)
        self._known = torch.zeros(model.max_length, dtype=torch.bool)

    def truncate(self, length: int) -> None:
        """See `MedusaState`."""
        self._known[length:] = False

    def take(self, start: int, features: Tensor) -> None:
        """See `MedusaState`."""
        network = self._model.network
        with torch.inference_mode():
            network.store(send(features, network.device), *self._lay_out(start, len(features)))
        self._known[start : start + len(features)] = True

    def score(self, position: int, token_id: int) -> Tensor:
        """See `MedusaState`; positions without a feature are not seen."""
        seen, model = self._known[:position], self._model
        if not bool(seen.any()):
            return torch.empty(0, model.vocab_size)
        rows = model.block_size
        visible = send(torch.cat((seen, torch.ones(rows, dtype=torch.bool))).expand(rows, -1), model.device)
        tokens = torch.full((rows,), model.mask_token_id)
        tokens[0] = token_id
        with torch.inference_mode():
            positions, memory = self._lay_out(position, rows)
            slots = torch.arange(position + rows, device=model.device)

            def attend_block(layer: AttentionInputs) -> Tensor:
                if layer.window is None:
                    return attend_masked(layer, visible)
                return attend_masked(layer, visible & (slots >= layer.window.first(positions).unsqueeze(1)))

            logits = model.network(send(tokens, model.device), positions, attend_block, memory, with_logits=True)
        self._known[position : position + rows] = False  # overwritten
        return logits[model.num_skipped :]

    def _lay_out(self, start: int, rows: int) -> tuple[Tensor, PassMemory]:
        positions = torch.arange(start, start + rows, device=self._model.device)
        slots = range(start, start + rows) if positions.device.type == "cpu" else positions
        return positions, PassMemory(self._memory, slots)


def load_published(
    path: str | Path, target_path: str | Path, options: LoadOptions, kind: str
) -> ModelRunner | BlockModel:
    """Load an `eagle`, `medusa` or `dflash` drafter from a folder or hub name, for the target in `target_path`.

    Raises as `read_published` and `load_model`.
    """
    draft = read_published(path, target_path, kind)
    config, weights, settings = draft.config, draft.weights, draft.settings
    with one_line_errors(path), prepared(config, options) as max_length:
        if kind == MEDUSA:
            return _load_medusa(draft, options)
        if kind == DFLASH:
            network = load_decoder(weights, config, options, max_length + int(settings["block_size"]))
            return DFlashModel(draft, network, max_length)
        decoder = load_decoder(weights, config, options, max_length)
        decoder.feature_width = int(config.hidden_size)
        eagle = EagleDecoder(
            **vars(decoder),
            fc=load_linear(Weights.pop(weights, "fc"), options) if "fc.weight" in weights else None,
            feature_norm=load_norm(weights.pop("hidden_norm.weight", None), config.rms_norm_eps, options),
            norm_before_residual=settings.get("norm_before_residual", False),
            norm_output=settings.get("norm_output", False),
        )
        return ModelRunner(eagle, options, max_length, draft.output_ids)


def _load_medusa(draft: PublishedDraft, options: LoadOptions) -> MedusaModel:
    weights, heads = dict(draft.weights), medusa_heads(draft.weights)
    stored = [weights[f"{names[-1]}.weight"] for names in heads]
    are_equal = all(torch.equal(tensor, stored[0]) for tensor in stored)  # as in untrained heads
    blocks = [[load_linear(Weights.pop(weights, name), options) for name in names[:-1]] for names in heads]
    different = heads[:1] if are_equal else heads
    outputs = [load_linear(Weights.pop(weights, names[-1]), options) for names in different]
    return MedusaModel(draft.target, blocks, outputs, options)
