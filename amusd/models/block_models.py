"""Draft models that score several tokens behind a feature at once: Medusa's heads and DFlash's block of masks.

Both read the target's states of the text and none of their own, so they draft once for each of its last tokens, the
root of a tree; behind a guess they know no more than how far it is from the root.

References:
    Cai et al., Medusa, arXiv:2401.10774. Chen et al., DFlash, arXiv:2602.06036.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.errors import ConfigError, UnsupportedModelError
from amusd.models.attention import Attention, AttentionInputs, attend_masked
from amusd.models.compatibility import position_limit
from amusd.models.decoder import Decoder, fit_weights
from amusd.models.draft_layouts import (
    MEDUSA,
    PublishedDraft,
    check_options,
    layer_shapes,
    read_published,
)
from amusd.models.graphs import send
from amusd.models.huggingface import device_errors
from amusd.models.kv_cache import KVMemory
from amusd.models.linear import INT8, InputScales, Linear, MakeLinear, Weights, make_int8, make_linear
from amusd.models.load_options import LoadOptions, loaded_dtype
from amusd.models.split_attention import SplitAttention, stored_dtype


class BlockState(Protocol):
    """The features of one sequence."""

    def clear(self) -> None:
        """Forget them: another sequence begins."""
        ...

    def take(self, start: int, features: Tensor) -> None:
        """Take in features [rows, width], on the host, of the positions from `start` on; again or late will do."""
        ...

    def score(self, position: int, token_id: int) -> Tensor:
        """[depths, columns]: row d scores the token d + 1 places behind the root `token_id`, which is at `position`.

        The feature before the root should be there; fewer rows, or worse ones, without it. None without any feature.
        """
        ...


BlockModel: TypeAlias = "MedusaModel | DFlashModel"
"""The weights of a drafter of this kind."""


class MedusaModel:
    """Heads over the target's last state, each for a token one further on; the first scores the second next token."""

    output_ids = None

    def __init__(self, draft: PublishedDraft, options: LoadOptions) -> None:
        """Raises `ConfigError` if heads are missing or have no usual shape."""
        self.device = torch.device(options.device)
        """The device of its scores."""
        self._dtype = loaded_dtype(options.dtype)
        make: MakeLinear = partial(make_linear, dtype=self._dtype)
        if options.dtype == INT8:
            make = partial(make_int8, scales=InputScales(by_row=True))
        self.max_length = options.max_model_len
        self.feature_width = int(draft.target.hidden_size)
        self.num_ids = self.vocab_size = int(draft.target.vocab_size)
        heads = _medusa_heads(draft)
        self.max_depth = len(heads)
        """Tokens behind the root that it scores."""
        self._blocks = [[self._make(weights, make) for weights in blocks] for blocks, _ in heads]
        first = heads[0][1].matrix
        are_equal = all(torch.equal(weights.matrix, first) for _, weights in heads)  # as before training: one product
        self._outputs = [self._make(weights, make) for _, weights in heads[: 1 if are_equal else None]]

    def new_state(self) -> _MedusaState:
        """The state of a sequence, without features."""
        return _MedusaState(self)

    def score(self, feature: Tensor, first: int) -> Tensor:
        """[heads from `first` on, columns] of a feature [width], on the host."""
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

    def _make(self, weights: Weights, make: MakeLinear) -> Linear:
        return make(weights.each(lambda tensor: tensor.to(self.device, self._dtype, copy=True)))


class _MedusaState:
    """The latest features of a sequence."""

    def __init__(self, model: MedusaModel) -> None:
        self._model = model
        self._latest: dict[int, Tensor] = {}

    def clear(self) -> None:
        """See `BlockState`."""
        self._latest = {}

    def take(self, start: int, features: Tensor) -> None:
        """See `BlockState`."""
        kept = self._model.max_depth + 1
        skipped = max(0, len(features) - kept)
        self._latest |= dict(enumerate(features[skipped:].clone(), start=start + skipped))
        for position in sorted(self._latest)[:-kept]:
            del self._latest[position]

    def score(self, position: int, token_id: int) -> Tensor:  # noqa: ARG002 - the text is in the feature
        """See `BlockState`. An older feature than that before the root leaves the further heads."""
        last = max((known for known in self._latest if known < position), default=None)
        if last is None or (late := position - 1 - last) >= self._model.max_depth:
            return torch.empty(0, self._model.vocab_size)
        return self._model.score(self._latest[last], late)


def _medusa_heads(draft: PublishedDraft) -> list[tuple[list[Weights], Weights]]:
    """The residual blocks and the output layer of each head, counted from the names of the weights."""
    names = [re.match(r"(\d+)\.\d+\.linear\.weight", name) for name in draft.weights]
    depths = Counter(int(found[1]) for found in names if found)
    width, layers = int(draft.target.hidden_size), []
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(1 + max(int(name.split(".")[0]) for name in draft.weights if name[0].isdigit())):
        layers.append(([f"{head}.{block}.linear" for block in range(depths[head])], f"{head}.{depths[head]}"))
        shapes |= {f"{name}.weight": (width, width) for name in layers[-1][0]}
        shapes[f"{layers[-1][1]}.weight"] = (int(draft.target.vocab_size), width)
    fitted = fit_weights(f"drafter {draft.path}", draft.weights, shapes, all_given=True)
    return [([Weights.pop(fitted, name) for name in blocks], Weights.pop(fitted, last)) for blocks, last in layers]


class DFlashModel:
    """Layers whose rows, the root and masks behind it, see all features and each other."""

    def __init__(self, draft: PublishedDraft, options: LoadOptions) -> None:
        """Raises `ConfigError` and `UnsupportedModelError` for a configuration that says too little or too much."""
        config = draft.config
        self.block_size, self._mask_token_id = _block_settings(draft)
        starts_at_root = bool(draft.settings.get("sample_from_anchor", False))
        self._num_skipped = 0 if starts_at_root else 1
        """Rows of the block that score no token that is wanted: that of the root scores itself."""
        self.max_depth = self.block_size - self._num_skipped
        self.max_length = min(options.max_model_len, position_limit(config) or options.max_model_len)
        self.feature_width = int(draft.weights["fc.weight"].shape[0])
        ids = draft.output_ids
        self.output_ids = None if ids is None else ids.to(options.device)
        self.device = torch.device(options.device)
        weights = draft.fill(layer_shapes(draft))
        max_positions = self.max_length + self.block_size
        self._network = Decoder(weights, config, options, max_positions)
        self.vocab_size, self.num_ids = self._network.vocab_size, self._network.num_ids
        if self._mask_token_id >= self.num_ids:
            raise ConfigError(
                f"drafter {draft.path}: mask_token_id={self._mask_token_id} is none of {self.num_ids} ids"
            )

    def new_state(self) -> _DFlashState:
        """The state of a sequence, without features."""
        return _DFlashState(self)

    def new_memory(self) -> KVMemory:
        """Keys and values of a sequence, each position in its own slot, and of a block behind it."""
        num_slots, dtype = self.max_length + self.block_size, self._network.cache_dtype
        return KVMemory(num_slots, stored_dtype(dtype, num_slots) if self._network.device.type == "cpu" else dtype)

    def store(self, start: int, features: Tensor, memory: KVMemory) -> None:
        """Write keys and values of features [rows, width], on the host."""
        with torch.inference_mode():
            positions = self._lay_out(start, len(features), memory)
            self._network.store(send(features, self._network.device), positions, memory)

    def score(self, position: int, token_id: int, seen: Tensor, memory: KVMemory) -> Tensor:
        """See `BlockState`; `seen` [position] bool: the positions whose features are there."""
        rows = self.block_size
        with torch.inference_mode():
            positions = self._lay_out(position, rows, memory)
            visible = torch.cat((seen, torch.ones(rows, dtype=torch.bool))).expand(rows, -1)
            attention: Attention
            if self._network.device.type == "cpu":
                attention = SplitAttention.of_paths(position if bool(seen.all()) else 0, visible, memory.dtype)
            else:
                attention = _VisibleSlots(send(visible, self._network.device))
            tokens = torch.full((rows,), self._mask_token_id)
            tokens[0] = token_id
            tokens = send(tokens, self._network.device)
            logits = self._network(tokens, positions, attention, memory, with_logits=True)
        assert logits is not None
        return logits[self._num_skipped :]

    def _lay_out(self, start: int, rows: int, memory: KVMemory) -> Tensor:
        """The positions of rows, which are their slots."""
        positions = torch.arange(start, start + rows, device=self._network.device)
        memory.slots_of_pass = range(start, start + rows) if positions.device.type == "cpu" else positions
        return positions


class _DFlashState:
    """Keys and values of the features of a sequence."""

    def __init__(self, model: DFlashModel) -> None:
        self._model = model
        self._memory = model.new_memory()
        self._known = torch.zeros(model.max_length, dtype=torch.bool)

    def clear(self) -> None:
        """See `BlockState`."""
        self._known.zero_()

    def take(self, start: int, features: Tensor) -> None:
        """See `BlockState`."""
        self._model.store(start, features, self._memory)
        self._known[start : start + len(features)] = True

    def score(self, position: int, token_id: int) -> Tensor:
        """See `BlockState`. Positions without a feature are not seen."""
        seen = self._known[:position]
        if not bool(seen.any()):
            return torch.empty(0, self._model.vocab_size)
        scores = self._model.score(position, token_id, seen, self._memory)
        self._known[position : position + self._model.block_size] = False  # overwritten
        return scores


class _VisibleSlots:
    """Attention of rows to the first slots of a memory, as a table says."""

    def __init__(self, visible: Tensor) -> None:
        """`visible`: [rows, slots] bool."""
        self._visible = visible

    def attend(self, layer: AttentionInputs) -> Tensor:
        """See `Attention`."""
        end = self._visible.shape[1]
        return attend_masked(layer._replace(keys=layer.keys[:, :end], values=layer.values[:, :end]), self._visible)


def _block_settings(draft: PublishedDraft) -> tuple[int, int]:
    """Rows of a block, and the token of those behind the root. Raises for what the layers would have to do besides."""
    nested = draft.settings.get("dflash_config") or {}
    settings = {**draft.settings, **nested}
    in_speculators_form = "speculators_model_type" in draft.settings
    block_size, mask = settings.get("block_size", 8 if in_speculators_form else 16), settings.get("mask_token_id")
    if not isinstance(mask, int) or not isinstance(block_size, int) or block_size < 2 or mask < 0:
        raise ConfigError(f"drafter {draft.path}: block_size={block_size}, mask_token_id={mask}: both must be numbers")
    usual: Sequence[tuple[str, object]] = (
        ("is_causal", False),
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", 0),
    )
    for name, value in usual:
        if (settings.get(name) or value) != value:
            raise UnsupportedModelError(
                f"drafter {draft.path}: {name}={settings[name]} is not supported; allowed: {value}"
            )
    return block_size, mask


def load_block_model(path: str | Path, target_path: str | Path, options: LoadOptions, kind: str) -> BlockModel:
    """Load the drafter of this kind, `medusa` or `dflash`, in a folder or hub name. Raises as `load_eagle`."""
    draft = read_published(path, target_path, kind)
    check_options(draft, options)
    with device_errors(options.device):
        return MedusaModel(draft, options) if draft.family == MEDUSA else DFlashModel(draft, options)
