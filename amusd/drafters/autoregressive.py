"""Any causal language model over the target's token ids, drafting chains as the target would choose them.

Where a long enough suffix has occurred before, prompt lookup proposes instead, which is right more often and free.

    context   [0, length)            tokens taken in, the tail included
    cache     [0, _cache.length)     keys and values; at most length - 1, so that a step always has an input
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from typing_extensions import Self

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import ChainDrafter, say_not_finite
from amusd.drafters.ngram import NgramCache
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows, SamplerRows
from amusd.sampling.ratio_test import DraftSampler
from amusd.sampling.sampler import DRAFT_LEVELS, SamplingState, SequenceSampler, samplers_of


class AutoregressiveDrafter(ChainDrafter):
    """Drafts with `model`, whose cache is kept between sequences."""

    def __init__(self, model: CachedModel, lookup: NgramCache | None = None, *, cache: KVCache | None = None) -> None:
        """`lookup`: proposes first. `cache`: one of `new_caches`."""
        super().__init__()
        self.model = model
        self._lookup = lookup
        self._cache = model.new_caches(1, model.max_length)[0] if cache is None else cache
        self._output_ids = None if model.output_ids is None else model.output_ids.tolist()
        self._distribution = GREEDY
        self._sampler: SequenceSampler | None = None
        self._held: list[int] = []
        self._num_opened = 0
        self._prepare()

    @property
    def tokens_per_step(self) -> int:
        """One where each needs a call of the model; all if looked up."""
        looked_up = self._lookup is not None and self._lookup.continuation(1)
        return self._capacity if looked_up else 1

    @property
    def tokens_per_replay(self) -> int:
        """As many as the model makes without the host."""
        return self.model.tokens_per_step

    @property
    def max_length(self) -> int:
        """The positions of its cache."""
        return self._cache.capacity

    def set_distribution(self, distribution: Distribution) -> None:
        """Draw the next sequence from it with the target's noise."""
        self._distribution = distribution

    def take_rows(self) -> tuple[bytes, ...]:
        """The rows that the last tokens were drawn from, under the ratio test."""
        return self._sampler.take_rows() if isinstance(self._sampler, DraftSampler) else ()

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`: those but the last that the cache lacks go through the model."""
        super().open(token_ids, capacity, fan_out)
        if self._lookup is not None:
            self._lookup.open(token_ids)
        self._cache.truncate(self._num_held(token_ids))
        self._held, self._num_opened = [], len(token_ids)
        self._sampler = None
        if not self._distribution.is_argmax:
            make = DraftSampler if self._distribution.rule == "rejection" else SequenceSampler
            state, number = SamplingState.of(self.model, self._cache)
            self._sampler = make(self._distribution, state, token_ids, sequence=number)
        self.model.prefill(token_ids[self._cache.length : -1], self._cache)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """`max_tokens` tokens; fewer at the capacity, or where logits are not finite."""
        return self.propose_together([self], [max_tokens])[0]

    @classmethod
    def propose_together(cls, drafters: Sequence[Self], max_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """`propose` of each, in shared passes for those that look nothing up."""
        proposed = [drafter.propose_known(number) for drafter, number in zip(drafters, max_tokens, strict=True)]
        asking = [index for index, tokens in enumerate(proposed) if tokens is None]
        found = cls._extend([drafters[index] for index in asking], [max_tokens[index] for index in asking])
        for index, tokens in zip(asking, found, strict=True):
            proposed[index] = tokens
        return [tokens or () for tokens in proposed]

    def propose_known(self, max_tokens: int) -> tuple[int, ...] | None:
        """Propose without the model: a continuation, or nothing without room; None: ask the model."""
        num_tokens = self.room(max_tokens)
        if num_tokens < 1:
            return ()
        found = () if self._lookup is None else self._lookup.continuation(num_tokens)
        self.commit(found)  # the model reads it with its next step
        return found or None

    def room(self, max_tokens: int) -> int:
        """How many of so many tokens fit."""
        return min(max_tokens, self._capacity - self.length)

    @property
    def can_replay(self) -> bool:
        """Whether a device can choose several tokens without the host."""
        return self._sampler is None or self._sampler.can_replay

    def rows(self, candidates: Sequence[int] = (), steps: int = 1) -> Rows:
        """The end of the sequence and `candidates` behind it."""
        token_ids, wanted = [*self._catch_up(len(candidates)), *candidates], None
        if self._sampler is not None:
            self._sampler.see(self._context)
            words = self._sampler.rows(self._cache.length, token_ids, num_steps=steps)
            wanted = SamplerRows(self._sampler.sampler, words)
        return Rows(token_ids, self._cache, wanted)

    def take(self, rows: Rows, output: ModelOutput, steps: int) -> list[int]:
        """Commit the tokens that a pass chose behind `rows`, at most `steps`; none if not finite."""
        last = len(rows.token_ids) - 1
        try:
            chosen = [self._draw(output, last + step) for step in range(steps)]
        except NotFiniteError as error:
            self._undo_rows(error)
            return []
        self.commit(chosen)
        self._cache.truncate(self.length - 1)
        return chosen

    def _draw(self, output: ModelOutput, row: int) -> int:
        """The token chosen behind a row. Raises `NotFiniteError`."""
        column, _ = output.sample(row)
        if isinstance(self._sampler, DraftSampler):
            assert output.wanted is not None
            column = self._sampler.draw(output.logits[row : row + 1], output.wanted.inputs[row : row + 1])
        return column if self._output_ids is None else self._output_ids[column]

    def _undo_rows(self, error: NotFiniteError) -> None:
        self._cache.truncate(min(self._cache.length, self.length - 1))
        self._cache.wipe()
        self._num_opened = self._cache.capacity  # nor goes another sequence on with what is left
        say_not_finite(error)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens; they go through the model with the next step."""
        super().commit(token_ids)
        if self._lookup is not None:
            self._lookup.commit(token_ids)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens. The last stays outside the cache, as the next step's input."""
        super().truncate(length)
        if self._lookup is not None:
            self._lookup.truncate(length)
        self._cache.truncate(min(self._cache.length, length - 1))

    def close(self) -> None:
        """Keep the cache for the next sequence, which may begin alike."""
        self._held = self._context or self._held
        super().close()

    def _num_held(self, token_ids: Sequence[int]) -> int:
        agreeing = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._held, token_ids[:-1], strict=False))
        number = min(self._cache.length, sum(1 for _ in agreeing))
        return number if number >= self._num_opened else 0

    def _prepare(self) -> None:
        for levels, steps in (
            (DRAFT_LEVELS[:-1], self.model.tokens_per_step),
            (DRAFT_LEVELS[-1:], 1),
        ):  # see `can_replay`
            self.model.prepare(self._cache, samplers_of(self.model, self._cache, levels), steps)

    @classmethod
    def _extend(cls, drafters: Sequence[Self], max_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        proposed: list[list[int]] = [[] for _ in drafters]
        num_left = [drafter.room(number) for drafter, number in zip(drafters, max_tokens, strict=True)]
        while going := [index for index, number in enumerate(num_left) if number]:
            model, steps = drafters[0].model, 1
            if all(drafters[index].can_replay for index in going):
                steps = min(model.tokens_per_step, max(num_left))
            batch = [drafters[index].rows(steps=steps) for index in going]
            for index, rows, output in zip(going, batch, model.run(batch, steps), strict=True):
                chosen = drafters[index].take(rows, output, min(steps, num_left[index]))
                proposed[index] += chosen
                num_left[index] = num_left[index] - len(chosen) if chosen else 0
        return [tuple(tokens) for tokens in proposed]

    def _catch_up(self, num_behind: int = 0) -> list[int]:
        while True:
            start = self._cache.length
            most = self.model.numerics.max_rows(start)
            if self.length - start + num_behind <= most:
                return self._context[start:]
            self.model.prefill(self._context[start : min(start + most, self.length - 1)], self._cache)
