"""A drafter that scores a block from the target's states, at work: the text is the target's, and features fit it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, params, reference, target_model
from torch import Tensor

from amusd.drafters.block import BlockDrafter
from amusd.engine import Engine
from amusd.types import Mode

NAME, DEPTH, NUM_TOKENS = "medusa", 3, 30
GREEDY = decoding(Mode.SYNCHRONOUS, DEPTH)


class KnowingModel:
    """Knows plain decoding's answer, and looks its place up by the feature of the position before the root."""

    max_length, max_depth, feature_width, vocab_size, num_ids, output_ids = 400, DEPTH, 4, VOCAB_SIZE, VOCAB_SIZE, None
    device = torch.device("cpu")

    def __init__(self) -> None:
        text = reference(NUM_TOKENS + 20)
        model, number = target_model(), len(text) - 1
        cache = model.new_cache(400)
        model.prefill(text[:number], cache)
        features = model.read_features([(cache, range(number))])[0].float()
        self.behind = {tuple(row.tolist()): text[place + 2 :] for place, row in enumerate(features)}

    def new_state(self) -> KnowingState:
        return KnowingState(self)


class KnowingState:
    def __init__(self, model: KnowingModel) -> None:
        self.model = model
        self.features: dict[int, Tensor] = {}

    def keep(self, number: int) -> None:
        self.features = {place: feature for place, feature in self.features.items() if place < number}

    def take(self, start: int, features: Tensor) -> None:
        self.features |= dict(enumerate(features, start))

    def score(self, position: int, token_id: int) -> Tensor:
        feature = self.features.get(position - 1, torch.zeros(4))
        tokens = self.model.behind.get(tuple(feature.tolist()), ())[:DEPTH]
        scores = torch.zeros(len(tokens), VOCAB_SIZE)
        scores[range(len(tokens)), list(tokens)] = 9.0
        return scores


def makers() -> dict[str, object]:
    model = KnowingModel()
    return {NAME: lambda: BlockDrafter(model)}


def reading(engine: Engine) -> Engine:
    engine.worker.model.feature_columns = {NAME: slice(0, 4)}
    return engine


@pytest.mark.parametrize("as_tree", [False, True])
def test_each_block_is_accepted_by_a_target_whose_features_it_knows(as_tree: bool) -> None:
    each = makers()
    with pair(each) as (engine, _):  # type: ignore[arg-type]  # makers of drafters
        how = replace(GREEDY, tree=True, fan_out=2) if as_tree else GREEDY
        answer = reading(engine).generate(PROMPT, params(NUM_TOKENS), decoding=how, drafter=NAME)
    assert (*PROMPT, *answer.token_ids) == reference(NUM_TOKENS)
    assert answer.metrics.num_tokens / answer.metrics.num_passes > DEPTH
