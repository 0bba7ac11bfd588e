"""The digest of a row of logits on a device, for the host: a few columns that decide, and bounds on all others.

`Digest.compute` is work for a captured pass: tensors of fixed shape at fixed addresses, and nothing is asked of the
device. What changes from pass to pass arrives as one tensor of inputs, and one tensor of outputs leaves. On the host
`Digest.inputs` writes the one, and `Digest.read` understands the other.

    score         logit + scale * noise (`noise.py`); with scale 0 the logit itself
    winner        the column of the largest score, the first of equal ones: what the next step of a replay takes in
    best          the columns of the largest scores
    likely        the columns of the largest logits (where filters have to be applied)
    asked         columns that the host names beforehand
    rest          the weights exp(logit / temperature - largest) of all columns but the likely ones, summed
    rest_from     the same of those among them whose logit is at least the winner's
    rest_above    the same of those among them whose logit is larger than the winner's

Which of equal columns are the last of the best or likely ones is not defined: nothing may depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.logits import Columns, Row
from amusd.sampling.noise import Counters, codes_of_columns, halves_of
from amusd.sampling.noisy_scores import noisy_scores

NUM_BEST, NUM_BEST_OF_MANY = 8, 16
NUM_LIKELY = 896
NUM_ASKED, NUM_ASKED_OF_MANY = 8, 64
"""With these, a row of `Digests.many` has 8,152 bytes: 8 rows stay below 64 KiB."""

Words = npt.NDArray[np.int32]
"""[rows, num_outputs]: the outputs of a `Digest` on the host."""

_NUM_SCALARS = 4  # inputs of a row before the columns that are asked for


_NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class RowDigest:
    """The known part of one row."""

    winner: int
    """The column of the largest score."""
    winner_logit: np.float32
    log_probability: float
    """The winner's, under the softmax of the logits."""
    log_share: float
    """Logarithm of the winner's share under the softmax of the scores; only without likely columns."""
    rests: tuple[float, ...]
    """`rest`, `rest_from` and `rest_above`; only with likely columns."""
    best: Columns
    best_logits: Row
    best_scores: Row
    """[num_best], in no order."""
    likely: Columns
    likely_logits: Row
    """[num_likely], the largest logits first."""
    asked: Columns
    asked_logits: Row
    asked_scores: Row
    """[as many as were asked for], in their order."""

    def cut(self, num_likely: int, temperature: float) -> RowDigest:
        """The digest with fewer likely columns that the device would have made at that temperature."""
        divisor = np.float32(temperature)
        left, winner = self.likely_logits[num_likely:] / divisor, self.winner_logit / divisor
        weights = np.exp(left - self.likely_logits[0] / divisor)
        masks = (np.True_, left >= winner, left > winner)
        added = [float(weights.sum(where=mask)) for mask in masks]
        return replace(
            self,
            likely=self.likely[:num_likely],
            likely_logits=self.likely_logits[:num_likely],
            rests=tuple(rest + more for rest, more in zip(self.rests, added, strict=True)),
        )

    def logit_of(self, column: int) -> float:
        """The logit of a known column."""
        columns = np.concatenate((self.best, self.likely, self.asked))
        logits = np.concatenate((self.best_logits, self.likely_logits, self.asked_logits))
        return float(logits[np.flatnonzero(columns == column)[0]])


class Digest:
    """Makes digests of one size from the logits of one model. Two that make the same are equal, and share passes."""

    def __init__(
        self, codes: Counters, device: torch.device | str, *, num_best: int, num_likely: int, num_asked: int
    ) -> None:
        """`codes` [columns]: of the tokens that the columns score (`noise.codes_of`)."""
        self.num_columns = len(codes)
        self.num_best = min(num_best, self.num_columns)
        self.num_likely = min(num_likely, self.num_columns)
        self.num_asked = num_asked
        self.num_inputs = _NUM_SCALARS + num_asked
        """int64 words of a row."""
        num_known, num_statistics = self.num_best + num_asked, 5 if self.num_likely else 3
        self.num_outputs = 1 + num_statistics + 3 * num_known + 2 * self.num_likely
        """int32 words of a row."""
        after_likely = num_statistics + self.num_likely
        self._float_borders = (num_statistics, after_likely, after_likely + num_known)
        self._codes = torch.from_numpy(codes.view(np.int32).copy()).to(device)
        fingerprint = hashlib.blake2b(codes.tobytes()).digest()
        self._key = (fingerprint, str(device), self.num_best, self.num_likely, num_asked)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    # On the device

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns] and int64 [rows, num_inputs] -> the winners [rows] int64, int32 [rows, num_outputs]."""
        keys = inputs[:, :2].int()
        scale, temperature = inputs[:, 2:_NUM_SCALARS].view(torch.float64).float().unbind(1)
        asked = inputs[:, _NUM_SCALARS:]
        logits = logits.float()
        scores = noisy_scores(logits, self._codes, keys, scale)
        winner_scores, winners = scores.max(1, keepdim=True)  # the first of equal ones, as its documentation promises
        best = scores.topk(self.num_best, 1, sorted=False).indices
        winner_logits = logits.gather(1, winners)
        columns = [winners, best, asked]
        floats = [winner_logits, winner_logits - logits.logsumexp(1, keepdim=True)]
        if self.num_likely:
            likely = logits.topk(self.num_likely, 1)
            columns.append(likely.indices)
            floats += [*self._rests(logits, winner_logits, likely, temperature.unsqueeze(1)), likely.values]
        else:
            floats.append(winner_scores - scores.logsumexp(1, keepdim=True))
        known = torch.cat((best, asked.clamp(min=0)), 1)
        floats += [logits.gather(1, known), scores.gather(1, known)]
        bits = torch.cat(floats, 1).view(torch.int32)
        return winners.squeeze(1), torch.cat([torch.cat(columns, 1).int(), bits], 1)

    @staticmethod
    def _rests(logits: Tensor, winners: Tensor, likely: torch.return_types.topk, divisor: Tensor) -> list[Tensor]:
        """[rows, 1] each: `rest`, `rest_from` and `rest_above`. `winners` [rows, 1]: their logits."""
        shaped, winners = logits / divisor, winners / divisor  # to the bit what the host computes
        weights = (shaped - likely.values[:, :1] / divisor).exp_().scatter_(1, likely.indices, 0.0)
        rest = weights.sum(1, keepdim=True)
        rest_from = weights.mul_(shaped >= winners).sum(1, keepdim=True)
        return [rest, rest_from, weights.mul_(shaped > winners).sum(1, keepdim=True)]

    # On the host

    def inputs(
        self,
        keys: Sequence[int],
        *,
        scale: float = 0.0,
        temperature: float = 1.0,
        asked: Sequence[Sequence[int]] = (),
    ) -> npt.NDArray[np.int64]:
        """[rows, num_inputs]. `keys`: of the noise of each row; `asked`: up to `num_asked` columns of each."""
        words = np.full((len(keys), self.num_inputs), _NOT_ASKED, dtype=np.int64)
        words[:, :2] = np.array([halves_of(key) for key in keys], dtype=np.uint32).reshape(-1, 2).view(np.int32)
        words[:, 2:_NUM_SCALARS].view(np.float64)[:] = scale, temperature
        for row, columns in zip(words, asked, strict=False):
            row[_NUM_SCALARS:][: len(columns)] = columns
        return words

    def outputs(self, logits: Tensor, inputs: npt.NDArray[np.int64]) -> Words:
        """Compute the outputs of rows whose pass has not computed them: two copies between host and device."""
        with torch.inference_mode():
            found: Words = self.compute(logits, torch.from_numpy(inputs).to(logits.device))[1].cpu().numpy()
        return found

    def read(self, outputs: Words) -> RowDigest:
        """`outputs` [num_outputs]: of one row."""
        num_columns = 1 + self.num_best + self.num_asked + self.num_likely
        columns, floats = outputs[:num_columns].astype(np.intp), outputs[num_columns:].view(np.float32)
        asked, likely = columns[1 + self.num_best :][: self.num_asked], columns[num_columns - self.num_likely :]
        num_asked = int((asked != _NOT_ASKED).sum())
        statistics, likely_logits, logits, scores = np.split(floats, self._float_borders)
        num_best = self.num_best
        return RowDigest(
            winner=int(columns[0]),
            winner_logit=statistics[0],
            log_probability=float(statistics[1]),
            log_share=0.0 if self.num_likely else float(statistics[2]),
            rests=tuple(statistics[2:].tolist()) if self.num_likely else (0.0, 0.0, 0.0),
            best=columns[1 : 1 + num_best],
            best_logits=logits[:num_best],
            best_scores=scores[:num_best],
            likely=likely,
            likely_logits=likely_logits,
            asked=asked[:num_asked],
            asked_logits=logits[num_best:][:num_asked],
            asked_scores=scores[num_best:][:num_asked],
        )


class CapturedModel(Protocol):
    """What `Digests.of` looks at of a model; see `LanguageModel`."""

    captured_on: torch.device | None
    """The device that its passes are captured on; None: they are not."""
    vocab_size: int
    """Columns of its logits."""
    output_ids: Tensor | None
    """Which token each column scores."""


class Digests:
    """The two sizes of digests of one model's logits on one device."""

    def __init__(
        self, vocab_size: int, output_ids: Tensor | None, device: torch.device, *, num_best: int = NUM_BEST
    ) -> None:
        """`vocab_size`, `output_ids`: see `LanguageModel`; `num_best`: guesses that a tree wants of a row at least."""
        self._codes = codes_of_columns(vocab_size, None if output_ids is None else output_ids.cpu().numpy())
        self._device = device
        self._num_best = max(num_best, NUM_BEST)

    @classmethod
    def of(cls, model: CapturedModel) -> Digests | None:
        """The digests of a model whose passes are captured; None for another one, whose logits are on the host."""
        device = model.captured_on
        return None if device is None else cls(model.vocab_size, model.output_ids, device)

    @cached_property
    def few(self) -> Digest:
        """Decides where nothing but a temperature shapes the distribution."""
        return Digest(self._codes, self._device, num_best=self._num_best, num_likely=0, num_asked=NUM_ASKED)

    @cached_property
    def many(self) -> Digest:
        """Decides where there are filters or penalties."""
        num_best = max(self._num_best, NUM_BEST_OF_MANY)
        return Digest(self._codes, self._device, num_best=num_best, num_likely=NUM_LIKELY, num_asked=NUM_ASKED_OF_MANY)
