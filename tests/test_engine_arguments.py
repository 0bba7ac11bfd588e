"""What a caller from Python can get wrong is one line, whatever its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import always_right
from runtime.pair import PROMPT, oracle, pair, params, reference, target_model
from table_model import TableTokenizer

from amusd.config import DecodingConfig, EngineConfig, SamplingParams
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_worker import TargetWorker
from amusd.tracing.recorder import Recorder
from amusd.types import Mode

FACTORIES = {"oracle": oracle(60, always_right())}


def lone_engine() -> Engine:
    """One without a drafter."""
    model, recorder = target_model(), Recorder("target")
    return Engine(TargetWorker(model, recorder, DraftClient(recorder, model.vocab_size)), TableTokenizer(50))


def one_line_of(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: expected text, a list of token ids, or a conversation, not NoneType"),
        (torch.tensor([1, 2]), "prompt: expected text, a list of token ids, or a conversation, not Tensor"),
        ({"role": "user", "content": "a"}, "prompt: expected text, a list of token ids, or a conversation, not dict"),
        ([1.5, 2], "prompt=[1.5, 2]: token ids are whole numbers"),
        (["a", 1], "prompts[1]: prompt: expected text, a list of token ids, or a conversation, not int"),
        ([[1], []], "prompts[1]: prompt: has no tokens"),
        ("a\ud800", "prompt: character 1 is half of a surrogate pair, which is no text"),
        ([{"role": "user"}], "prompt: turn 0: expected a mapping with `role` and `content`"),
        ([{"role": "user", "content": "a"}, 3], "prompt: turn 1: expected a mapping with `role` and `content`"),
        ([{"role": "user", "content": [{"type": "text"}]}], "prompt: turn 0: content: expected text, not list"),
        ([10**30], "prompt: token ids must be in [0, 50)"),
    ],
)
def test_a_prompt_that_is_none_is_one_line(prompt: Any, message: str) -> None:
    assert one_line_of(lambda: lone_engine().generate(prompt)).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"max_new_tokens": 3}}, "params={'max_new_tokens': 3}: expected SamplingParams, not dict"),
        ({"params": [SamplingParams()]}, "params=[SamplingParams("),
        ({"decoding": "synchronous"}, "decoding=synchronous: expected DecodingConfig, not str"),
        ({"drafter": 3, "decoding": DecodingConfig()}, "drafter=3: expected str, not int"),
        ({"drafter": "", "decoding": DecodingConfig()}, "drafter=: this engine has oracle"),
    ],
)
def test_an_argument_of_the_wrong_type_is_one_line(options: dict[str, Any], message: str) -> None:
    with pair(FACTORIES) as (engine, _):
        assert one_line_of(lambda: engine.generate("a", **options)).startswith(message)


def test_a_list_of_prompts_gives_the_list_of_their_answers() -> None:
    with pair(FACTORIES) as (engine, _):
        letters = engine.tokenizer.decode(PROMPT)
        answers = engine.generate([letters, list(PROMPT), [{"role": "user", "content": letters}]], params(7))
        assert [answer.token_ids for answer in answers] == [reference(7)[len(PROMPT) :]] * 3
        answers = engine.generate((letters, letters), [params(2), params(5)])
        assert [len(answer.token_ids) for answer in answers] == [2, 5]
        assert engine.generate([]) == []
        message = one_line_of(lambda: engine.generate([letters, letters], [params(2)]))
    assert message == "params: 1 for 2 prompts; give one for all, or one for each"


def test_an_engine_without_a_drafter_decodes_plainly() -> None:
    answer = lone_engine().generate(PROMPT, params(5))
    assert (answer.mode, answer.token_ids) == (Mode.AUTOREGRESSIVE, reference(5)[len(PROMPT) :])
    message = one_line_of(lambda: lone_engine().generate(PROMPT, decoding=DecodingConfig(mode=Mode.SYNCHRONOUS)))
    assert message == "mode=synchronous: this engine has no drafter; allowed: autoregressive"


def test_a_bias_for_a_token_that_the_model_lacks_says_which_it_has() -> None:
    message = one_line_of(lambda: lone_engine().generate(PROMPT, SamplingParams(logit_bias={999999: 5})))
    assert message == "sampling.logit_bias=[999999, 5.0]: the model has no such token; its ids are 0 to 49"


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda: Engine.launch(max_model_length=5), "max_model_length: no such key; did you mean 'max_model_len'?"),
        (lambda: Engine.launch(max_model_len="long"), "max_model_len=long: expected a whole number from 2"),
        (lambda: Engine.launch(hardware="cpu"), "hardware=cpu: expected keys of its own: devices, "),
        (lambda: Engine.launch(hardware={"device": "cpu"}), "hardware.device: no such key; did you mean 'devices'?"),
        (lambda: Engine.launch(target=None), "target=None: expected str, not NoneType"),
        (lambda: Engine.launch(drafter=5), "drafter=5: expected str, not int"),
        (lambda: Engine.start({"target": "embedded"}), "config={'target': 'embedded'}: expected EngineConfig"),
        (lambda: EngineConfig(drafters="ngram"), "drafters=ngram: expected a list of keys of its own: kind, "),
        (lambda: SamplingParams(temperature=-1), "sampling.temperature=-1: expected a number from 0 to 1000000"),
        (lambda: SamplingParams(max_new_tokens=None), "sampling.max_new_tokens=None: expected a whole number from 1"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(launch: Callable[[], Any], message: str) -> None:
    found = one_line_of(launch)
    assert found.startswith(message)
    assert len(found) < 400
