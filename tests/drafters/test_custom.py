"""Drafters from outside the package: the document's own one runs in every mode, and each mistake is one line."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import string
import time
from pathlib import Path
from typing import Any

import pytest
from lines import refusal

from amusd.answer import Generation
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, HardwareConfig, RunConfig, SamplingParams
from amusd.drafters.factory import LoadedDrafters, load_drafters
from amusd.engine import Engine
from amusd.settings import from_mapping, to_mapping
from launch.compose import compose_config
from tests.launch.processes import ROOT
from tests.launch.small_pair import PROMPT, save_pair

DOCUMENT = (ROOT / "docs" / "writing_a_drafter.md").read_text(encoding="utf-8")
CODE, POLICY, CHECK = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
(PHRASES,) = re.findall(r"^```text\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
(ASKED,) = re.findall(r'^amusd generate .* prompt="(.*)"$', DOCUMENT, re.MULTILINE)
NUM_TOKENS = 24
DECODINGS = {
    "synchronous": DecodingConfig(mode="synchronous", max_silence_seconds=60.0),
    "chain": DecodingConfig(policy="chain"),
    "auto": DecodingConfig(),
    "branching": DecodingConfig(policy="branching"),
}
OWN_POLICY = "a policy of one's own"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: the code of the document, and a small pair."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "phrases.py").write_text(CODE)
    (folder / "patient.py").write_text(POLICY)
    save_pair(folder)
    return folder


def engine_of(folder: Path, drafter: DrafterConfig) -> EngineConfig:
    overrides = ["target=hf", f"target.model={folder / 'target'}", "target.dtype=float32", "max_model_len=256"]
    config = compose_config([*overrides, "hardware=cpu", "max_num_seqs=2"]).engine(longest_block=4)
    return dataclasses.replace(config, drafters=(drafter,))


def answered(engine: Engine, **options: Any) -> Generation:
    return engine.generate(PROMPT, params_of(engine), **options)


def params_of(engine: Engine) -> SamplingParams:
    """Answers of capital letters: the model is random, and its tokens are bytes."""
    biases = tuple((token_id, 1000.0) for token_id in engine.tokenizer.encode(string.ascii_uppercase))
    return SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=biases)


@pytest.fixture(scope="module")
def plain(own: Path) -> Generation:
    with Engine.start(engine_of(own, DrafterConfig(kind="ngram"))) as engine:
        return answered(engine, decoding=DecodingConfig(mode="autoregressive"))


def test_the_drafter_of_the_document_is_exact_in_every_mode_and_helps(own: Path, plain: Generation) -> None:
    drafter = DrafterConfig(kind="custom", factory=f"{own / 'phrases.py'}:make", options={"path": str(own / "p.txt")})
    # the rest of this answer after its first tokens is a phrase; so is a text that never comes
    (own / "p.txt").write_text(f"never said\n{plain.text}\n")
    with Engine.start(engine_of(own, drafter)) as engine:
        answers = {name: answered(engine, decoding=decoding) for name, decoding in DECODINGS.items()}
        own_policy, deadline = DecodingConfig(policy=f"{own / 'patient.py'}:make"), time.monotonic() + 60.0
        answers[OWN_POLICY] = answered(engine, decoding=own_policy)
        while not answers[OWN_POLICY].metrics.num_accepted and time.monotonic() < deadline:  # it waits for half a pass
            answers[OWN_POLICY] = answered(engine, decoding=own_policy)
        several = engine.generate([PROMPT, PROMPT], params_of(engine))
    assert {name: answer.token_ids for name, answer in answers.items()} == dict.fromkeys(answers, plain.token_ids)
    assert [answer.token_ids for answer in several] == [plain.token_ids] * 2
    assert {answer.drafter for answer in answers.values()} == {"custom"}
    assert answers[OWN_POLICY].policy == own_policy.policy
    assert answers[OWN_POLICY].metrics.num_accepted
    assert answers["synchronous"].metrics.num_accepted >= NUM_TOKENS // 2


def test_the_check_of_the_document_runs(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own))
    (own / "check.py").write_text(CHECK)
    runpy.run_path(str(own / "check.py"))


NONSENSE = """
from amusd.drafters.base import Drafter

value = 5
class Names: make = staticmethod(lambda context: lambda number: [Drafter() for _ in range(number)])
def nothing(context): return None
def raises(context): raise ValueError("two\\nlines")
def too_few(context): return lambda number: [Drafter()]
def fails_later(context): return lambda number: 1 // 0
def no_arguments(): return Names.make(0)
def five(context): return lambda number: 5
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "nonsense.py").write_text(NONSENSE)
    return folder


def loaded(factory: str) -> LoadedDrafters:
    drafter = DrafterConfig(kind="custom", factory=factory)
    return load_drafters(EngineConfig(drafters=(drafter,), hardware=HardwareConfig(devices=("cpu", "cpu"))), "cpu")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("{folder}/nonsense.py:chain", "raises AttributeError: module 'own_nonsense' has no attribute 'chain'"),
        ("{folder}/nonsense.py:raises", "raises ValueError: two lines ({folder}/nonsense.py, line 7)"),
        ("{folder}/nonsense.py:nothing", "returns None; expected collections.abc.Callable"),
        ("{folder}/nonsense.py:five", "returns 5; expected collections.abc.Iterable"),
        ("{folder}/nonsense.py:too_few", "makes [<amusd.drafters.base.Drafter object"),
        ("{folder}/nonsense.py:fails_later", "raises ZeroDivisionError: integer division or modulo by zero ({folder}/"),
        ("{folder}/nonsense.py:no_arguments", "raises TypeError: no_arguments() takes 0 positional arguments"),
        ("{folder}/absent.py:make", "raises FileNotFoundError: "),
        ("nothing_such", "allowed: MODULE:FUNCTION, FILE.py:FUNCTION"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_it_is(factory: str, message: str, files: Path) -> None:
    factory, message = factory.format(folder=files), message.format(folder=files)
    line = refusal(lambda: loaded(factory).factories["custom"](3))
    assert line.startswith(f"drafter.factory={factory}: {message}")


def test_a_loaded_drafter_offers_what_its_factory_makes(files: Path) -> None:
    made = loaded(f"{files}/nonsense.py:Names.make").factories
    assert list(made) == ["custom"]
    assert len(made["custom"](3)) == 3


def test_the_command_line_names_it_and_its_options() -> None:
    config = compose_config(["drafter=a:c", "drafter.options.l=[1,a]", "drafter.options.m={k: 2.5}"])
    assert config.drafter == DrafterConfig(kind="custom", factory="a:c", options={"l": (1, "a"), "m": {"k": 2.5}})
    assert from_mapping(RunConfig, json.loads(json.dumps(to_mapping(config)))) == config
