"""Chooses the tokens of one request from the logits of one model: the same code for the draft and for the target.

On the host; of logits on a device as little is copied to it as will do (`contenders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from amusd.config import Distribution
from amusd.protocol.verification import Block
from amusd.sampling.contenders import Contenders
from amusd.sampling.equality import Acceptance, accept_along
from amusd.sampling.logits import Columns, LogitsProcessor, Row
from amusd.sampling.matching import NoisyArgmax
from amusd.sampling.noise import Domain, codes_of, counters, gumbel, key_of, uniform
from amusd.sampling.rejection import Probabilities, is_accepted, residual
from amusd.sampling.rows import ProbabilityRow, pack_row

DRAFT_SUPPORT = 1024
"""Tokens that a draft draws from at most under the ratio test: what its rows carry."""


class TokenSampler:
    """Draws tokens of one sequence from a model's logits. A `Chooser` (`amusd/models/language_model.py`)."""

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        output_ids: Tensor | None = None,
        *,
        prompt: Sequence[int] = (),
        domain: Domain = Domain.MATCHING,
    ) -> None:
        """`vocab_size`, `output_ids`: of the model; see `LanguageModel`. `prompt`: the tokens before the answer."""
        ids = None if output_ids is None else output_ids.cpu().numpy()
        self._distribution = distribution
        self._domain = domain
        self._processor = LogitsProcessor(distribution, vocab_size, ids)
        self._codes = codes_of(vocab_size) if ids is None else codes_of(int(ids.max()) + 1)[ids]
        self._ids = ids
        self._draw = NoisyArgmax(self._codes)
        self._num_prompt_tokens = len(prompt)
        self._context = list(prompt)
        self._contenders: Contenders | None = None

    def see(self, token_ids: Sequence[int]) -> None:
        """Tell which tokens the sequence holds now; only needed where tokens passed the model without a choice."""
        if self._processor.needs_context:
            self._context = list(token_ids)

    def choose(self, logits: Tensor, start: int, token_ids: Sequence[int]) -> list[int]:
        """[rows, columns] -> the column chosen for each row. Row i stands behind `token_ids[i]`, at `start + i`."""
        chosen_for = self._chooser(logits, range(start + 1, start + 1 + len(token_ids)))
        del self._context[start:]
        chosen = []
        for row, token_id in enumerate(token_ids):
            self._context.append(token_id)
            chosen.append(chosen_for(row))
        return chosen

    def _chooser(self, logits: Tensor, positions: Sequence[int]) -> Callable[[int], int]:
        """For rows [rows, columns]: the column chosen for row `i`, whose token stands at `positions[i]`.

        What it is asked for at the time stands behind the tokens in the context.
        """
        few = self._few_columns(logits, positions)
        rows: npt.NDArray[np.float32] | None = None

        def choose(row: int) -> int:
            nonlocal rows
            column = None if few is None else few(row)
            if column is not None:
                return column
            if rows is None:
                rows = logits.float().cpu().numpy()
            return self._choose(rows[row], positions[row])

        return choose

    def _few_columns(self, logits: Tensor, positions: Sequence[int]) -> Callable[[int], int | None] | None:
        """See `Contenders.chooser`; None where whole rows have to be seen, or are at hand."""
        distribution = self._distribution
        fits = distribution.rule == "matching" and distribution.is_plain and self._domain is Domain.MATCHING
        if not fits or not self._is_away(logits):
            return None
        if self._contenders is None:
            self._contenders = Contenders(distribution.seed, distribution.temperature, self._codes, logits.device)
        return self._contenders.chooser(logits, positions)

    @staticmethod
    def _is_away(logits: Tensor) -> bool:
        return logits.device.type != "cpu"

    def _choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        row, columns = self._process(logits)
        if self._distribution.temperature == 0:
            return int(row.argmax())
        return self._draw(row, columns, self._key(position, self._domain))

    def _process(self, logits: npt.NDArray[np.float32]) -> tuple[Row, Columns | None]:
        """For the token behind those in the context."""
        if not self._processor.needs_context:
            return self._processor.process(logits)
        length = self._num_prompt_tokens
        return self._processor.process(logits, self._context[:length], self._context[length:])

    def _key(self, position: int, domain: Domain) -> int:
        return key_of(self._distribution.seed, position, domain)


class DraftSampler(TokenSampler):
    """A draft's draws under the ratio test: each leaves the row that it was drawn from."""

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        output_ids: Tensor | None = None,
        *,
        prompt: Sequence[int] = (),
    ) -> None:
        """See `TokenSampler`."""
        super().__init__(distribution, vocab_size, output_ids, prompt=prompt, domain=Domain.DRAFT)
        self._rows: list[bytes] = []

    def take_rows(self) -> tuple[bytes, ...]:
        """The rows of what was drawn since they were taken last."""
        rows, self._rows = tuple(self._rows), []
        return rows

    def _choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        row, columns = self._process(logits)
        if columns is None or len(columns) > DRAFT_SUPPORT:
            columns = _largest(row, columns, DRAFT_SUPPORT)
        column = self._draw(row, columns, self._key(position, self._domain))
        ids = columns if self._ids is None else self._ids[columns]
        order = np.argsort(ids)
        self._rows.append(pack_row(ProbabilityRow(ids[order], _softmax(row[columns])[order].astype(np.float32))))
        return column


class TargetSampler(TokenSampler):
    """The target's choices, and what they mean for the candidates."""

    def __init__(
        self, distribution: Distribution, vocab_size: int, *, prompt: Sequence[int] = (), logprobs: bool = False
    ) -> None:
        """See `TokenSampler`. `logprobs`: keep the log-probabilities of the tokens."""
        rule = distribution.rule
        domain = Domain.RESAMPLE if rule == "rejection" else Domain.MATCHING
        super().__init__(distribution, vocab_size, prompt=prompt, domain=domain)
        self._rejects = rule == "rejection"
        self._wants_logprobs = logprobs
        self.logprobs: tuple[float, ...] = ()
        """Of the tokens last accepted, under the model alone; empty unless asked for."""

    def accept(
        self,
        logits: Tensor,
        start: int,
        block: Sequence[int],
        judged: Sequence[int],
        rows: Sequence[ProbabilityRow] = (),
    ) -> Acceptance:
        """What a pass over `block`, whose first token stands at `start`, commits.

        `logits` [len(block), ids]; `judged`: the block's candidates, with or without one behind them; `rows`: what they
        were drawn from, under the ratio test.
        """
        if self._rejects:
            scores = logits.float().cpu().numpy()
            acceptance = self._test_ratios(scores, start, block, judged, rows)
            self._keep_logprobs(logits, range(len(acceptance.token_ids)), acceptance)
            return acceptance

        def next_row(row: int, token_id: int) -> int | None:
            return row + 1 if row < len(judged) and judged[row] == token_id else None

        return self._follow(logits, range(start + 1, start + 1 + len(block)), block, next_row)[0]

    def accept_paths(self, logits: Tensor, block: Block) -> tuple[Acceptance, tuple[int, ...]]:
        """What a pass over the rows of `block` [rows, ids] commits, and which of its rows it goes on with.

        Not under the ratio test.
        """
        positions = [block.start + 1]
        for parent in block.parents:
            positions.append(positions[parent] + 1)
        return self._follow(logits, positions, block.token_ids, block.next_row)

    def _follow(
        self,
        logits: Tensor,
        positions: Sequence[int],
        token_ids: Sequence[int],
        next_row: Callable[[int, int], int | None],
    ) -> tuple[Acceptance, tuple[int, ...]]:
        """Choose behind one row after another, as long as the choice is a candidate.

        `positions`: of the token behind each row.
        """
        chosen_for = self._chooser(logits, positions)
        del self._context[positions[0] - 1 :]

        def choose(row: int) -> int:
            self._context.append(token_ids[row])
            return chosen_for(row)

        acceptance, rows = accept_along(choose, next_row, len(token_ids))
        self._keep_logprobs(logits, rows, acceptance)
        return acceptance, rows

    def _keep_logprobs(self, logits: Tensor, rows: Iterable[int], acceptance: Acceptance) -> None:
        if self._wants_logprobs:
            scored = zip(rows, acceptance.token_ids, strict=True)
            self.logprobs = tuple(
                _log_probability(logits[row].float().cpu().numpy(), token_id) for row, token_id in scored
            )

    def _test_ratios(
        self,
        logits: npt.NDArray[np.float32],
        start: int,
        block: Sequence[int],
        judged: Sequence[int],
        rows: Sequence[ProbabilityRow],
    ) -> Acceptance:
        del self._context[start:]
        for number, (token_id, row_logits) in enumerate(zip(block, logits, strict=True)):
            self._context.append(token_id)
            position = start + number + 1
            if number == len(judged):  # all accepted, and the pass has scored one position more
                return Acceptance((*judged, self._choose(row_logits, position)), number)
            candidate, q = judged[number], rows[number]
            p = self._probabilities(row_logits)
            if not is_accepted(candidate, p, q, uniform(self._key(position, Domain.ACCEPT))):
                return Acceptance((*judged[:number], self._resample(residual(p, q), position)), number)
        return Acceptance(tuple(judged), len(judged))

    def _probabilities(self, logits: npt.NDArray[np.float32]) -> Probabilities:
        """[ids] float64."""
        row, columns = self._process(logits)
        if columns is None:
            return _softmax(row)
        p = np.zeros(len(row))
        p[columns] = _softmax(row[columns])
        return p

    def _resample(self, weights: Probabilities, position: int) -> int:
        able = np.flatnonzero(weights)
        noise = gumbel(counters(self._key(position, Domain.RESAMPLE), self._codes[able]))
        return int(able[(np.log(weights[able]) + noise).argmax()])


def _softmax(row: npt.NDArray[np.float32]) -> Probabilities:
    exact = np.exp(row.astype(np.float64) - float(row.max()))
    result: Probabilities = exact / exact.sum()
    return result


def _largest(row: Row, columns: Columns | None, number: int) -> Columns:
    """The `number` columns of the largest logits, ascending: all of them where there are fewer."""
    columns = np.arange(len(row)) if columns is None else columns
    if len(columns) <= number:
        return columns
    return np.sort(columns[np.argpartition(row[columns], len(columns) - number)[len(columns) - number :]])


def _log_probability(row: npt.NDArray[np.float32], column: int) -> float:
    exact = row.astype(np.float64)
    largest = exact.max()
    return float(exact[column] - largest - np.log(np.exp(exact - largest).sum()))
