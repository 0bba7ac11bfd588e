"""Any causal language model over the target's token ids, which drafts chains and trees."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Self

from amusd.drafters.base import Drafter, Expansion
from amusd.drafters.chain import ChainText, chain_step
from amusd.drafters.ngram import NgramCache
from amusd.drafters.tree import TreeSlots, tree_step
from amusd.models.kv_cache import KVCache
from amusd.protocol.draft_tree import MAX_NODES, Guesses, Transition
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.sampler import DRAFT_LEVELS, RowSampler


class ModelDrafter(Drafter):
    """Drafts with `model`, whose cache is kept between sequences. Token ids are taken modulo its vocabulary."""

    def __init__(self, model: ModelRunner, ngrams: NgramCache | None = None, *, cache: KVCache | None = None) -> None:
        """`ngrams`: in a chain, proposes before the model; in a tree, adds guesses and repetitions.

        `cache`: one of `new_caches(number, model.max_length, spare=MAX_NODES)`.
        """
        cache = model.new_cache(model.max_length, spare=MAX_NODES) if cache is None else cache
        self.model, self.max_length, self.tokens_per_replay = model, cache.capacity, model.tokens_per_step
        self.drafts_trees = cache.history is None
        self.text, self.slots = ChainText(model, cache, ngrams), TreeSlots(model, cache, ngrams)
        state, _ = model.sampling_state(cache)
        *samplers, with_penalties = [RowSampler(state, level) for level in DRAFT_LEVELS]
        model.prepare(cache, samplers, model.tokens_per_step)
        model.prepare(cache, [with_penalties])  # with penalties the host chooses

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`: compute tokens that the cache lacks, except the last.

        A model with recurrent layers drafts a chain, whatever `fan_out` is.
        """
        super().open(token_ids, capacity, fan_out if self.drafts_trees else 1)
        if self.fan_out == 1:
            self.text.open(self.committed, self.distribution)
        else:
            self.text.fill(self.committed)
            self.slots.open(self.committed, self.distribution, fan_out)

    @classmethod
    def step(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """One step of chains, or of trees."""
        model = drafters[0].model
        if drafters[0].fan_out == 1:
            return chain_step(model, [drafter.text for drafter in drafters], parts)
        return tree_step(model, [drafter.slots for drafter in drafters], parts)

    def take_draft_probs(self) -> Sequence[bytes]:
        """See `Drafter`."""
        return self.text.take_draft_probs()

    def follow(self, transition: Transition) -> None:
        """See `Drafter`."""
        super().follow(transition)
        if self.fan_out > 1:
            self.slots.follow(transition)

    def look_up(self) -> tuple[Sequence[int], float]:
        """See `Drafter`; nothing for a chain, which looks up with each step."""
        return self.slots.look_up() if self.fan_out > 1 else super().look_up()

    def forget(self) -> None:
        """See `Drafter`."""
        super().forget()
        self.text.forget()
