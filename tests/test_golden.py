"""Golden answers of the embedded target in float32: an error that all modes share shows nowhere else.

The greedy ones were computed by transformers' own code; the best token of each step is ahead of the second by more than
0.06, which no CPU's rounding of float32 comes near. The sampled one is amusd's own, kept against unwanted change.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amusd.config import EngineConfig, SamplingParams, TargetConfig
from amusd.engine import Engine

pytestmark = pytest.mark.embedded

GREEDY = {
    "Count from one to ten.": "33 30 216 33 198 34 30 216 34 198 35 30 216 35 198 36 30 216 36 198 37 30 216 37",
    "Why is the sky blue?": "504 2988 288 451 1962 5721 281 260 7564 7180 282 1420 284 2380 30 378 6376 4541 4461 975 "
    "282 253 7613 1343",
}
SAMPLED = (
    "504 6376 4541 4461 975 282 253 980 1343 347 13739 43464 24484 28 527 314 253 1782 7613 338 4149 645 8118 26623"
)
SAMPLED_TEXT = (
    "The sky appears blue because of a process known as Rayleigh scattering, which is a natural phenomenon that occurs "
    "when sunlight interacts"
)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.start(EngineConfig(target=TargetConfig(kind="embedded", dtype="float32"), drafters=())) as engine:
        yield engine


@pytest.mark.parametrize("prompt", GREEDY)
def test_greedy_decoding_gives_the_tokens_that_transformers_gives(engine: Engine, prompt: str) -> None:
    assert engine.generate(prompt, SamplingParams(max_new_tokens=24)).token_ids == ids(GREEDY[prompt])


def test_a_sampled_answer_is_what_it_always_was(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.7, seed=3)
    answer = engine.generate("Why is the sky blue?", params)
    assert answer.token_ids == ids(SAMPLED)
    assert answer.text == SAMPLED_TEXT
