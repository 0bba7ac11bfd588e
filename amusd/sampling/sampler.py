"""Chooses a token of each row of logits, where the logits are: the same code for draft and target, CPU and GPU.

A `RowSampler` is the end of a pass: operators of fixed shape that read numbers of each row and give its column. On a
GPU it is captured with the pass. A `SequenceSampler` writes these numbers for the rows of one request.

    words of a row   key of the noise, temperature | filters, penalties, sequence | tokens of the row's path

Each word has a neutral value, so rows of several requests share a pass.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.sampling.noise import UNIT, Bits, Domain, codes_of, counters, halves_of, key_of
from amusd.sampling.noisy_scores import choose, noisy_argmax
from amusd.sampling.processors import (
    Columns,
    Row,
    filtered,
    floats,
    largest_columns,
    left_by_filters,
    log_sum_exp,
    penalized,
)
from amusd.types import TopLogprobs

Words = npt.NDArray[np.int64]
"""[rows, words]: what a sampler reads of each row."""
MAX_TOP_LOGPROBS = 20
NUM_PLAIN = 3
"""Words of a plain row: both halves of the key, and the temperature as a float64."""
NUM_FILTERS = 4
"""Further words of a filtered row: those that `filtered` reads."""
_NUM_NUMBERS = NUM_FILTERS + 3
"""With its penalties, as float64."""
NUM_PENALIZED = _NUM_NUMBERS + 1
"""Further words of a penalized row, its sequence included, 0 for none, but without its path."""
_NOTHING = np.empty(0, dtype=np.int32)
_ROWS_KEPT = 16
"""Rows of noise: the nodes of a tree stand at few positions, and meet each of them often."""
_PATH = 64
"""Tokens of a path that penalties count at least."""


class Level(enum.IntEnum):
    """What a sampler does; each level does what those below it do."""

    PLAIN = 0
    """Greedy decoding and temperature."""
    FILTERED = 1
    """Filters, too."""
    PENALIZED = 2
    """Bias and penalties, too."""
    SCORED = 3
    """Log-probabilities, too."""

    @classmethod
    def of(cls, distribution: Distribution) -> Level:
        """What a distribution needs."""
        if distribution.is_plain:
            return cls.PLAIN
        return cls.PENALIZED if distribution.has_penalties or distribution.logit_bias else cls.FILTERED


DRAFT_LEVELS = Level.PLAIN, Level.FILTERED, Level.PENALIZED


class SamplingState:
    """What samplers of one model know beside logits: its columns, and the bias and the tokens of each sequence."""

    def __init__(
        self,
        vocab_size: int,
        output_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
        *,
        num_sequences: int = 1,
        max_path: int = 0,
    ) -> None:
        """`vocab_size`, `output_ids`: see `LanguageModel`; `max_path`: rows of a path at most."""
        self.num_columns = vocab_size
        self.device = torch.device(device)
        self.max_path = max(max_path, _PATH)
        self.ids = None if output_ids is None else output_ids.cpu()
        codes = codes_of(vocab_size) if self.ids is None else codes_of(int(self.ids.max()) + 1)[self.ids]
        self.codes = codes.to(self.device)
        self._num_sequences = num_sequences
        if self.device.type != "cpu":
            _ = self.bias, self.counts  # at fixed addresses, before the first capture

    @classmethod
    def of(cls, model: Any, cache: Any) -> tuple[SamplingState, int]:
        """That of the sequence in a cache of a `LanguageModel`, and the number of the sequence in it.

        Where passes are captured, sequences whose caches share their memory share it.
        """
        kind, device = (model.vocab_size, model.output_ids), model.captured_on
        if device is None:
            return cls(*kind), 0
        memory, number = cache.memory, cache.memory.num_slots // cache.allocated
        if memory.sampling is None:
            memory.sampling = cls(*kind, device, num_sequences=number, max_path=model.width)
        return memory.sampling, cache.number

    @cached_property
    def bias(self) -> Tensor:
        """[1 + sequences, columns]: added to the logits; at 0 that of rows without any."""
        return torch.zeros(1 + self._num_sequences, self.num_columns, device=self.device)

    @cached_property
    def counts(self) -> Tensor:
        """[2, 1 + sequences, 1 + columns]: tokens of prompts, and of answers; at column 0 those without one."""
        return torch.zeros(2, 1 + self._num_sequences, 1 + self.num_columns, device=self.device)

    @cached_property
    def bits(self) -> Bits:
        """[columns]: the codes, as a CPU reads them."""
        return self.codes.numpy().view(np.uint32)

    def column_of(self, token_id: int) -> int:
        """The column that scores a token; -1: there is none."""
        if self.ids is None:
            return token_id if token_id < self.num_columns else -1
        return int(self._column_of[token_id]) if token_id < len(self._column_of) else -1

    @cached_property
    def _column_of(self) -> npt.NDArray[np.int64]:
        """[largest id + 1]."""
        assert self.ids is not None
        columns = np.full(int(self.ids.max()) + 1, -1)
        columns[self.ids.numpy()] = np.arange(len(self.ids))
        return columns

    def open(self, sequence: int, prompt: Sequence[int], bias: Sequence[tuple[int, float]]) -> None:
        """Begin a sequence with bias or penalties. Does not wait."""
        known = [(column, number) for token_id, number in bias if (column := self.column_of(token_id)) >= 0]
        self.bias[1 + sequence] = 0
        if known:
            columns, numbers = (self.send(torch.tensor(each)) for each in zip(*known, strict=True))
            self.bias[1 + sequence].index_add_(0, columns, numbers.float())
        self.counts[:, 1 + sequence] = 0
        self.count(0, sequence, prompt, 1)

    def count(self, part: int, sequence: int, token_ids: Sequence[int], by: int) -> None:
        """Add `by` for each token to the counts of the prompt (0) or the answer (1). Does not wait."""
        if token_ids:
            columns = self.send(torch.tensor([1 + self.column_of(each) for each in token_ids]))
            self.counts[part, 1 + sequence].index_add_(0, columns, torch.full_like(columns, by, dtype=torch.float32))

    def send(self, numbers: Tensor) -> Tensor:
        """To the device. Does not wait."""
        return numbers.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else numbers

    def shaped(self, logits: Tensor, words: Tensor) -> Tensor:
        """[rows, columns] on a GPU: `logits` with bias and penalties, minus infinity where filters take away.

        `words` [rows, words]: the further ones of filtered or of penalized rows.
        """
        if words.shape[1] > NUM_FILTERS:
            sequences, paths = words[:, _NUM_NUMBERS], words[:, NUM_PENALIZED:]
            prompt, answer = self.counts[:, sequences]
            answer = answer.scatter_add(1, paths, torch.ones_like(paths, dtype=torch.float32))
            penalties = torch.split(floats(words[:, NUM_FILTERS:_NUM_NUMBERS]), 1, 1)
            logits = penalized(torch, logits + self.bias[sequences], prompt[:, 1:], answer[:, 1:], *penalties)
        return filtered(logits, words[:, :NUM_FILTERS])

    def penalized_row(self, row: Row, words: Words) -> Row:
        """[columns] on a CPU: bias and penalties change the few columns only that have any. `words`: as of `shaped`."""
        sequence, penalties = words[_NUM_NUMBERS], words[NUM_FILTERS:_NUM_NUMBERS].view(np.float64).astype(np.float32)
        bias, prompt, answer = self.bias.numpy()[sequence], *self.counts.numpy()[:, sequence]
        answer = answer.copy()
        np.add.at(answer, words[NUM_PENALIZED:], 1)
        prompt, answer, row = prompt[1:], answer[1:], row.copy()
        known = np.flatnonzero((bias != 0) | (prompt != 0) | (answer != 0))
        row[known] = penalized(np, row[known] + bias[known], prompt[known], answer[known], *penalties)
        return row

    @cached_property
    def neutral(self) -> Words:
        """[NUM_PENALIZED]: the further words of a row that has no bias, no penalties and no filters."""
        return words_of(GREEDY, self.num_columns, sequence=-1)


@functools.lru_cache(maxsize=_ROWS_KEPT)
def noise_of(state: SamplingState, low: int, high: int) -> Row:
    """[columns]: the noise of all columns under a key, by torch, which takes a third of numpy's time for `gumbel`."""
    below = torch.from_numpy((counters(state.bits, (low, high)) + 0.5) * -UNIT)
    return below.log1p_().neg_().log_().neg_().float().numpy()


@dataclass(frozen=True)
class RowSampler:
    """Chooses the column of each row of logits. A `Sampler` (`amusd/models/language_model.py`)."""

    first_further: ClassVar[int] = NUM_PLAIN
    """The first word that a plain row does not have."""
    state: SamplingState
    level: Level

    @property
    def num_inputs(self) -> int:
        """See `Sampler`."""
        if self.level <= Level.FILTERED:
            return self.first_further + self.level * NUM_FILTERS
        return self.first_further + NUM_PENALIZED + self.state.max_path

    @property
    def neutral(self) -> Words:
        """See `Sampler`."""
        words = np.zeros(self.num_inputs, dtype=np.int64)
        self.write(words, self.state.neutral)
        return words

    def write(self, words: Words, further: Words) -> None:
        """Set the words of rows [..., num_inputs] that follow those of a plain row, as far as this level has them."""
        place = words[..., self.first_further :][..., :NUM_PENALIZED]
        place[:] = further[: place.shape[-1]]

    @property
    def num_outputs(self) -> int:
        """See `Sampler`: what `Scores` reads."""
        return 1 + 2 * self._num_top if self.level is Level.SCORED else 0

    @property
    def _num_top(self) -> int:
        return min(MAX_TOP_LOGPROBS, self.state.num_columns)

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns] and int64 [rows, num_inputs] -> int64 [rows], int32 [rows, num_outputs]. See `Sampler`."""
        if logits.device.type == "cpu":
            rows = zip(logits.float().numpy(), inputs.numpy(), strict=True)
            columns, told = zip(*(self.of_row(*row) for row in rows), strict=True)
            return torch.tensor(columns), torch.from_numpy(np.stack(told))
        return self.of_rows(logits.float(), inputs)

    def of_rows(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """`compute` of float32 logits on a GPU."""
        shaped = self.state.shaped(logits, inputs[:, NUM_PLAIN:]) if self.level else logits
        columns = noisy_argmax(shaped, self.state.codes, inputs[:, :2].int(), floats(inputs[:, 2]))
        if self.level is not Level.SCORED:
            return columns, columns.unsqueeze(1)[:, :0].view(torch.int32)
        top = logits.topk(self._num_top, 1).indices
        scored = logits.log_softmax(1).gather(1, torch.cat((columns.unsqueeze(1), top), 1))
        return columns, torch.cat((top.int(), scored.view(torch.int32)), 1)

    def of_row(self, row: Row, words: Words) -> tuple[int, npt.NDArray[np.int32]]:
        """`compute` of one row on a CPU, where an operator of torch would take 20 microseconds."""
        shaped, left = self.shaped_row(row, words)
        column = choose(shaped, self.state.bits, words[:2].tolist(), words[2:3].view(np.float64)[0], left)
        if self.level is not Level.SCORED:
            return column, _NOTHING
        top = largest_columns(row, self._num_top)
        scored = row[[column, *top]] - log_sum_exp(row)
        return column, np.concatenate((top.astype(np.int32), scored.view(np.int32)))

    def shaped_row(self, row: Row, words: Words) -> tuple[Row, Columns | None]:
        """On a CPU: a row with bias and penalties, and the columns that filters leave, None for all."""
        further = words[self.first_further :]
        if self.level > Level.FILTERED:
            row = self.state.penalized_row(row, further)
        return row, left_by_filters(row, further[:NUM_FILTERS]) if self.level else None


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities of one row, under the softmax of the model's logits alone."""

    chosen: float
    top: TopLogprobs
    """The likeliest columns, the likeliest first."""

    @classmethod
    def of(cls, outputs: npt.NDArray[np.int32], number: int) -> Scores:
        """`outputs` [num_outputs]: of a sampler of `Level.SCORED`; `number`: likeliest columns."""
        num_top = len(outputs) // 2
        chosen, *top = outputs[num_top:].view(np.float32).tolist()
        pairs = sorted(zip(outputs[:num_top].tolist(), top, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return cls(chosen, tuple(pair for pair in pairs[:number] if pair[1] > -np.inf))


class SequenceSampler:
    """Writes what a `RowSampler` reads of the rows of one request. A `Chooser` (`amusd/models/language_model.py`)."""

    domain = Domain.MATCHING
    """The noise that it draws with."""
    draws = False
    """Whether the host has the token drawn behind a pass, instead of taking the sampler's."""

    def __init__(
        self,
        distribution: Distribution,
        state: SamplingState,
        prompt: Sequence[int] = (),
        *,
        sequence: int = 0,
        is_scored: bool = False,
    ) -> None:
        """`sequence`: its number in `state`; `is_scored`: whether its log-probabilities are asked for."""
        level = Level.SCORED if is_scored else Level.of(distribution)
        self.distribution, self.state, self._sequence = distribution, state, sequence
        self.sampler = RowSampler(state, level)
        self.needs_context = distribution.has_penalties
        self._numbers = words_of(distribution, state.num_columns, sequence)
        self._num_prompt_tokens = len(prompt)
        self._context: list[int] = list(prompt) if self.needs_context else []
        self._held: list[int] = []
        """Tokens of the answer that `state` counts."""
        if level > Level.FILTERED:
            state.open(sequence, self._context, distribution.logit_bias)

    @property
    def can_replay(self) -> bool:
        """Whether a device can choose several tokens without the host, which alone knows the context."""
        return not (self.needs_context or self.draws)

    def see(self, token_ids: Sequence[int]) -> None:
        """Tell which tokens the sequence holds now."""
        if self.needs_context:
            self._context = list(token_ids)

    def rows(
        self, start: int, token_ids: Sequence[int], parents: Sequence[int] | None = None, num_steps: int = 1
    ) -> Words:
        """The words of rows that take in `token_ids`, the first at position `start`.

        `parents`: see `SequenceRows`; None: a chain, behind which `num_steps - 1` more rows follow.
        """
        paths = [token_ids[:1]]
        for row, parent in enumerate(range(len(token_ids) - 1) if parents is None else parents, start=1):
            paths.append((*paths[parent], token_ids[row]))
        words = self._words(start, paths, num_steps - 1)
        if self.needs_context and parents is None:
            self._context += token_ids
        return words

    def draw(self, logits: Tensor, words: Words) -> int:
        """The column of one row: [1, columns] and [1, words]."""
        return int(self.sampler.compute(logits, torch.from_numpy(words).to(logits.device))[0][0])

    def _words(self, length: int, paths: Sequence[Sequence[int]], num_further: int = 0) -> Words:
        """Rows behind the first `length` tokens of the sequence and a path of further ones; then single tokens."""
        ends = [
            *(length + len(path) for path in paths),
            *range(length + len(paths) + 1, length + len(paths) + 1 + num_further),
        ]
        words = np.zeros((len(ends), self.sampler.num_inputs), dtype=np.int64)
        words[:, :2] = [halves_of(key_of(self.distribution.seed, position, self.domain)) for position in ends]
        words[:, 2:NUM_PLAIN].view(np.float64)[:] = self.distribution.temperature
        self.sampler.write(words, self._numbers)
        if self.needs_context:
            self._count(length)
            first = max(0, self._num_prompt_tokens - length)  # tokens of the prompt are counted
            for row, path in zip(words[:, self.sampler.first_further + NUM_PENALIZED :], paths, strict=False):
                answer = path[first:][-len(row) :]
                row[: len(answer)] = [1 + self.state.column_of(token_id) for token_id in answer]
        return words

    def _count(self, length: int) -> None:
        """Have the state count the first `length` tokens of the context."""
        del self._context[length:]
        answer, held = self._context[self._num_prompt_tokens :], self._held
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, held, strict=False)))
        self.state.count(1, self._sequence, held[same:], -1)
        self.state.count(1, self._sequence, answer[same:], 1)
        self._held = answer


def samplers_of(
    model: Any, cache: Any, levels: Iterable[Level], kind: type[RowSampler] = RowSampler
) -> list[RowSampler]:
    """The samplers that captured passes of `model` end with; none where nothing is captured."""
    return [kind(SamplingState.of(model, cache)[0], level) for level in levels if model.captured_on is not None]


def words_of(distribution: Distribution, num_columns: int, sequence: int) -> Words:
    """[NUM_PENALIZED]: the words, beyond those of a plain row, that are the same for a whole request."""
    words = np.zeros(NUM_PENALIZED, dtype=np.int64)
    last, top_p, margin = num_columns - 1, 2.0, -np.inf
    temperature = distribution.temperature or 1.0
    if distribution.temperature > 0:  # no filter changes an argmax
        last = min(distribution.top_k or num_columns, num_columns) - 1
        top_p = distribution.top_p if distribution.top_p < 1 else top_p
        margin = temperature * np.log(distribution.min_p) if distribution.min_p else margin
    penalties = distribution.repetition_penalty, distribution.presence_penalty, distribution.frequency_penalty
    words[0], words[_NUM_NUMBERS] = last, 1 + sequence
    words[1:_NUM_NUMBERS].view(np.float64)[:] = top_p, margin, 1 / temperature, *penalties
    return words
