"""Chooses the tokens of one request from the logits of one model: the same code for the draft and for the target.

The host chooses. It reads a digest of logits that are on a device (`digest.py`), and a whole row only where the digest
leaves the choice open. So the choice is always that of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.config import Distribution
from amusd.protocol.verification import Block
from amusd.sampling.acceptance import (
    Acceptance,
    Probabilities,
    ProbabilityRow,
    accept_along,
    is_accepted,
    pack_row,
    residual,
)
from amusd.sampling.digest import Digest, Digests, RowDigest, Words
from amusd.sampling.known_rows import KnownRow, PassRows, keep
from amusd.sampling.logits import Changes, Columns, LogitsProcessor, Row
from amusd.sampling.matching import NoisyArgmax
from amusd.sampling.noise import Domain, codes_of_columns, counters, gumbel, key_of, uniform
from amusd.types import TopLogprobs

DRAFT_SUPPORT = 1024
"""Tokens that a draft draws from at most under the ratio test: what its rows carry."""
_FIRST_LIKELY = 64
"""Likely columns of a digest that are looked at first: less work than all of them, and nearly always enough."""
_SLACK, _SLACK_PER_UNIT = 1e-3, 1e-5
"""How far a score of a device, divided by the temperature, may be off: in all, and for each unit of its size."""


class TokenSampler:
    """Draws tokens of one sequence from a model's logits. A `Chooser` (`amusd/models/language_model.py`)."""

    _domain = Domain.MATCHING
    """The noise that it draws with."""

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        output_ids: Tensor | None = None,
        *,
        prompt: Sequence[int] = (),
        digests: Digests | None = None,
    ) -> None:
        """`vocab_size`, `output_ids`: of the model; see `LanguageModel`. `prompt`: the tokens before the answer.

        `digests`: of the model, if its logits are on a device; made when they are needed if None.
        """
        ids = None if output_ids is None else output_ids.cpu().numpy()
        self._distribution = distribution
        self._processor = LogitsProcessor(distribution, vocab_size, ids)
        self._codes = codes_of_columns(vocab_size, ids)
        self._ids = ids
        self._draw = NoisyArgmax(self._codes)
        self._num_prompt_tokens = len(prompt)
        self._context = list(prompt)
        self._digests = digests
        self.num_rows, self.num_whole_rows = 0, 0
        """Rows of which a digest was seen, and those of them that were needed as a whole."""

    @property
    def digest(self) -> Digest | None:
        """The digest that a pass has to compute; None: the host chooses from whole rows."""
        if self._digests is None or self._distribution.rule == "rejection":
            return None
        return self._digests.few if self._distribution.is_plain else self._digests.many

    @property
    def follows_digest(self) -> bool:
        """Whether the column that the digest chooses is nearly always the one that `choose` returns."""
        return self.digest is not None and self._distribution.is_plain

    def inputs(self, start: int, token_ids: Sequence[int], num_steps: int = 1) -> npt.NDArray[np.int64]:
        """The inputs [rows, words] of `digest`, a row for each of `token_ids`, which stand from `start` on.

        `num_steps - 1` more rows follow for single tokens that a replay takes in behind them.
        """
        return self._inputs(range(start + 1, start + len(token_ids) + num_steps), start, token_ids)

    def see(self, token_ids: Sequence[int]) -> None:
        """Tell which tokens the sequence holds now; only needed where tokens passed the model without a choice."""
        if self._processor.needs_context:
            self._context = list(token_ids)

    def choose(self, logits: Tensor, start: int, token_ids: Sequence[int], outputs: Words | None = None) -> list[int]:
        """[rows, columns] -> the column chosen for each row. Row i stands behind `token_ids[i]`, at `start + i`.

        `outputs`: of `digest`, where the pass has computed it.
        """
        positions = range(start + 1, start + 1 + len(token_ids))
        rows = self._rows_of(logits, positions, token_ids, outputs)
        del self._context[start:]
        chosen = []
        for row, token_id in enumerate(token_ids):
            self._context.append(token_id)
            chosen.append(self._choose_behind(rows, row, positions[row]))
        return chosen

    def _inputs(self, positions: Sequence[int], start: int, token_ids: Iterable[int]) -> npt.NDArray[np.int64]:
        """`token_ids`: those that may be in the context of a row, from `start` on."""
        assert self.digest is not None
        temperature = self._distribution.temperature
        raised = self._processor.raised(self._changes([*self._context[:start], *token_ids])).tolist()
        raised = raised[: self.digest.num_asked]  # where that is not all, whole rows are needed
        return self.digest.inputs(
            [self._key(position, self._domain) for position in positions],
            scale=temperature,
            temperature=temperature or 1.0,
            asked=[raised] * len(positions) if raised else (),
        )

    def _rows_of(
        self, logits: Tensor, positions: Sequence[int], token_ids: Sequence[int], outputs: Words | None
    ) -> PassRows:
        """The rows of a pass over `token_ids`; the token that row `i` scores stands at `positions[i]`."""
        if self._digests is None and logits.device.type != "cpu":
            ids = None if self._ids is None else torch.from_numpy(self._ids)
            self._digests = Digests(len(self._codes), ids, logits.device)
        if outputs is None and self.digest is not None:
            outputs = self.digest.outputs(logits, self._inputs(positions, positions[0] - 1, token_ids))
        return PassRows(logits, self.digest, outputs)

    def _choose_behind(self, rows: PassRows, row: int, position: int) -> int:
        """The column chosen for a row whose token stands at `position`, behind the tokens in the context."""
        digest = rows.digest(row)
        if digest is not None:
            self.num_rows += 1
            column = self._choose_from_digest(digest, position)
            if column is not None:
                return column
            self.num_whole_rows += 1
        return self._choose(rows.whole(row), position)

    def _choose_from_digest(self, digest: RowDigest, position: int) -> int | None:
        """The column that the whole row would give; None where the digest does not settle it."""
        if self._distribution.is_argmax:
            return digest.winner
        changes = self._changes(self._context)
        if len(digest.likely) > _FIRST_LIKELY:
            column = self._settled(digest.cut(_FIRST_LIKELY, self._distribution.temperature or 1.0), changes, position)
            if column is not None:
                return column
        return self._settled(digest, changes, position)

    def _settled(self, digest: RowDigest, changes: Changes, position: int) -> int | None:
        """The column with the largest score, if it surely is the choice.

        That is, if filters surely keep it, and if no unknown column can have a larger score: because filters keep known
        columns only, or because the device has seen that all other scores are smaller.
        """
        known = KnownRow.of(digest, len(self._codes))
        with np.errstate(invalid="ignore", over="ignore"):  # logits may be no numbers
            kept = keep(self._distribution, self._processor, known, changes)
        if kept is None:
            return None
        if self._distribution.temperature == 0:
            place = int(kept.row.argmax())
            is_largest = kept.is_closed or bool(kept.row[place] > kept.largest_left)
        else:
            places = slice(None) if kept.possible is None else kept.possible
            row = kept.row[places]
            if not len(row):
                return None
            codes = self._codes[places] if known.columns is None else self._codes[known.columns[places]]
            scores = row + gumbel(counters(self._key(position, self._domain), codes))
            place = best = int(scores.argmax())
            if kept.possible is not None:
                place = int(kept.possible[best])
            is_largest = kept.is_closed or self._is_largest(float(scores[best]), digest)
        is_kept = kept.sure is None or bool(kept.sure[place])
        return known.column_at(place) if is_kept and is_largest else None

    def _is_largest(self, score: float, digest: RowDigest) -> bool:
        """Whether all unknown columns have a smaller score: none has a larger one than the worst of the best."""
        least = float(digest.best_scores.min()) / self._distribution.temperature
        return score > least + _SLACK + _SLACK_PER_UNIT * (abs(score) + abs(least))

    def _choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        row, columns = self._process(logits)
        if self._distribution.temperature == 0:
            return int(row.argmax())
        return self._draw(row, columns, self._key(position, self._domain))

    def _process(self, logits: npt.NDArray[np.float32]) -> tuple[Row, Columns | None]:
        """Process the logits of the token behind those in the context."""
        return self._processor.process(logits, *self._seen(self._context))

    def _changes(self, context: Sequence[int]) -> Changes:
        return self._processor.changes(*self._seen(context))

    def _seen(self, context: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The prompt and the answer, which penalties look at."""
        if not self._processor.needs_context:
            return (), ()
        return context[: self._num_prompt_tokens], context[self._num_prompt_tokens :]

    def _key(self, position: int, domain: Domain) -> int:
        return key_of(self._distribution.seed, position, domain)


class DraftSampler(TokenSampler):
    """A draft's draws under the ratio test: each leaves the row that it was drawn from."""

    _domain = Domain.DRAFT
    _rows: tuple[bytes, ...] = ()

    def take_rows(self) -> tuple[bytes, ...]:
        """The rows of what was drawn since they were taken last."""
        rows, self._rows = self._rows, ()
        return rows

    def _choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        row, columns = self._process(logits)
        if columns is None or len(columns) > DRAFT_SUPPORT:
            columns = _largest(row, columns, DRAFT_SUPPORT)
        column = self._draw(row, columns, self._key(position, self._domain))
        ids = columns if self._ids is None else self._ids[columns]
        order = np.argsort(ids)
        drawn_from = ProbabilityRow(ids[order], _softmax(row[columns])[order].astype(np.float32))
        self._rows += (pack_row(drawn_from),)
        return column


class TargetSampler(TokenSampler):
    """The target's choices, and what they mean for the candidates."""

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        *,
        prompt: Sequence[int] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        digests: Digests | None = None,
    ) -> None:
        """See `TokenSampler`.

        `logprobs`: keep the log-probabilities of the tokens; `top_logprobs`: and of this many most likely ones.
        """
        super().__init__(distribution, vocab_size, prompt=prompt, digests=digests)
        self._rejects = distribution.rule == "rejection"
        if self._rejects:
            self._domain = Domain.RESAMPLE
        self._wants_logprobs = logprobs
        self._num_top = top_logprobs
        self.logprobs: tuple[float, ...] = ()
        """Log-probabilities of the tokens last accepted, under the model alone; empty unless asked for."""
        self.top_logprobs: tuple[TopLogprobs, ...] = ()
        """One entry for each of these tokens; empty unless asked for."""

    @property
    def digest(self) -> Digest | None:
        """As of `TokenSampler`; where the most likely tokens are asked for, the one that holds them."""
        digest = super().digest
        return self._digests.many if digest is not None and self._digests is not None and self._num_top else digest

    def path_inputs(self, block: Block) -> npt.NDArray[np.int64]:
        """`inputs` for the rows of a pass over several paths."""
        return self._inputs(_positions_of(block), block.start, block.token_ids)

    def accept(
        self,
        logits: Tensor,
        start: int,
        block: Sequence[int],
        judged: Sequence[int],
        rows: Sequence[ProbabilityRow] = (),
        outputs: Words | None = None,
    ) -> Acceptance:
        """The tokens that a pass over `block`, whose first token stands at `start`, commits.

        `logits` [len(block), ids]; `judged`: the block's candidates, with or without one behind them; `rows`: what they
        were drawn from, under the ratio test; `outputs` as of `choose`.
        """
        seen = self._rows_of(logits, range(start + 1, start + 1 + len(block)), block, outputs)
        if self._rejects:
            acceptance = self._test_ratios(seen, start, block, judged, rows)
            self._keep_logprobs(seen, range(len(acceptance.token_ids)), acceptance)
            return acceptance

        def next_row(row: int, token_id: int) -> int | None:
            return row + 1 if row < len(judged) and judged[row] == token_id else None

        return self._follow(seen, range(start + 1, start + 1 + len(block)), block, next_row)[0]

    def accept_paths(
        self, logits: Tensor, block: Block, outputs: Words | None = None
    ) -> tuple[Acceptance, tuple[int, ...]]:
        """The tokens that a pass over the rows of `block` [rows, ids] commits, and the rows that it goes on with.

        Not under the ratio test. `outputs`: of `digest` and `path_inputs`, where the pass has computed it.
        """
        positions = _positions_of(block)
        seen = self._rows_of(logits, positions, block.token_ids, outputs)
        return self._follow(seen, positions, block.token_ids, block.next_row)

    def _follow(
        self,
        seen: PassRows,
        positions: Sequence[int],
        token_ids: Sequence[int],
        next_row: Callable[[int, int], int | None],
    ) -> tuple[Acceptance, tuple[int, ...]]:
        """Choose behind one row after another, as long as the choice is a candidate.

        `positions`: of the token behind each row.
        """
        del self._context[positions[0] - 1 :]

        def choose(row: int) -> int:
            self._context.append(token_ids[row])
            return self._choose_behind(seen, row, positions[row])

        acceptance, rows = accept_along(choose, next_row, len(token_ids))
        self._keep_logprobs(seen, rows, acceptance)
        return acceptance, rows

    def _keep_logprobs(self, seen: PassRows, rows: Iterable[int], acceptance: Acceptance) -> None:
        if self._wants_logprobs:
            scored = list(zip(rows, acceptance.token_ids, strict=True))
            self.logprobs = tuple(seen.log_probability(row, token_id) for row, token_id in scored)
            if self._num_top:
                self.top_logprobs = tuple(seen.top_log_probabilities(row, self._num_top) for row, _ in scored)

    def _test_ratios(
        self,
        seen: PassRows,
        start: int,
        block: Sequence[int],
        judged: Sequence[int],
        rows: Sequence[ProbabilityRow],
    ) -> Acceptance:
        del self._context[start:]
        for number, token_id in enumerate(block):
            self._context.append(token_id)
            row_logits, position = seen.whole(number), start + number + 1
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


def _positions_of(block: Block) -> list[int]:
    """Positions of the tokens behind the rows."""
    positions = [block.start + 1]
    for parent in block.parents:
        positions.append(positions[parent] + 1)
    return positions
