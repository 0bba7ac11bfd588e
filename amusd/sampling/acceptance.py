"""The acceptance rules: which candidates of a block are kept, and which token replaces the first rejected one.

Equality (greedy decoding and matching): a candidate is accepted when it is the target's own choice.

Ratio test: a candidate is kept with probability min(1, p / q), else a token is drawn from the excess of p over q. p is
the target's distribution, q the one that the candidate was drawn from. The token is then distributed as p, under four
conditions (docs/sampling.md). q travels with its candidate, as the n tokens that could be drawn:

    n int32   token ids, ascending
    n float32 their probabilities, which sum to 1

Draws and verdicts are not captured in graphs, since distributions of candidates are known only after the pass.

References: Leviathan, Kalman, Matias 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.noise import Domain, key_of, noise_of, noisy_argmax, uniform
from amusd.sampling.sampler import SequenceSampler
from amusd.sampling.sampler_inputs import PackedInputs, SamplerInputs

_ID, _PROBABILITY = np.dtype("<i4"), np.dtype("<f4")
_ENTRY_BYTES = _ID.itemsize + _PROBABILITY.itemsize
_SUM_TOLERANCE = 1e-3
DRAFT_SUPPORT = 1024
"""Most tokens of a draft's distribution."""


# Equality


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The tokens that a verification commits."""

    token_ids: tuple[int, ...]
    """The accepted candidates, then the target's recovered or bonus token if any."""
    num_accepted: int


def accept_along(
    choose: Callable[[int], int], next_row: Callable[[int, int], int | None], num_rows: int
) -> tuple[Acceptance, tuple[int, ...]]:
    """Follow the target's choices from row 0 through equal candidates; also returns the rows followed.

    `choose(row)`: the target's choice after a row of the pass; the pass has `num_rows`. `next_row(row, token_id)`: row
    of the candidate `token_id` after `row`, or None; `num_rows` if the candidate came too late for the pass.
    """
    token_ids: list[int] = []
    rows = [0]
    while rows[-1] < num_rows:
        token_ids.append(choose(rows[-1]))
        row = next_row(rows[-1], token_ids[-1])
        if row is None:
            break
        rows.append(row)
    return Acceptance(tuple(token_ids), len(rows) - 1), tuple(row for row in rows if row < num_rows)


# The ratio test


@dataclass(frozen=True, slots=True)
class TokenProbs:
    """The distribution that a candidate was drawn from: n tokens with ascending ids."""

    token_ids: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float32]

    def of(self, token_id: int) -> float:
        """The probability of a token; 0 outside the support."""
        index = int(np.searchsorted(self.token_ids, token_id))
        found = index < len(self.token_ids) and int(self.token_ids[index]) == token_id
        return float(self.probabilities[index]) if found else 0.0

    def pack(self) -> bytes:
        """The bytes to send."""
        return self.token_ids.astype(_ID).tobytes() + self.probabilities.astype(_PROBABILITY).tobytes()


def certain(token_id: int) -> bytes:
    """The packed distribution of a token that was not drawn, such as a looked-up one."""
    return TokenProbs(np.array([token_id], dtype=np.int32), np.array([1.0], dtype=np.float32)).pack()


def unpack_draft_probs(packed: Sequence[bytes], token_ids: Sequence[int], vocab_size: int) -> tuple[TokenProbs, ...]:
    """The distribution of each token. Raises `ValueError`."""
    return tuple(unpack_probs(data, token_id, vocab_size) for data, token_id in zip(packed, token_ids, strict=True))


def unpack_probs(data: bytes, token_id: int, vocab_size: int) -> TokenProbs:
    """The distribution that `token_id` was drawn from. Raises `ValueError` for an impossible one."""
    number, rest = divmod(len(data), _ENTRY_BYTES)
    if rest or not number:
        raise ValueError(f"draft probabilities of {len(data)} bytes")
    token_ids = np.frombuffer(data, dtype=_ID, count=number)
    probabilities = np.frombuffer(data, dtype=_PROBABILITY, offset=number * _ID.itemsize)
    if token_ids[0] < 0 or token_ids[-1] >= vocab_size or (token_ids[1:] <= token_ids[:-1]).any():
        raise ValueError(f"draft probabilities whose ids are not ascending in [0, {vocab_size})")
    total = float(probabilities.sum(dtype=np.float64)) if (probabilities >= 0).all() else float("nan")
    if not abs(total - 1) <= _SUM_TOLERANCE:
        raise ValueError(f"draft probabilities that sum to {total}")
    probs = TokenProbs(token_ids, probabilities)
    if probs.of(token_id) <= 0:
        raise ValueError(f"draft probabilities under which their own token, {token_id}, is impossible")
    return probs


class DraftSampler(SequenceSampler):
    """Draws the draft's tokens under the ratio test."""

    domain = Domain.DRAFT

    def draw(self, logits: Tensor, packed: PackedInputs) -> tuple[int, bytes]:
        """The column drawn from `logits` [1, columns], and its packed distribution."""
        inputs = self.state.send(torch.from_numpy(packed))
        best = _shaped(self, logits, inputs).topk(min(DRAFT_SUPPORT, logits.shape[1]), 1)
        columns, bits = self.state.fetch(torch.cat((best.indices, best.values.double().view(torch.int64)))).numpy()
        scores, ids = bits.view(np.float64), self.state.ids[columns]
        noise = noise_of(self.state.bits[columns], int(SamplerInputs.of(packed).key[0]))
        weights = np.exp(scores - scores[0])
        probabilities = (weights / weights.sum()).astype(np.float32)
        support = np.flatnonzero(probabilities)
        support = support[np.argsort(ids[support])]
        return int(columns[(scores + noise).argmax()]), TokenProbs(ids[support], probabilities[support]).pack()


class RatioTest(SequenceSampler):
    """Judges candidates at the target: each is kept with probability min(1, p / q)."""

    domain = Domain.RESAMPLE

    def accept(
        self,
        logits: Tensor,
        start: int,
        packed: PackedInputs,
        judged: Sequence[int],
        draft_probs: Sequence[TokenProbs],
    ) -> Acceptance:
        """The tokens that a pass over rows from position `start` on commits.

        `logits` [rows, columns]; `packed`: from `inputs`; `judged`: the candidates, a late one included.
        """
        packed = np.concatenate((packed, self._facts(len(logits), start, judged, draft_probs).view(np.int64)), 1)
        inputs = self.state.send(torch.from_numpy(packed))
        at_once = 1 if logits.device.type == "cpu" else len(logits)  # a CPU stops at the first rejection
        token_ids: list[int] = []
        for rows in zip(torch.split(logits, at_once), torch.split(inputs, at_once), strict=True):
            for is_kept, recovered in self.state.fetch(self._verdicts(*rows)).tolist():
                if not is_kept:
                    return Acceptance((*token_ids, recovered), len(token_ids))
                token_ids.append(judged[len(token_ids)])
        return Acceptance(tuple(token_ids), len(token_ids))

    def _facts(
        self, num_rows: int, start: int, judged: Sequence[int], draft_probs: Sequence[TokenProbs]
    ) -> npt.NDArray[np.float64]:
        """[rows, 2 + 2 n]: the candidate, the bound that p must exceed, q's n tokens and their probabilities."""
        most = max((len(q.token_ids) for q in draft_probs), default=1)
        facts = np.zeros((num_rows, 2 + 2 * most))
        facts[:, 1] = np.inf  # rows without a candidate keep none
        for row, (candidate, q) in enumerate(zip(judged, draft_probs, strict=True)):
            least = uniform(key_of(self.distribution.seed, start + 1 + row, Domain.ACCEPT)) * q.of(candidate)
            facts[row, :2] = candidate, least
            facts[row, 2 : 2 + len(q.token_ids)] = q.token_ids
            facts[row, 2 + most : 2 + most + len(q.token_ids)] = q.probabilities
        return facts

    def _verdicts(self, logits: Tensor, inputs: Tensor) -> Tensor:
        """[rows, 2]: whether each candidate is kept, and the token in its place. `inputs`: packed inputs and facts."""
        number = len(self.sampler.neutral)
        packed, facts = inputs[:, :number], inputs[:, number:].view(torch.float64)
        most = facts.shape[1] // 2 - 1
        candidates, least, ids, q_probs = torch.split(facts, [1, 1, most, most], 1)
        p = _shaped(self, logits, packed).double().softmax(1)
        is_kept = least < p.gather(1, candidates.long())
        excess = residual(p, ids.long(), q_probs).log().float()
        temperature = torch.ones(len(p), device=p.device)  # p includes the temperature
        recovered = noisy_argmax(excess, self.state.codes, SamplerInputs.of(packed).key, temperature)
        return torch.cat((is_kept.long(), recovered.unsqueeze(1)), 1)


def residual(p: Tensor, ids: Tensor, q_probs: Tensor) -> Tensor:
    """[rows, columns]: the excess of p [rows, columns] over q, not normalised; p itself where both are equal.

    `ids` int64 and `q_probs` [rows, n]: q's tokens and their probabilities; padded with 0.
    """
    left = p.scatter_add(1, ids, -q_probs).clamp_(min=0)
    return torch.where(left.any(1, keepdim=True), left, p)


def _shaped(sampler: SequenceSampler, logits: Tensor, packed: Tensor) -> Tensor:
    """float32 [rows, columns]: processed logits, divided by the temperature."""
    scores: Tensor = sampler.sampler.shaped(logits.float(), packed) / SamplerInputs.of(packed).temperature.unsqueeze(1)
    return scores
