"""One forward pass: the sequences in it, their tokens, the places of their rows, and the network that computes it.

A *slot* is where a token's keys and values lie in a cache; a *position* is the token's distance from the start of its
path, and is rotated into its keys. Tokens of a prompt have equal slots and positions. Nodes of different branches may
share a position, never a slot; and a slot stays where it is when its node is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.models.attention import Attention
from amusd.models.features import FeatureTaps
from amusd.models.kv_cache import KVMemory, PreallocatedCache
from amusd.models.language_model import ModelOutput, Sampler, SamplerRows
from amusd.protocol.verification import place_rows

PADDING_ID = 0
"""The token of rows of padding; any id will do, since their logits are not read."""
Slots = npt.NDArray[np.int64]
"""[positions]: the slot of each."""


@dataclass(frozen=True, slots=True)
class PathRows:
    """Slots of the rows of a pass over one cache: each row ends a path behind a prefix that all rows share."""

    prefix: Slots
    """Slots of the tokens before the first ones of the paths, in order."""
    paths: Sequence[Sequence[int]]
    """The slots that lead from the prefix to each row, its own last. The others were computed earlier, or belong to
    other rows of the pass."""

    @property
    def positions(self) -> list[int]:
        """The position of each row."""
        before = len(self.prefix) - 1
        return [before + len(path) for path in self.paths]

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        return [path[-1] for path in self.paths]

    @property
    def parents(self) -> list[int]:
        """The slot of the token before each row; 0 of a row with none before it."""
        before = int(self.prefix[-1]) if len(self.prefix) else 0
        return [path[-2] if len(path) > 1 else before for path in self.paths]

    @property
    def num_keys(self) -> int:
        """Slots from the first to the last that is read."""
        return max(int(self.prefix.max(initial=-1)), *(max(path) for path in self.paths)) + 1

    @property
    def num_shared(self) -> int:
        """Slots from the first on that hold the prefix in its order: every row sees them."""
        in_order = self.prefix == np.arange(len(self.prefix))
        return len(self.prefix) if in_order.all() else int(in_order.argmin())

    def visible(self, num_keys: int, num_rows: int) -> npt.NDArray[np.bool_]:
        """[num_rows, num_keys]: the slots that each row sees, its own among them; padding sees what the first one does.

        `num_rows`: with padding.
        """
        seen = np.zeros((num_rows, num_keys), dtype=np.bool_)
        seen[0, self.prefix] = True
        seen[1:] = seen[0]
        padding = [self.paths[0]] * (num_rows - len(self.paths))
        for row, path in zip(seen, [*self.paths, *padding], strict=True):
            row[list(path)] = True
        return seen


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence in a pass."""

    cache: PreallocatedCache
    token_ids: Sequence[int] = ()
    """One per row."""
    rows: PathRows | None = None
    """The places of the rows. None: in order from the cache's length on, which moves by them."""
    wanted: SamplerRows | None = None
    """What is to be sampled at the end of a captured pass; None: the most likely tokens."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass over caches of one memory, as a model computes it and as its ranks are told of it."""

    parts: Sequence[Part]
    """Each has a cache of its own. If they have no rows, nothing is computed, but passes of up to these `steps` and
    this sampler are captured."""
    with_logits: bool = True
    """False for a chunk of a prompt, which is one part."""
    steps: int = 1
    """Tokens that the pass chooses one after another, the first behind its last row. 1 unless passes are captured."""

    @property
    def sampler(self) -> Sampler | None:
        """The one that does what every part wants."""
        wanted = [part.wanted.sampler for part in self.parts if part.wanted is not None]
        return max(wanted, key=lambda sampler: sampler.level, default=None)


PartOutput: TypeAlias = Sequence[ModelOutput]
"""The result of a pass for one sequence: the output of its rows, then that of each further step, which has one row.

Where passes are captured, logits are valid until the next pass.
"""


class Network(Protocol):
    """The weights of a causal language model and one forward pass through them: `Decoder` or `HuggingFaceNetwork`.

    It is a function of tensors alone and never reads a value on the host. So a pass whose tensors live at fixed
    addresses can be captured once and replayed.
    """

    implementation: str
    """The author of the forward pass: `amusd` or `transformers`."""
    device: torch.device
    """The device of the weights."""
    cache_dtype: torch.dtype
    """The dtype of keys and values."""
    num_ids: int
    """Token ids that it takes in: `[0, num_ids)`."""
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


def lay_out_paths(parents: Sequence[int], *, start: int, num_tracks: int, stride: int) -> PathRows:
    """Rows of paths that share the first one, which stands at `start` behind a prefix in the slots [0, start).

    `parents` [rows - 1]: the row before each but the first. A row's slot is that of its position, plus `stride` times
    its track (`tracks.py`), of which there are `num_tracks`. Raises `ValueError` where the tracks do not suffice, and
    for a row that comes before its parent.
    """
    places = place_rows(parents, num_tracks)
    return PathRows(np.arange(start), _paths(parents, [start + depth + track * stride for depth, track in places]))


def lay_out_rows(parents: Sequence[int], slots: Slots, start: int, num_tracks: int) -> PathRows:
    """Like `lay_out_paths` where sums do not depend on slots: row `i` has the slot of position `start + i`.

    `slots`: of each position of the cache.
    """
    place_rows(parents, num_tracks)  # refuses what does not fit
    own = slots[start : start + len(parents) + 1].tolist()
    return PathRows(slots[:start], _paths(parents, own))


def _paths(parents: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
    paths = [[slots[0]]]
    for row, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], slots[row]])
    return paths
