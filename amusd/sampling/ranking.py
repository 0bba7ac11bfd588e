"""The likeliest next tokens of the target, as a draft sees them: what becomes the children of a node of its tree.

The target's token is the argmax of its scores: processed logits and, under matching, the noise that the draft knows as
well. So the draft ranks by its own scores; the first of a row is the token that `TokenSampler` would choose. Scores are
summed in float32, there in float64: they may differ where two tokens tie to rounding.

The probabilities are estimates. Greedy: the softmax of the draft's processed logits, as if its target disagreed with
the draft's argmax as often as a draw would. Matching: the softmax of the scores, noise included; the same thought, with
no more theory behind it. Whoever compares them with other costs should calibrate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from amusd.config import Distribution
from amusd.sampling.logits import Columns, LogitsProcessor, Row
from amusd.sampling.noise import Counters, Domain, codes_of, counters, key_of

_POSITIONS_KEPT = 16
"""Of which the noise is kept: the nodes of a tree stand at few positions, and meet each of them often."""
_TO_MINUS_UNIT = np.float32(-(2.0**-32) * (1 - 2.0**-23))
"""Takes counters to (-1, 0), and the largest float32 of them not to -1, whose logarithm is infinite."""


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """The likeliest tokens behind one row, best first; of equal ones that of the first column."""

    token_ids: tuple[int, ...]
    """As many as asked for; fewer where filters leave fewer, or the rest has no probability in float32."""
    probabilities: tuple[float, ...]
    """Of each, above 0; together at most 1."""


class Ranking:
    """Ranks the next tokens of one sequence by a draft's logits."""

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        output_ids: Tensor | None = None,
        *,
        number: int,
        num_prompt_tokens: int = 0,
    ) -> None:
        """`vocab_size`, `output_ids`: of the draft's model; see `LanguageModel`. `number`: tokens of each row.

        `num_prompt_tokens`: where the answer begins in a context. Raises `ValueError` under the ratio test, whose
        target draws with noise of its own: nothing can be ranked.
        """
        if distribution.rule == "rejection":
            raise ValueError("under the ratio test the target's tokens cannot be ranked")
        if number < 1:
            raise ValueError(f"number={number} must be at least 1")
        ids = None if output_ids is None else output_ids.cpu().numpy()
        self._number = number
        self._num_prompt_tokens = num_prompt_tokens
        self._processor = LogitsProcessor(distribution, vocab_size, ids)
        self._ids = np.arange(vocab_size) if ids is None else ids
        self._noise: _KeptNoise | None = None
        if distribution.temperature > 0:
            self._noise = _KeptNoise(distribution.seed, codes_of(int(self._ids.max()) + 1)[self._ids])
        self._scores, self._weights = np.empty((2, vocab_size), dtype=np.float32)

    @property
    def needs_contexts(self) -> bool:
        """Whether `rank` looks at the tokens before a row."""
        return self._processor.needs_context

    def rank(
        self, logits: Tensor, positions: Sequence[int], contexts: Sequence[Sequence[int]] = ()
    ) -> list[RankedTokens]:
        """[rows, columns] -> the likeliest tokens of each row; the token that row `i` scores stands at `positions[i]`.

        `contexts`: all tokens before each of them, if `needs_contexts`. Raises `ValueError` unless all are as many.
        """
        rows = logits.float().cpu().numpy()
        if len(positions) != len(rows) or (self.needs_contexts and len(contexts) != len(rows)):
            raise ValueError(f"{len(rows)} rows, {len(positions)} positions and {len(contexts)} contexts")
        return [
            self._rank(*self._process(row, contexts[index] if self.needs_contexts else ()), position)
            for index, (row, position) in enumerate(zip(rows, positions, strict=True))
        ]

    def _process(self, row: Row, context: Sequence[int]) -> tuple[Row, Columns | None]:
        prompt, answer = context[: self._num_prompt_tokens], context[self._num_prompt_tokens :]
        processed, columns = self._processor.process(row, prompt, answer)
        return processed, None if self._noise is None else columns  # no filter changes an argmax

    def _rank(self, row: Row, columns: Columns | None, position: int) -> RankedTokens:
        """`row` [columns]: processed logits, of which `columns` are left; None: all."""
        noise = None if self._noise is None else self._noise.at(position)
        if columns is not None:
            row, noise = row[columns], None if noise is None else noise[columns]
        scores, weights = self._scores[: len(row)], self._weights[: len(row)]
        np.subtract(row, row[row.argmax()], out=scores)  # before the noise is added: large logits would round it away
        if noise is not None:
            np.add(scores, noise, out=scores)
            np.subtract(scores, scores[scores.argmax()], out=scores)
        total = float(np.exp(scores, out=weights).sum())
        best: list[int] = []
        found: list[float] = []
        for _ in range(min(self._number, len(scores))):
            place = int(scores.argmax())
            if not weights[place] > 0:
                break
            best.append(place)
            found.append(float(weights[place]))
            scores[place] = -np.inf
        total = max(total, sum(found))
        ids = self._ids[best] if columns is None else self._ids[columns[best]]
        return RankedTokens(tuple(ids.tolist()), tuple(weight / total for weight in found))


class _KeptNoise:
    """The Gumbel noise of the newest positions, in float32."""

    def __init__(self, seed: int, codes: Counters) -> None:
        """`codes` [columns]: of the tokens that the columns score."""
        self._seed = seed
        self._codes = codes
        self._counters, self._scratch = np.empty_like(codes), np.empty_like(codes)
        self._kept: dict[int, Row] = {}

    def at(self, position: int) -> Row:
        """[columns]: valid until the next call."""
        noise = self._kept.get(position)
        if noise is None:
            full = len(self._kept) == _POSITIONS_KEPT
            noise = self._kept.pop(next(iter(self._kept))) if full else np.empty(len(self._codes), dtype=np.float32)
            self._kept[position] = self._fill(noise, position)
        return noise

    def _fill(self, noise: Row, position: int) -> Row:
        key = key_of(self._seed, position, Domain.MATCHING)
        np.copyto(noise, counters(key, self._codes, self._counters, self._scratch), casting="unsafe")
        np.add(noise, np.float32(0.5), out=noise)
        np.multiply(noise, _TO_MINUS_UNIT, out=noise)  # -v of `noise.py`
        np.log1p(noise, out=noise)
        np.negative(noise, out=noise)
        np.log(noise, out=noise)
        return np.negative(noise, out=noise)
