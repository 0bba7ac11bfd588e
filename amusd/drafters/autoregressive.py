"""Any causal language model over the target's token ids, drafting chains as the target would choose them.

Where a long enough suffix has occurred before, prompt lookup proposes instead, which is right more often and free.

    text      committed tokens, and the path behind them
    cache     keys and values of the text's first tokens, all but the last at most, so that a step has an input
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Self

from amusd.drafters.base import Drafter, Expansion, chain_of, say_not_finite
from amusd.drafters.ngram import NgramCache
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows, SamplerRows
from amusd.protocol.draft_session import Guesses
from amusd.protocol.prefix_hash import num_common
from amusd.sampling.acceptance import DraftSampler
from amusd.sampling.sampler import DRAFT_LEVELS, SamplingState, SequenceSampler, samplers_of


class AutoregressiveDrafter(Drafter):
    """Drafts with `model`, whose cache is kept between sequences. Token ids are taken modulo the model's vocabulary."""

    def __init__(self, model: CachedModel, ngrams: NgramCache | None = None, *, cache: KVCache | None = None) -> None:
        """`ngrams`: proposes first. `cache`: one of `new_caches`."""
        self.model = model
        self.tokens_per_replay = model.tokens_per_step
        self._ngrams = ngrams
        self._cache = model.new_caches(1, model.max_length)[0] if cache is None else cache
        self.max_length = self._cache.capacity
        self._output_ids = None if model.output_ids is None else model.output_ids.tolist()
        self.sampler: SequenceSampler | None = None
        self._held: list[int] = []
        """The tokens of the cache."""
        self._prepare()

    def take_rows(self) -> tuple[bytes, ...]:
        """The rows that the last tokens were drawn from, under the ratio test."""
        return self.sampler.take_rows() if isinstance(self.sampler, DraftSampler) else ()

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`: those but the last that the cache lacks go through the model."""
        super().open(token_ids, capacity, fan_out)
        if self._ngrams is not None:
            self._ngrams.open(token_ids)
        self.sampler = self._new_sampler(*SamplingState.of(self.model, self._cache))
        self._cut(self.committed)
        self._prefill(self.committed[:-1])

    def forget(self) -> None:
        """See `Drafter`."""
        super().forget()
        self._keep([])

    def commit(self, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        super().commit(token_ids)
        if self._ngrams is not None:
            self._ngrams.commit(token_ids)

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """What is looked up for each, or as many tokens as are worth passes."""
        found = [drafter.looked_up(part) for drafter, part in zip(drafters, parts, strict=True)]
        rooms = [0 if tokens else part.num_tokens for tokens, part in zip(found, parts, strict=True)]
        made = cls.propose_together(drafters, [part.path for part in parts], rooms)
        return [chain_of(looked_up or own) for looked_up, own in zip(found, made, strict=True)]

    @classmethod
    def propose_together(
        cls, drafters: Sequence[Self], paths: Sequence[Sequence[int]], rooms: Sequence[int]
    ) -> list[Sequence[int]]:
        """`rooms[i]` tokens for drafter i, chosen in shared passes; fewer where logits are not finite."""
        texts = [[*drafter.committed, *path] for drafter, path in zip(drafters, paths, strict=True)]
        starts, left = [len(text) for text in texts], [*rooms]
        while going := [index for index, number in enumerate(left) if number]:
            model, steps = drafters[0].model, 1
            samplers = [drafters[index].sampler for index in going]
            if all(sampler is None or sampler.can_replay for sampler in samplers):  # else the host has to choose
                steps = min(model.tokens_per_step, max(left))
            batch = [drafters[index].rows(texts[index], steps=steps) for index in going]
            for index, rows, output in zip(going, batch, model.run(batch, steps), strict=True):
                chosen = drafters[index].take(texts[index], rows, output, min(steps, left[index]))
                texts[index] += chosen
                left[index] = left[index] - len(chosen) if chosen else 0
        return [text[start:] for text, start in zip(texts, starts, strict=True)]

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        """`propose_together` of one."""
        return self.propose_together([self], [path], [room])[0]

    def looked_up(self, part: Expansion) -> Sequence[int]:
        """A continuation behind a chain, up to its room; the model reads it with its next step."""
        return () if self._ngrams is None else self._ngrams.continuation(part.room, part.path)[0]

    def rows(self, text: Sequence[int], candidates: Sequence[int] = (), steps: int = 1) -> Rows:
        """The end of `text` that the cache lacks, and `candidates` behind it."""
        self._cut(text)
        start = self._cache.length
        if len(text) - start + len(candidates) > self.model.numerics.max_rows(start):
            self._prefill(text[:-1])
            start = self._cache.length
        token_ids, wanted = self._reduced([*text[start:], *candidates]), None
        if self.sampler is not None:
            self.sampler.see(text)
            words = self.sampler.rows(start, token_ids, num_steps=steps)
            wanted = SamplerRows(self.sampler.sampler, words)
        return Rows(token_ids, self._cache, wanted)

    def take(self, text: Sequence[int], rows: Rows, output: ModelOutput, steps: int) -> list[int]:
        """The tokens that a pass chose behind `rows`, the end of `text`; at most `steps`, none if not finite."""
        last = len(rows.token_ids) - 1
        try:
            chosen = [self._draw(output, last + step) for step in range(steps)]
        except NotFiniteError as error:
            self._undo(error)
            return []
        self._keep([*text, *chosen[:-1]])
        return chosen

    def _new_sampler(self, state: SamplingState, number: int) -> SequenceSampler | None:
        """The sampler of the sequence with this number in `state`; None: the most likely tokens."""
        if self.distribution.is_argmax:
            return None
        make = DraftSampler if self.distribution.rule == "rejection" else SequenceSampler
        return make(self.distribution, state, self.committed, sequence=number)

    def _draw(self, output: ModelOutput, row: int) -> int:
        """The token chosen behind a row. Raises `NotFiniteError`."""
        column, _ = output.sample(row)
        if isinstance(self.sampler, DraftSampler):
            assert output.wanted is not None
            column = self.sampler.draw(output.logits[row : row + 1], output.wanted.inputs[row : row + 1])
        return column if self._output_ids is None else self._output_ids[column]

    def _keep(self, text: list[int]) -> None:
        """The cache holds `text`, a list of its own, and maybe more, which is dropped."""
        self._held = text
        self._cache.truncate(len(text))

    def _undo(self, error: NotFiniteError) -> None:
        """Drop the rows of a pass."""
        say_not_finite(error)
        self._cache.truncate(len(self._held))
        self.model.wipe(self._cache)

    def _cut(self, text: Sequence[int]) -> None:
        """Keep of the cache what `text` begins with, its last token excepted."""
        if len(self._held) >= len(text) or self._held != text[: len(self._held)]:
            self._keep(self._held[: num_common(self._held, text[:-1])])

    def _prefill(self, text: Sequence[int]) -> None:
        """Take in the rest of `text`."""
        self.model.prefill(self._reduced(text[self._cache.length :]), self._cache)
        self._held = [*text]

    def _reduced(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id % self.model.num_ids for token_id in token_ids]

    def _prepare(self) -> None:
        model, cache, levels = self.model, self._cache, DRAFT_LEVELS
        model.prepare(cache, samplers_of(model, cache, levels[:-1]), model.tokens_per_step)
        model.prepare(cache, samplers_of(model, cache, levels[-1:]))  # with penalties the host chooses
