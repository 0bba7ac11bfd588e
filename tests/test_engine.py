"""The facade, the comparison and the commands, over a pair of table models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock, call

import numpy as np
import pytest
from lines import logged, refusal
from models import tiny
from oracle import always_right, always_wrong
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, oracle, pair, params, plain_engine, reference
from table_model import TableTokenizer

from amusd.commands import run_command
from amusd.commands.job import Job
from amusd.config import DecodingConfig, EngineConfig, RunConfig, SamplingParams, TargetConfig
from amusd.console import Console
from amusd.drafters.synthetic import right_with_probability
from amusd.engine import Engine
from amusd.errors import ConfigError, ContextLengthError
from amusd.settings import from_mapping
from amusd.tracing.recorder import Recorder
from amusd.types import Mode
from amusd.workload import prompts_of

TEXT = "deafbead"
FACTORY, RIGHT = oracle(60, right_with_probability(0.7, 1)), oracle(60, always_right())


def run_config(**changes: object) -> RunConfig:
    own = {"drafter": {"kind": "ngram"}, "compare": {"synchronous_lengths": [2, 4]}, "max_lookahead": 8}
    return from_mapping(RunConfig, {**own, **changes})


def test_the_counts_of_an_engine_add_up_what_answers_count() -> None:
    with pair({"ngram": FACTORY}, pass_seconds=0.005) as (engine, draft):
        found = [engine.generate(PROMPT, params(20), decoding=decoding(mode)).metrics for mode in get_args(Mode)]
        assert (engine.draft.presence, engine.draft.failure) == ("present", None)
        counts = replace(engine.worker.counts)
        for name in ("num_passes", "num_tokens", "num_drafts", "num_verified", "num_accepted", "num_tokens_alone"):
            assert getattr(counts, name) == sum(getattr(metrics, name) for metrics in found), name
        assert counts.num_accepted > 0
        draft.link.kill()
        lost = engine.generate(PROMPT, params(20), decoding=decoding("asynchronous")).metrics
        assert engine.draft.presence == "failed"  # this engine starts no other one
        assert engine.draft.failure is not None
        assert engine.worker.counts.num_tokens_alone == counts.num_tokens_alone + lost.num_tokens_alone


def test_generate_streams_the_text_and_leaves_a_result_also_without_its_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(prompt=TEXT, sampling={"max_new_tokens": 12})

    def generate(engine: Engine) -> tuple[int, dict[str, Any]]:
        asked = prompts_of("generate", config)
        code = run_command("generate", Job(config, Console(), tmp_path, asked, lambda: engine))
        return code, json.loads((tmp_path / "result.json").read_text())

    (tmp_path / "events").mkdir()
    with logged() as lines, pair({"ngram": oracle(60, always_wrong())}) as (engine, draft):
        code, result = generate(engine)
        expected = engine.tokenizer.decode(reference(12, tuple(engine.tokenizer.encode(TEXT)))[len(TEXT) :])
        assert (code, result["text"], capsys.readouterr().out) == (0, expected, expected + "\n")
        assert lines[-1].startswith("asynchronous: 12 tokens (length)")
        draft.link.kill()
        code, result = generate(engine)
        assert (code, result["finish_reason"]) == (1, "length")
        assert lines[-1].startswith("the draft was lost and the target went on alone")
        engine.worker.recorder.is_whole = False  # nor are the events
        assert generate(engine)[0] == 2


def test_a_target_that_ranks_cannot_share_is_refused_before_anybody_is_called(tmp_path: Path) -> None:
    tiny.tiny_config("LlamaConfig").save_pretrained(tmp_path)  # with two key heads, and without weights
    config = EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path)), target_tensor_parallel_size=3)
    drafts, rendezvous = Mock(), Mock()
    with pytest.raises(ConfigError, match=r"^target_tensor_parallel_size=3: .* allowed: 1 to 2$"):
        Engine.connect(config, drafts, Recorder("target"), rendezvous)
    assert drafts.mock_calls == rendezvous.mock_calls == [call.stop()]


# Lists of prompts, defaults, and the mistakes of callers from Python

TURN = "expected a mapping with the texts 'role' and 'content'"
PROMPTS = "expected a text, turns of a conversation, or token ids"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1], []], "prompts[1]: prompt: has no tokens"),
        ("a\ud800", "prompt: half of a surrogate pair is no text"),
        ([10**30], "prompt: token ids must be in [0, 50)"),
        ([1] * 500, "prompt: 500 tokens leave no room in a context of 400 (max_model_len)"),
        ([{"role": "user"}], f"prompt[0]={{'role': 'user'}}: {TURN}"),
        ([{"role": "user", "content": "a"}, "b"], f"prompt[1]=b: {TURN}"),
        (["a", 5], f"prompts[1]: prompt=5: {PROMPTS}"),
        ([1.5], f"prompt=[1.5]: {PROMPTS}"),
        ({"role": "user", "content": "a"}, f"prompt={{'role': 'user', 'content': 'a'}}: {PROMPTS}"),
    ],
)
def test_a_prompt_that_cannot_be_is_one_line(prompt: Any, message: str) -> None:
    assert refusal(lambda: plain_engine().generate(prompt)) == message


def test_a_prompt_of_a_list_that_is_too_long_is_the_error_that_it_is_alone() -> None:
    with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: prompt: 500 tokens leave no room"):
        plain_engine().generate([[1], [1] * 500])


@pytest.mark.parametrize("prompt", ["aY", [{"role": "user", "content": "aY"}]], ids=["text", "turns"])
def test_a_text_with_a_token_that_the_model_lacks_names_it(prompt: Any) -> None:
    engine = plain_engine()
    engine.tokenizer = TableTokenizer(VOCAB_SIZE + 1)
    message = "prompt: its text has the tokenizer's token b'Y', which the model lacks"
    assert refusal(lambda: engine.generate(prompt)) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"temperature": 1}}, "params={'temperature': 1}: expected SamplingParams"),
        ({"params": {}}, "params={}: expected SamplingParams"),
        ({"decoding": "synchronous"}, "decoding=synchronous: expected DecodingConfig"),
        ({"reference": 5}, "reference=5: expected token ids"),
        ({"drafter": 5}, "drafter=5: expected str"),
        ({"drafter": "ngram"}, "drafter=ngram: this engine has none"),
    ],
)
def test_an_argument_of_another_kind_is_one_line(options: dict[str, Any], message: str) -> None:
    assert refusal(lambda: plain_engine().generate("a", **options)) == message


@pytest.mark.parametrize("models", [{"target": 5}, {"target": None}, {"drafter": {"kind": "ngram"}}], ids=str)
def test_a_model_of_another_kind_is_one_line(models: dict[str, Any]) -> None:
    [(name, value)] = models.items()
    assert refusal(lambda: Engine.launch(**models)) == f"{name}={value}: expected a kind, a folder or a hub name"


def test_a_reference_that_no_model_writes_is_one_line_and_costs_no_draft() -> None:
    with pair({"oracle": RIGHT}) as (engine, _):
        message = refusal(lambda: engine.generate(PROMPT, params(3), reference=[-1]))
        assert (message, engine.draft.presence) == ("reference: token ids must be in [0, 50)", "present")


@pytest.mark.parametrize("kinds", [[], ["ngram"]], ids=str)
def test_drafters_that_are_named_among_the_settings_are_those_of_the_engine(
    kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "start", lambda config: config)
    with logged() as lines:
        config: Any = Engine.launch(drafters=[{"kind": kind} for kind in kinds])
    assert ([drafter.kind for drafter in config.drafters], lines) == (kinds, [])


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
    with pair(dict.fromkeys(("oracle", "synthetic", "cascade"), RIGHT)) as (engine, _):
        found = refusal(lambda: engine.generate("a", asked, decoding=decoding, drafter=drafter))
        assert found.startswith(message)


def test_a_list_of_prompts_gives_the_list_of_their_answers() -> None:
    with pair({"oracle": RIGHT}) as (engine, _):
        letters = engine.tokenizer.decode(PROMPT)
        answers = engine.generate([letters, list(PROMPT), [{"role": "user", "content": letters}]], params(7))
        assert [answer.token_ids for answer in answers] == [reference(7)[len(PROMPT) :]] * 3
        answers = engine.generate((letters, letters), [params(2), params(5)])
        assert [len(answer.token_ids) for answer in answers] == [2, 5]
        assert engine.generate([]) == []
        message = refusal(lambda: engine.generate([letters, letters], [params(2)]))
    assert message == "params: 1 for 2 prompts; give one for all, or one for each"


def test_an_engine_without_a_drafter_decodes_plainly() -> None:
    answer = plain_engine().generate(PROMPT, params(5))
    assert (answer.mode, answer.token_ids) == ("autoregressive", reference(5)[len(PROMPT) :])
    message = refusal(lambda: plain_engine().generate(PROMPT, decoding=DecodingConfig(mode="synchronous")))
    assert message == "mode=synchronous: this engine has no drafter; allowed: autoregressive"
