"""The target's hidden states over a text, as `label_features.py` writes them and `train_drafter.py` reads them.

A shard holds the states of `SHARD_ROWS` rows in the order of `row_order`, uint16 [tokens, layers, hidden], the bits of
bfloat16. The layers are the three that EAGLE-3 fuses (the residual stream before the layer of that number) and the last
state after the final norm, which EAGLE-1 and Medusa read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from dataset import Text
from torch import Tensor

SHARD_ROWS = 128
HELD_OUT_ROWS = 64
"""The first rows of the first shard: no training learns from them."""


def layer_ids(num_layers: int) -> list[int]:
    """Indices into `hidden_states` of transformers: 0 is the embedding, the last one is past the final norm."""
    return [2, num_layers // 2, num_layers - 3, num_layers]


def row_order(text: Text) -> np.ndarray:
    """int64 [rows]: the order in which rows are labelled."""
    return np.random.default_rng(0).permutation(text.num_rows)


def shard_path(folder: Path, number: int) -> Path:
    """Path of a shard."""
    return folder / f"{number:04d}.npy"


class Features:
    """Hidden states of the rows that have been labelled so far."""

    def __init__(self, folder: Path, text: Text) -> None:
        self._folder, self._text = folder, text
        self._order = row_order(text)
        self._shards: list[np.ndarray] = []
        self._place: dict[int, tuple[int, int]] = {}
        """Shard and first token of each row."""
        self.refresh()

    def refresh(self) -> None:
        """Take the shards that were written since. Raises `FileNotFoundError` where there is none at all."""
        while (path := shard_path(self._folder, len(self._shards))).exists():
            number, start = len(self._shards), 0
            self._shards.append(np.load(path, mmap_mode="r"))
            for row in self._order[number * SHARD_ROWS : (number + 1) * SHARD_ROWS]:
                self._place[int(row)] = number, start
                start += int(self._text.length[row])
        if not self._shards:
            raise FileNotFoundError(f"{self._folder} holds no features: run label_features.py first")

    @property
    def held_out(self) -> np.ndarray:
        """Rows to measure on."""
        return self._order[: min(HELD_OUT_ROWS, len(self._place) // 2)]

    @property
    def learned_from(self) -> np.ndarray:
        """The other rows."""
        return self._order[len(self.held_out) : len(self._place)]

    def read(self, rows: np.ndarray) -> Tensor:
        """bfloat16 [rows, width, layers, hidden]; zeros behind the end of a shorter row."""
        width = int(self._text.length[rows].max())
        _, num_layers, hidden_size = self._shards[0].shape
        states = np.zeros((len(rows), width, num_layers, hidden_size), dtype=np.uint16)
        for index, row in enumerate(rows):
            (number, start), length = self._place[int(row)], int(self._text.length[row])
            states[index, :length] = self._shards[number][start : start + length]
        return torch.from_numpy(states).view(torch.bfloat16)

    def sizes(self) -> Tensor:
        """float32 [layers]: root mean square of each layer's states, the median over some tokens."""
        states = torch.from_numpy(self._shards[0][:2048].copy()).view(torch.bfloat16).float()
        return states.square().mean(dim=-1).sqrt().median(dim=0).values
