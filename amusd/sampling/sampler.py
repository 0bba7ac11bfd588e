"""Samples one token per row of logits on their device, for draft and target.

A `RowSampler` is the end of a pass, captured with it on a GPU. It chooses the column of a row by the row's
`SamplerInputs`, which a `SequenceSampler` writes for one request.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.config import GREEDY, MAX_TOP_LOGPROBS, Distribution
from amusd.protocol.prefix_hash import num_common
from amusd.sampling.noise import Domain, choose, codes_of, key_of, noise_of, noisy_argmax
from amusd.sampling.processors import Columns, Row, filtered, kept_columns, largest_columns, penalized
from amusd.sampling.sampler_inputs import NUM_BEFORE_PATH, PackedInputs, SamplerInputs
from amusd.types import TopLogprobs

_MIN_PATH = 64
"""Least length of a path in the inputs."""
PROMPT, ANSWER = 0, 1
"""Places in `SamplingState.counts`."""
_NOISE_ROWS_KEPT = 16
"""Rows of noise that are kept: nodes at one position share theirs."""


class Level(enum.IntEnum):
    """The work of a sampler; each level includes those below it."""

    PLAIN = 0
    FILTERED = 1
    PENALIZED = 2
    SCORED = 3

    @classmethod
    def of(cls, distribution: Distribution) -> Level:
        """The lowest level that a distribution can be sampled with."""
        if distribution.is_plain:
            return cls.PLAIN
        return cls.PENALIZED if distribution.has_penalties or distribution.logit_bias else cls.FILTERED


DRAFT_LEVELS = Level.PLAIN, Level.FILTERED, Level.PENALIZED


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, without waiting."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class SamplingState:
    """Inputs of samplers beside logits: tokens of the columns, each sequence's bias and token counts."""

    def __init__(
        self,
        vocab_size: int,
        output_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
        *,
        num_sequences: int = 1,
        max_path: int = 0,
        fetch: Callable[[Tensor], Tensor] = Tensor.cpu,
    ) -> None:
        """`vocab_size`, `output_ids`, `fetch`: of a `ModelRunner`; `max_path`: most rows of a path."""
        self.fetch = fetch
        self.num_columns = vocab_size
        self.device = torch.device(device)
        self.send = partial(send, device=self.device)
        self.ids = np.arange(vocab_size) if output_ids is None else output_ids.cpu().numpy()
        """[columns]: token id of each column."""
        self._columns = np.full(int(self.ids.max()) + 1, -1)
        self._columns[self.ids] = np.arange(vocab_size)
        codes = codes_of(len(self._columns))[torch.from_numpy(self.ids)]
        bits = codes.numpy().view(np.uint32)
        self.codes, self.bits = codes.to(self.device), bits
        """[columns]: the tokens' codes, on the logits' device and for a CPU."""
        self.noise_row = lru_cache(_NOISE_ROWS_KEPT)(lambda key: torch.from_numpy(noise_of(bits, key)).float())
        """Key -> float32 [columns]: the noise of all columns, on a CPU."""
        self.bias = torch.zeros(1 + num_sequences, vocab_size, device=self.device)
        """[1 + sequences, columns]: added to logits; row 0 is zero."""
        self.counts = torch.zeros(2, 1 + num_sequences, 1 + vocab_size, device=self.device)
        """[2, 1 + sequences, 1 + columns]: tokens in prompts and in answers; place 0 counts tokens without a column."""
        self._max_path = max(max_path, _MIN_PATH)

    def column_of(self, token_id: int) -> int:
        """The column that scores a token; -1: there is none."""
        return int(self._columns[token_id]) if token_id < len(self._columns) else -1

    def open(self, sequence: int, prompt: Sequence[int], bias: Sequence[tuple[int, float]]) -> None:
        """Begin a sequence with bias or penalties. Does not wait."""
        known = [(column, number) for token_id, number in bias if (column := self.column_of(token_id)) >= 0]
        self.bias[1 + sequence] = 0
        if known:
            columns, numbers = (self.send(torch.tensor(each)) for each in zip(*known, strict=True))
            self.bias[1 + sequence].index_add_(0, columns, numbers.float())
        self.counts[:, 1 + sequence] = 0
        self.count(PROMPT, sequence, prompt, 1)

    def count(self, part: int, sequence: int, token_ids: Sequence[int], by: int) -> None:
        """Add `by` for each token to the counts of `PROMPT` or `ANSWER`."""
        if token_ids:
            columns = self.send(torch.tensor([1 + self.column_of(each) for each in token_ids]))
            self.counts[part, 1 + sequence].index_add_(0, columns, torch.full_like(columns, by, dtype=torch.float32))

    def penalized(self, logits: Tensor, inputs: SamplerInputs) -> Tensor:
        """[rows, columns]: logits with bias and penalties, on a GPU."""
        prompt, answer = self.counts[:, inputs.sequence]
        answer = answer.scatter_add(1, inputs.path, torch.ones_like(inputs.path, dtype=torch.float32))
        penalties = torch.split(inputs.penalties, 1, 1)
        biased = logits + self.bias[inputs.sequence]
        found: Tensor = penalized(torch, biased, prompt[:, 1:], answer[:, 1:], *penalties)
        return found

    def penalized_row(self, row: Row, inputs: SamplerInputs) -> Row:
        """[columns]: `penalized` on a CPU, for columns with a bias or count."""
        sequence, penalties = int(inputs.sequence), inputs.penalties.astype(np.float32)
        bias, prompt, answer = self.bias.numpy()[sequence], *self.counts.numpy()[:, sequence]
        answer = answer.copy()
        np.add.at(answer, inputs.path, 1)
        prompt, answer, row = prompt[1:], answer[1:], row.copy()
        known = np.flatnonzero((bias != 0) | (prompt != 0) | (answer != 0))
        row[known] = penalized(np, row[known] + bias[known], prompt[known], answer[known], *penalties)
        return row

    def packed_inputs(self, distribution: Distribution, sequence: int | None = None) -> PackedInputs:
        """[inputs] of a request's rows, without key and path. `sequence`: its number; None: no bias or penalty."""
        packed = np.zeros(NUM_BEFORE_PATH + self._max_path, dtype=np.int64)
        filters = distribution if distribution.temperature > 0 else GREEDY  # no filter changes an argmax
        temperature, inputs = distribution.temperature or 1.0, SamplerInputs.of(packed)
        inputs.temperature[...] = distribution.temperature
        inputs.last[...] = min(filters.top_k or self.num_columns, self.num_columns) - 1
        inputs.top_p[...] = filters.top_p if filters.top_p < 1 else 2.0
        inputs.margin[...] = temperature * np.log(filters.min_p) if filters.min_p else -np.inf
        inputs.sharpness[...] = 1 / temperature
        penalties = distribution.repetition_penalty, distribution.presence_penalty, distribution.frequency_penalty
        inputs.penalties[:] = penalties
        inputs.sequence[...] = 0 if sequence is None else 1 + sequence
        inputs.mixed[:] = -1
        return packed


@dataclass(frozen=True)
class RowSampler:
    """Chooses the column of each row of logits: the end of a pass, captured with it on a GPU."""

    max_best: ClassVar[int] = MAX_TOP_LOGPROBS
    state: SamplingState
    level: Level
    """Rows of a lower level may share the pass; their further inputs are neutral."""

    @cached_property
    def neutral(self) -> PackedInputs:
        """[inputs] of a row that takes the largest logit."""
        return self.state.packed_inputs(GREEDY)

    @property
    def num_outputs(self) -> int:
        """int32 numbers per row that the host reads after the pass, for `scores_of`."""
        return 1 + 2 * self.num_best if self.level is Level.SCORED else 0

    @property
    def num_best(self) -> int:
        """Number of best columns in a row's outputs."""
        return min(self.max_best, self.state.num_columns)

    def compute(self, logits: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns], [rows, inputs] -> chosen columns [rows], [rows, num_outputs]. Waits for no GPU."""
        logits, inputs = logits.float(), SamplerInputs.of(packed)
        shaped = self.shaped(logits, packed)
        columns = noisy_argmax(shaped, self.state.codes, inputs.key, inputs.temperature)
        if self.level is not Level.SCORED:
            return columns, columns.unsqueeze(1)[:, :0].view(torch.int32)
        top = logits.topk(self.num_best, 1).indices
        scored = logits.log_softmax(1).gather(1, torch.cat((columns.unsqueeze(1), top), 1))
        return columns, torch.cat((top.int(), scored.view(torch.int32)), 1)

    def compute_row(self, row: Row, packed: PackedInputs) -> tuple[int, npt.NDArray[np.int32]]:
        """`compute` for one row on a CPU without torch's 20 microseconds per operator; needs a finite largest logit."""
        inputs = SamplerInputs.of(packed)
        shaped, left = self.shaped_row(row, inputs)
        column = choose(shaped, self.state.bits, int(inputs.key), float(inputs.temperature), left)
        if self.level is not Level.SCORED:
            return column, np.empty(0, dtype=np.int32)
        logits = torch.from_numpy(row)
        top = largest_columns(logits.unsqueeze(0), self.num_best)[1][0].numpy()
        scored = row[[column, *top]] - float(logits.logsumexp(0))  # in half of numpy's time
        return column, np.concatenate((top.astype(np.int32), scored.view(np.int32)))

    def shaped(self, logits: Tensor, packed: Tensor) -> Tensor:
        """float32 [rows, columns]: logits with bias and penalties, minus infinity where filtered."""
        if self.level is Level.PLAIN:
            return logits
        if logits.device.type == "cpu":
            found = torch.full_like(logits, -torch.inf)
            for target, row, own in zip(found.numpy(), logits.numpy(), packed.numpy(), strict=True):
                shaped, left = self.shaped_row(row, SamplerInputs.of(own))
                np.copyto(target, shaped) if left is None else np.put(target, left, shaped[left])
            return found
        inputs = SamplerInputs.of(packed)
        if self.level > Level.FILTERED:
            logits = self.state.penalized(logits, inputs)
        return filtered(logits, inputs)

    def shaped_row(self, row: Row, inputs: SamplerInputs) -> tuple[Row, Columns | None]:
        """A row with bias and penalties, and the columns that filters leave; None: all."""
        if self.level > Level.FILTERED:
            row = self.state.penalized_row(row, inputs)
        return row, None if self.level is Level.PLAIN else kept_columns(row, inputs)


def scores_of(outputs: npt.NDArray[np.int32], num_scores: int) -> tuple[float, TopLogprobs]:
    """Log-probabilities of the chosen column and the `num_scores` likeliest, from a scored row's outputs."""
    num_top = len(outputs) // 2
    chosen, *top = outputs[num_top:].view(np.float32).tolist()
    pairs = sorted(zip(outputs[:num_top].tolist(), top, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return chosen, tuple(pair for pair in pairs[:num_scores] if pair[1] > -np.inf)


class SequenceSampler:
    """Writes the inputs of a `RowSampler` for one request."""

    domain = Domain.MATCHING

    def __init__(
        self,
        distribution: Distribution,
        state: SamplingState,
        prompt: Sequence[int] = (),
        *,
        sequence: int = 0,
        is_scored: bool = False,
    ) -> None:
        """`sequence`: its number in `state`; `is_scored`: with log-probabilities."""
        level = Level.SCORED if is_scored else Level.of(distribution)
        self.distribution, self.state, self._sequence = distribution, state, sequence
        self.sampler = RowSampler(state, level)
        self.needs_context = distribution.has_penalties
        self._num_prompt_tokens = len(prompt)
        self._context: list[int] = list(prompt) if self.needs_context else []
        self._counted: list[int] = []
        self._template = state.packed_inputs(distribution, sequence if level > Level.FILTERED else None)
        if level > Level.FILTERED:
            state.open(sequence, self._context, distribution.logit_bias)

    @property
    def can_replay(self) -> bool:
        """Whether a device may choose several tokens without the host: not with penalties, biases or the ratio test."""
        return self.domain is Domain.MATCHING and self.sampler.level < Level.PENALIZED

    def see(self, token_ids: Sequence[int]) -> None:
        """Set the tokens that the sequence holds now."""
        if self.needs_context:
            self._context = list(token_ids)

    def inputs(
        self, start: int, token_ids: Sequence[int], parents: Sequence[int] | None = None, num_steps: int = 1
    ) -> PackedInputs:
        """Inputs of rows from position `start` on, then of `num_steps` - 1 further ones. `parents`: see `Rows`."""
        paths = [token_ids[:1]]
        for row, parent in enumerate(range(len(token_ids) - 1) if parents is None else parents, start=1):
            paths.append((*paths[parent], token_ids[row]))
        return self._pack(start, paths, num_steps - 1)

    def _pack(self, length: int, paths: Sequence[Sequence[int]], num_further: int = 0) -> PackedInputs:
        ends = [length + len(path) for path in paths]
        ends += range(length + len(paths) + 1, length + len(paths) + 1 + num_further)
        packed = np.tile(self._template, (len(ends), 1))
        keys = [key_of(self.distribution.seed, position, self.domain) for position in ends]
        inputs = SamplerInputs.of(packed)
        inputs.key.view(np.uint64)[:] = keys
        if self.needs_context:
            self._count(length)
            first = max(0, self._num_prompt_tokens - length)  # the prompt's tokens are counted already
            for row, path in zip(inputs.path, paths, strict=False):
                answer = path[first:][-len(row) :]
                row[: len(answer)] = [1 + self.state.column_of(token_id) for token_id in answer]
        return packed

    def _count(self, length: int) -> None:
        del self._context[length:]
        answer, counted = self._context[self._num_prompt_tokens :], self._counted
        same = num_common(answer, counted)
        self.state.count(ANSWER, self._sequence, counted[same:], -1)
        self.state.count(ANSWER, self._sequence, answer[same:], 1)
        self._counted = answer
