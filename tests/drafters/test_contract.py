"""The drafter contract (`amusd/drafters/base.py`), checked for every drafter.

The suite that ships accepts each correct drafter and finds each broken one.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny
from models.blocks import BUCKETED, FIXED, bucketed_model
from models.test_block_models import dflash_weights, medusa_weights, save_dflash, save_medusa
from models.test_eagle import save_eagle3
from models.tiny import wrap_model
from oracle import OracleDrafter
from table_model import TableModel

from amusd import contract
from amusd.checkpoints.draft_networks import load_published
from amusd.checkpoints.transformers_models import adopt_into
from amusd.checkpoints.vocabulary import share_vocabulary
from amusd.contract import CAPACITY
from amusd.drafters.base import Drafter
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.protocol.draft_tree import Transition
from amusd.protocol.prefix_hash import CommittedPrefix
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

VOCAB_SIZE = 6
MODEL = TableModel(VOCAB_SIZE, seed=3, max_length=CAPACITY)
OTHER_MODEL = TableModel(VOCAB_SIZE, seed=5, max_length=CAPACITY)
MODEL_OF_FEW_ROWS = TableModel(
    VOCAB_SIZE, seed=3, max_length=CAPACITY, numerics=Numerics(width=4, fixed=True, prefill_chunk=8)
)
MODEL_OF_FEWER_IDS = TableModel(VOCAB_SIZE - 2, seed=3, max_length=CAPACITY)
LETTERS = (b"d", b"a", b"e", b"b", b"c")
REFERENCE = tuple(i * i % VOCAB_SIZE for i in range(CAPACITY))


def model_with_another_tokenizer() -> ModelRunner:
    """A draft that shares four tokens with its target, reads one as another, and has one without a text."""
    model = tiny.tiny_causal_lm(tiny.tiny_config(), register_attention())
    target = {0: b"a", 1: b"b", 2: b"c", 3: b"d", 4: b"ef"}
    shared = share_vocabulary(target, dict(enumerate(LETTERS)), VOCAB_SIZE, lambda _text: [0])
    adopt_into(model, shared)
    return wrap_model(model, LoadOptions(numerics=FIXED, max_model_len=CAPACITY, dtype="float32"), shared.output_ids)


@functools.lru_cache
def published(kind: str) -> Any:
    """A network that reads a target's features."""
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        tiny.save_checkpoint(target, tiny.tiny_config(num_hidden_layers=6, tie_word_embeddings=False))
        if kind == "eagle":
            save_eagle3(draft)
        else:
            save_medusa(draft, medusa_weights()) if kind == "medusa" else save_dflash(draft, dflash_weights())
        options = LoadOptions(numerics=BUCKETED, max_model_len=CAPACITY, dtype="float32")
        return load_published(draft, target, options, kind)


class WithFeatures:
    """Mixin that gives a drafter features of all committed tokens; each is a function of the text before it."""

    def open(self, *args: Any) -> None:
        super().open(*args)  # type: ignore[misc]  # the drafter's
        self.take_all_features()

    def follow(self: Any, transition: Transition) -> None:
        super().follow(transition)  # type: ignore[misc]
        self.take_all_features()

    def take_all_features(self: Any) -> None:
        prefix, width = CommittedPrefix(self.committed), published("eagle").feature_width
        for position in range(self.length - 1):
            generator = torch.Generator().manual_seed(prefix.hash_before(position + 1) >> 1)
            self.take_features(position, torch.randn(1, width, generator=generator).bfloat16())


class EagleWithFeatures(WithFeatures, EagleDrafter): ...


class BlockWithFeatures(WithFeatures, BlockDrafter): ...


OTHER_TOKENIZER = model_with_another_tokenizer()
FACTORIES: dict[str, Callable[[], Drafter]] = {
    "autoregressive": lambda: ModelDrafter(MODEL),
    "another_tokenizer": lambda: ModelDrafter(OTHER_TOKENIZER),
    "eagle": lambda: EagleWithFeatures(published("eagle")),
    "eagle_lookup": lambda: EagleWithFeatures(published("eagle"), NgramCache(2)),
    "medusa": lambda: BlockWithFeatures(published("medusa")),
    "dflash": lambda: BlockWithFeatures(published("dflash")),
    "cascade": lambda: CascadeDrafter(MODEL, ModelDrafter(OTHER_MODEL, NgramCache(2))),
    "cascade_few_rows": lambda: CascadeDrafter(MODEL_OF_FEW_ROWS, NgramDrafter(1)),
    "cascade_fewer_ids": lambda: CascadeDrafter(MODEL, ModelDrafter(MODEL_OF_FEWER_IDS)),
    "lookup_first": lambda: ModelDrafter(MODEL, NgramCache(2)),
    "ngram": lambda: NgramDrafter(1),
    "tree": lambda: ModelDrafter(bucketed_model(), NgramCache(2)),
    "oracle": lambda: OracleDrafter(REFERENCE, right_with_probability(0.6, 0), VOCAB_SIZE),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_every_drafter_keeps_the_contract(name: str) -> None:
    contract.check_drafter(FACTORIES[name], vocab_size=VOCAB_SIZE)


class Remembers(NgramDrafter):
    """Indexes its own proposals as if they were committed."""

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        found = super().propose(path, room)
        self._ngrams._index.append(found)
        return found


class Forgets(NgramDrafter):
    """Does not index the committed tokens."""

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        super().open(token_ids, capacity, fan_out)
        self._ngrams.open(token_ids)


class KeepsSlots(ModelDrafter):
    """Joins the wrong keys to the prefix."""

    def follow(self, transition: Transition) -> None:
        super().follow(transition)
        if transition.kept:
            self.slots._prefix[self.slots._num_computed - 1] = 0


BROKEN: dict[str, tuple[Callable[[], Drafter], int]] = {
    "remembers": (lambda: Remembers(1), 1),
    "forgets": (lambda: Forgets(1), 1),
    "keeps slots": (lambda: KeepsSlots(bucketed_model(), NgramCache(2)), 3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_is_found(name: str) -> None:
    make, fan_out = BROKEN[name]
    with pytest.raises(AssertionError):
        contract.check_drafter(make, vocab_size=VOCAB_SIZE, fan_outs=[fan_out])
