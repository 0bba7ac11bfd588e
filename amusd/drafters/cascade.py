"""A drafter with its own drafter: in each pass, a model judges tokens of a faster drafter.

The cascade proposes the model's own choices: accepted tokens of the inner drafter, and one more. Both draw with the
target's noise.

Under the ratio test the inner drafter decides only the number of tokens of a pass. That number depends on earlier
tokens, so whether a token is proposed does not depend on its value.

References:
    Chen et al. 2024, Cascade Speculative Drafting, https://arxiv.org/abs/2312.11462 (there vertical cascade)
    Spector and Re 2023, Staged Speculative Decoding, https://arxiv.org/abs/2308.04623
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import Self

from amusd.drafters.base import Drafter, Expansion, chain_of
from amusd.drafters.chain import ChainText
from amusd.models.kv_cache import KVCache
from amusd.protocol.draft_tree import Guesses
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.sampler import DRAFT_LEVELS, RowSampler

NUM_INNER_TOKENS = 4
"""Most candidates of the inner drafter in a pass."""


class CascadeDrafter(Drafter):
    """Drafts chains with `model`, for which `inner` drafts."""

    drafts_trees = False

    def __init__(self, model: ModelRunner, inner: Drafter, *, cache: KVCache | None = None) -> None:
        """`cache`: one of `new_caches`."""
        cache = model.new_cache(model.max_length) if cache is None else cache
        self.model, self.inner, self.max_length = model, inner, cache.capacity
        self.text = ChainText(model, cache)
        state, _ = model.sampling_state(cache)
        model.prepare(cache, [RowSampler(state, level) for level in DRAFT_LEVELS])

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start both drafters from `token_ids`."""
        super().open(token_ids, capacity, fan_out)
        self.inner.set_distribution(self.distribution)
        most = min(capacity, self.inner.max_length or capacity)
        self.inner.open(token_ids[:most], most)  # first: another device may work on this meanwhile
        self.text.open(self.committed, self.distribution)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens in both drafters."""
        super().commit(token_ids)
        self.inner.commit(token_ids[: self.inner.capacity - self.inner.length])

    @classmethod
    def step(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """One pass: the model's choices along the inner drafters' tokens; none if not finite."""
        inner = [drafter.inner for drafter in drafters]
        found = inner[0].step(inner, [drafter.inner_part(part) for drafter, part in zip(drafters, parts, strict=True)])
        proposed = [[token_id for ((token_id, _),) in guesses] for guesses in found]
        batch = []
        for drafter, part, candidates in zip(drafters, parts, proposed, strict=True):
            drafter.inner.take_draft_probs()  # dropped: the model's distributions count, not these
            drafter.text.go_to(part)
            batch.append(drafter.text.rows(candidates))
        chosen: list[Sequence[Guesses]] = []
        outputs = drafters[0].model.run(batch)
        for drafter, part, candidates, output in zip(drafters, parts, proposed, outputs, strict=True):
            tokens = drafter.text.take(output, candidates)
            drafter.inner.foresee([*part.path, *tokens])
            chosen.append(chain_of(tokens))
        return chosen

    def inner_part(self, part: Expansion) -> Expansion:
        """The inner drafter's part of a step: one token fewer than the pass makes."""
        length = self.length + len(part.path)
        most = min(part.room, self.model.numerics.max_rows(length - 1)) - 1
        number = max(0, min(NUM_INNER_TOKENS, most, self.inner.capacity - length))
        return replace(part, num_tokens=number, room=number)

    def take_draft_probs(self) -> Sequence[bytes]:
        """See `Drafter`."""
        return self.text.take_draft_probs()

    def close(self) -> None:
        """Release the inner drafter."""
        self.inner.close()

    def forget(self) -> None:
        """See `Drafter`."""
        super().forget()
        self.text.forget()
        self.inner.forget()
