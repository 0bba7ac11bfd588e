"""Lists of prompts, defaults, and the mistakes of callers from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import always_right
from runtime.pair import PROMPT, VOCAB_SIZE, oracle, pair, params, plain_engine, reference
from table_model import TableTokenizer

from amusd.config import DecodingConfig, SamplingParams
from amusd.engine import Engine
from amusd.errors import ConfigError

FACTORY = oracle(60, always_right())
TURN = "expected a mapping with the texts 'role' and 'content'"
PROMPTS = "expected a text, turns of a conversation, or token ids"


def one_line_of(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1], []], "prompts[1]: prompt: has no tokens"),
        ("a\ud800", "prompt: half of a surrogate pair is no text"),
        ([10**30], "prompt: token ids must be in [0, 50)"),
        ([1] * 500, "prompt: 500 tokens leave no room in a context of 400 (max_model_len)"),
        ([{"role": "user"}], f"prompt[0]={{'role': 'user'}}: {TURN}"),
        ([{"role": "user", "content": 5}], f"prompt[0]={{'role': 'user', 'content': 5}}: {TURN}"),
        ([{"role": "user", "content": "a"}, "b"], f"prompt[1]=b: {TURN}"),
        (["a", 5], f"prompts[1]: prompt=5: {PROMPTS}"),
        (None, f"prompt=None: {PROMPTS}"),
        ([1.5], f"prompt=[1.5]: {PROMPTS}"),
        (b"ab", f"prompt=b'ab': {PROMPTS}"),
        ({"role": "user", "content": "a"}, f"prompt={{'role': 'user', 'content': 'a'}}: {PROMPTS}"),
    ],
)
def test_a_prompt_that_cannot_be_is_one_line(prompt: Any, message: str) -> None:
    assert one_line_of(lambda: plain_engine().generate(prompt)) == message


@pytest.mark.parametrize("prompt", ["aY", [{"role": "user", "content": "aY"}]], ids=["text", "turns"])
def test_a_text_with_a_token_that_the_model_lacks_names_it(prompt: Any) -> None:
    engine = plain_engine()
    engine.tokenizer = TableTokenizer(VOCAB_SIZE + 1)
    message = "prompt: its text has the tokenizer's token b'Y', which the model lacks"
    assert one_line_of(lambda: engine.generate(prompt)) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"temperature": 1}}, "params={'temperature': 1}: expected SamplingParams"),
        ({"params": {}}, "params={}: expected SamplingParams"),
        ({"decoding": "synchronous"}, "decoding=synchronous: expected DecodingConfig"),
        ({"reference": 5}, "reference=5: expected token ids"),
    ],
)
def test_an_argument_of_another_kind_is_one_line(options: dict[str, Any], message: str) -> None:
    assert one_line_of(lambda: plain_engine().generate("a", **options)) == message


@pytest.mark.parametrize("models", [{"target": 5}, {"target": None}, {"drafter": {"kind": "ngram"}}], ids=str)
def test_a_model_of_another_kind_is_one_line(models: dict[str, Any]) -> None:
    [(name, value)] = models.items()
    assert one_line_of(lambda: Engine.launch(**models)) == f"{name}={value}: expected a kind, a folder or a hub name"


def test_an_array_is_token_ids() -> None:
    assert plain_engine().generate(np.array(PROMPT), params(3)).token_ids == reference(3)[len(PROMPT) :]


@pytest.mark.parametrize(
    ("drafter", "policy", "rule", "message"),
    [
        ("oracle2", "auto", "auto", "drafter=oracle2: this engine has oracle, synthetic, cascade; did you mean "),
        ("synthetic", "auto", "rejection", "drafter=synthetic: has to be told "),
        ("oracle", "branching", "rejection", "policy=branching: not with sampling.acceptance=rejection"),
        ("cascade", "branching", "auto", "policy=branching: drafter=cascade drafts no trees; allowed: embedded, "),
    ],
)
def test_a_drafter_that_cannot_be_is_one_line(drafter: str, policy: str, rule: Any, message: str) -> None:
    asked, decoding = SamplingParams(temperature=1, acceptance=rule), DecodingConfig(policy=policy)
    with pair(dict.fromkeys(("oracle", "synthetic", "cascade"), FACTORY)) as (engine, _):
        found = one_line_of(lambda: engine.generate("a", asked, decoding=decoding, drafter=drafter))
        assert found.startswith(message)


def test_a_list_of_prompts_gives_the_list_of_their_answers() -> None:
    with pair({"oracle": FACTORY}) as (engine, _):
        letters = engine.tokenizer.decode(PROMPT)
        answers = engine.generate([letters, list(PROMPT), [{"role": "user", "content": letters}]], params(7))
        assert [answer.token_ids for answer in answers] == [reference(7)[len(PROMPT) :]] * 3
        answers = engine.generate((letters, letters), [params(2), params(5)])
        assert [len(answer.token_ids) for answer in answers] == [2, 5]
        assert engine.generate([]) == []
        message = one_line_of(lambda: engine.generate([letters, letters], [params(2)]))
    assert message == "params: 1 for 2 prompts; give one for all, or one for each"


def test_an_engine_without_a_drafter_decodes_plainly() -> None:
    answer = plain_engine().generate(PROMPT, params(5))
    assert (answer.mode, answer.token_ids) == ("autoregressive", reference(5)[len(PROMPT) :])
    message = one_line_of(lambda: plain_engine().generate(PROMPT, decoding=DecodingConfig(mode="synchronous")))
    assert message == "mode=synchronous: this engine has no drafter; allowed: autoregressive"
