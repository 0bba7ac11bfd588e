"""Drafts a chain: holds the text of a sequence in a model's cache, and appends the tokens that the model chooses.

    token_ids   the committed tokens, and the path after them
    cache       keys and values of the text's first tokens, never of the last, which is the next pass's input

If a long enough suffix of the text has occurred before, prompt lookup proposes the tokens that followed. These are
free, and right more often than the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.config import Distribution
from amusd.drafters.base import Expansion, chain_of, say_not_finite
from amusd.drafters.ngram import NgramCache
from amusd.errors import NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows, SamplerRows
from amusd.protocol.draft_tree import Guesses
from amusd.protocol.prefix_hash import num_common
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.acceptance import DraftSampler
from amusd.sampling.sampler import SequenceSampler


class ChainText:
    """The text of one sequence at a time. Its cache is kept, since the next text may begin alike."""

    def __init__(self, model: ModelRunner, cache: KVCache, ngrams: NgramCache | None = None) -> None:
        """`ngrams`: proposes before the model."""
        self.token_ids: list[int] = []
        self._model, self._cache, self._ngrams = model, cache, ngrams
        self._output_ids = None if model.output_ids is None else model.output_ids.tolist()
        self._num_held = 0
        """Tokens that the cache held before the last pass."""

    def fill(self, committed: list[int]) -> None:
        """Start from `committed`, to which the drafter appends; compute tokens that the cache lacks."""
        self._committed, self._base = committed, len(committed)
        self._sampler: SequenceSampler | None = None
        self._drawn: list[bytes] = []
        self._replace(0, committed)
        self._prefill()

    def open(self, committed: list[int], distribution: Distribution) -> None:
        """`fill`, and draw the tokens after it from `distribution`."""
        self.fill(committed)
        if self._ngrams is not None:
            self._ngrams.open(committed)
        if not distribution.is_argmax:
            make = DraftSampler if distribution.rule == "rejection" else SequenceSampler
            state, number = self._model.sampling_state(self._cache)
            self._sampler = make(distribution, state, committed, sequence=number)

    def forget(self) -> None:
        """Drop the text and its cache."""
        self.token_ids.clear()
        self._cache.truncate(0)

    def go_to(self, part: Expansion) -> Sequence[int]:
        """Set the text to the committed tokens and the path of `part`; return looked-up tokens, up to the room.

        The model reads looked-up tokens with its next step.
        """
        path = part.path
        self._replace(self._base, [*self._committed[self._base :], *path])
        self._base = len(self._committed)
        return () if self._ngrams is None else self._ngrams.continuation(part.room, path)[0]

    @property
    def can_replay(self) -> bool:
        """Whether a device may choose several tokens in a row."""
        return self._sampler is None or self._sampler.can_replay

    def rows(self, candidates: Sequence[int] = (), steps: int = 1) -> Rows:
        """Rows of the tokens that the cache lacks, then of `candidates`."""
        start = self._cache.length
        if len(self.token_ids) - start + len(candidates) > self._model.numerics.max_rows(start):
            self._prefill()
            start = self._cache.length
        self._num_held = start
        token_ids, wanted = model_ids(self._model, [*self.token_ids[start:], *candidates]), None
        if self._sampler is not None:
            self._sampler.see(self.token_ids)
            wanted = SamplerRows(self._sampler.sampler, self._sampler.inputs(start, token_ids, num_steps=steps))
        return Rows(token_ids, self._cache, wanted, num_final=self._base - start)

    def take(self, output: ModelOutput, candidates: Sequence[int] = (), steps: int = 1) -> Sequence[int]:
        """Append and return the tokens that a pass over `rows` chose; none if logits are not finite.

        These are the choices along `candidates` and one more, then those of further `steps`.
        """
        first, num_drawn = len(self.token_ids) - self._num_held - 1, len(self._drawn)
        chosen: list[int] = []
        try:
            for row in range(len(candidates) + steps):
                chosen.append(self._draw(output, first + row))
                if row < len(candidates) and candidates[row] != chosen[row]:
                    break
        except NotFiniteError as error:
            say_not_finite(error)
            self._cache.truncate(self._num_held)
            self._model.wipe(self._cache)
            del self._drawn[num_drawn:]
            return ()
        self.token_ids += chosen
        self._cache.truncate(len(self.token_ids) - 1)
        return chosen

    def take_draft_probs(self) -> Sequence[bytes]:
        """See `Drafter`."""
        probs, self._drawn = self._drawn, []
        return probs

    def _draw(self, output: ModelOutput, row: int) -> int:
        """The token chosen after a row. Raises `NotFiniteError`."""
        column, _ = output.sample(row)
        if isinstance(self._sampler, DraftSampler):
            assert output.wanted is not None
            logits, inputs = output.logits[row : row + 1], output.wanted.inputs[row : row + 1]
            column, draft_probs = self._sampler.draw(logits, inputs)
            self._drawn.append(draft_probs)
        return column if self._output_ids is None else self._output_ids[column]

    def _replace(self, start: int, token_ids: Sequence[int]) -> None:
        """Replace the text from `start` on; the cache keeps the common prefix."""
        same = start + num_common(self.token_ids[start:], token_ids)
        self.token_ids[same:] = token_ids[same - start :]
        self._cache.truncate(min(self._cache.length, same, len(self.token_ids) - 1))

    def _prefill(self) -> None:
        """Compute the rest of the text but its last token."""
        self._model.prefill(model_ids(self._model, self.token_ids[self._cache.length : -1]), self._cache)


def model_ids(model: ModelRunner, token_ids: Sequence[int]) -> list[int]:
    """Token ids modulo the vocabulary of `model`."""
    return [token_id % model.num_ids for token_id in token_ids]


def chain_step(model: ModelRunner, texts: Sequence[ChainText], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
    """Tokens after each path: looked up, or else from passes that the texts share; fewer if logits are not finite."""
    found = [[*text.go_to(part)] for text, part in zip(texts, parts, strict=True)]
    left = [0 if tokens else part.num_tokens for tokens, part in zip(found, parts, strict=True)]
    while going := [index for index, number in enumerate(left) if number]:
        # 1 if the host has to choose
        steps = min(model.tokens_per_step, max(left)) if all(texts[index].can_replay for index in going) else 1
        outputs = model.run([texts[index].rows(steps=steps) for index in going], steps)
        for index, output in zip(going, outputs, strict=True):
            chosen = texts[index].take(output, steps=min(steps, left[index]))
            found[index] += chosen
            left[index] = left[index] - len(chosen) if chosen else 0
    return [chain_of(tokens) for tokens in found]
