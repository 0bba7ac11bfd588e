"""Texts that the target wrote, and corpora: texts with the target's states.

A text file (`.npz`) holds `token_ids` uint16 [rows, width]; `length` int32 [rows]; `prefix_length`, tokens of the chat
prefix of every row; `answer`, the packed bits of a bool [rows, width], 1 for tokens of an answer; `temperature` float16
[rows].

A corpus is a folder of `text.npz` and `states.npy`, uint16 [tokens, hidden]: bits of the target's last hidden state in
bfloat16 after its final norm, for all rows' tokens in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from amusd.drafters.ngram import MAX_CONTINUATIONS, WEIGHTS, NgramCache

TEXT, STATES = "text.npz", "states.npy"
_PARTIAL = ".partial"
_WEIGHTS = torch.tensor([(-torch.inf, 1.0), *WEIGHTS])


@dataclass(frozen=True, slots=True)
class Known:
    """Continuations that the n-gram cache knows behind each token of some rows, the rows concatenated."""

    token_ids: np.ndarray
    """int64 [tokens, MAX_CONTINUATIONS]; 0 where there is none."""
    agreeing: np.ndarray
    """int64 of the same shape: how many tokens agree, at most as many as `WEIGHTS` has; 0 where there is none."""

    def at(self, places: np.ndarray | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, biases and slopes behind some of the tokens: a `Mixture` of `amusd/sampling/ranking.py` for each.

        Where there is no token the bias is minus infinity.
        """
        biases, slopes = _WEIGHTS[torch.from_numpy(self.agreeing[places])].unbind(dim=-1)
        return torch.from_numpy(self.token_ids[places]), biases, slopes


@dataclass(frozen=True, slots=True)
class Text:
    """The content of a text file."""

    token_ids: np.ndarray
    """int64 [rows, width]."""
    length: np.ndarray
    """int64 [rows]."""
    answer: np.ndarray
    """bool [rows, width]."""
    temperature: np.ndarray
    """float32 [rows]."""
    prefix_length: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.length.sum())

    def select(self, rows: np.ndarray) -> Text:
        """The given rows."""
        return Text(
            self.token_ids[rows], self.length[rows], self.answer[rows], self.temperature[rows], self.prefix_length
        )


def read_text(path: Path) -> Text:
    """Read a text file. Raises `OSError` or `KeyError` if it is none."""
    with np.load(path) as file:
        token_ids = file["token_ids"].astype(np.int64)
        width = token_ids.shape[1]
        return Text(
            token_ids,
            file["length"].astype(np.int64),
            np.unpackbits(file["answer"], axis=1)[:, :width].astype(bool),
            file["temperature"].astype(np.float32),
            int(file["prefix_length"]),
        )


def corpora_in(folder: Path) -> list[Path]:
    """The folder itself if it is a corpus, else the corpora in it, by name. Raises `FileNotFoundError` without one."""
    found = [folder] if (folder / TEXT).exists() else sorted(path.parent for path in folder.glob(f"*/{TEXT}"))
    found = [path for path in found if path.suffix != _PARTIAL]
    if not found:
        raise FileNotFoundError(f"{folder}: no {TEXT} in it, and in no folder of it")
    return found


def join(texts: Sequence[Text]) -> Text:
    """The rows of several texts, concatenated."""
    width = max(text.token_ids.shape[1] for text in texts)
    return Text(
        np.concatenate([np.pad(text.token_ids, ((0, 0), (0, width - text.token_ids.shape[1]))) for text in texts]),
        np.concatenate([text.length for text in texts]),
        np.concatenate([np.pad(text.answer, ((0, 0), (0, width - text.answer.shape[1]))) for text in texts]),
        np.concatenate([text.temperature for text in texts]),
        texts[0].prefix_length,
    )


def write_text(path: Path, text: Text) -> None:
    """Write a text file, whole or not at all."""
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        token_ids=text.token_ids.astype(np.uint16),
        length=text.length.astype(np.int32),
        answer=np.packbits(text.answer, axis=1),
        temperature=text.temperature.astype(np.float16),
        prefix_length=np.int32(text.prefix_length),
    )
    partial.rename(path)


def offsets(text: Text) -> np.ndarray:
    """int64 [rows + 1]: offset of each row's tokens among those of all rows."""
    return np.concatenate(([0], np.cumsum(text.length)))


def to_bits(states: Tensor) -> np.ndarray:
    """uint16 of the same shape: states as a corpus holds them."""
    bits: np.ndarray = states.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
    return bits


def write_corpus(folder: Path, text: Text, states: np.ndarray) -> None:
    """Write a corpus, whole or not at all."""
    partial = folder.with_suffix(_PARTIAL)
    partial.mkdir(parents=True, exist_ok=True)
    write_text(partial / TEXT, text)
    np.save(partial / STATES, states)
    partial.rename(folder)


def read_corpora(folder: Path) -> tuple[list[Text], list[Tensor]]:
    """Read the texts of `corpora_in` a folder and each row's states, bfloat16 [tokens, hidden], in mapped files."""
    texts: list[Text] = []
    rows: list[Tensor] = []
    for corpus in corpora_in(folder):
        texts.append(read_text(corpus / TEXT))
        states = torch.from_numpy(np.load(corpus / STATES, mmap_mode="r+")).view(torch.bfloat16)
        rows += states.split(texts[-1].length.tolist())
    return texts, rows


def known_tokens(text: Text) -> Known:
    """The continuations behind every token of every row."""
    return known_after([row[:length].tolist() for row, length in zip(text.token_ids, text.length, strict=True)])


def known_after(rows: Sequence[Sequence[int]]) -> Known:
    """The continuations behind every one of these tokens."""
    token_ids, agreeing = np.zeros((2, sum(map(len, rows)), MAX_CONTINUATIONS), dtype=np.int64)
    ngrams, place = NgramCache(), 0
    for row in rows:
        ngrams.open(text := list[int]())
        for token_id in row:
            text.append(token_id)
            for index, (guess, number) in enumerate(ngrams.continuations()):
                token_ids[place, index], agreeing[place, index] = guess, min(number, len(WEIGHTS))
            place += 1
    return Known(token_ids, agreeing)


def batches_by_length(text: Text, tokens_per_batch: int) -> Iterator[np.ndarray]:
    """Row numbers of batches: rows of similar length, at most `tokens_per_batch` tokens with padding."""
    order = np.argsort(text.length, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and text.length[order[stop]] * (stop + 1 - start) <= tokens_per_batch:
            stop += 1
        yield order[start:stop]
        start = stop
