"""The configuration: one home of defaults, one line for every mistake, and what each kind of drafter can do."""

from __future__ import annotations

import dataclasses
import json
import os
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lines import refusal
from omegaconf import OmegaConf
from oracle import always_right
from runtime.pair import PROMPT, VOCAB_SIZE, oracle, pair, params, reference

from amusd.config import (
    CAPABILITIES,
    Capabilities,
    CompareConfig,
    DecodingConfig,
    DrafterConfig,
    EngineConfig,
    HardwareConfig,
    RunConfig,
    SamplingParams,
    TargetConfig,
    capabilities,
)
from amusd.errors import ConfigError
from amusd.settings import Settings, from_mapping, to_mapping
from tests.launch.processes import ROOT

SYNTHETIC = {"synthetic": "llama-8b"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"promt": "x"}, "promt=x: no such key; did you mean 'prompt'?"),
    ({"target": {"mode\nl": "x"}}, "target.mode l=x: no such key; did you mean 'target.model'?"),
    ({"max_lookahead": "many"}, "max_lookahead=many: expected a whole number from 1 to 2147483647"),
    ({"hardware": {"devices": ["gpu"]}}, "hardware.devices=['gpu']: expected a list, each cpu or cuda:NUMBER"),
    ({"hardware": {"devices": ["cpu", "cpu", "cuda:0"]}}, "hardware.devices=['cpu', 'cpu', 'cuda:0']: name one"),
    ({"mode": "sync"}, "mode=sync: expected autoregressive, synchronous, asynchronous"),
    ({"sampling": {"temperature": 1e-30}}, "sampling.temperature=1e-30: expected 0, or at least 1e-06"),
    ({"verify_breadth": 4}, "verify_breadth=4: expected a whole number from 1 to 3"),
    ({"min_candidates": 17}, "min_candidates=17: must be at most max_lookahead (16)"),
    ({"max_model_len": 2**20 + 1}, "max_model_len=1048577: expected a whole number from 2 to 1048576"),
    ({"compare": {"batch_sizes": []}}, "compare.batch_sizes=[]: expected a list, each a whole number from 1 to "),
    ({"sampling": {"top_p": float("nan")}}, "sampling.top_p=nan: expected a number above 0 and up to 1"),
    ({"policy": "branchin"}, "policy=branchin: allowed: auto, chain, windowed, branching; did you mean 'branching'?"),
    ({"compare": {"drafters": ["hf:/a", "hf:/b"]}}, "compare.drafters=['hf:/a', 'hf:/b']: names hf twice"),
    ({"compare": {"drafters": ["auto", "embedded"]}}, "drafter.kind=embedded: two of this kind"),
    ({"target": "\ud800"}, "target=\ud800: expected a mapping"),
    ({"drafter": {"options": range(3)}}, "drafter.options=range(0, 3): expected a mapping"),
    ({"accept": 0.5}, "accept=0.5: only allowed with drafter=synthetic"),
    ({"drafter": {"kind": "hf"}}, "drafter.model=None: required with drafter=hf"),
    ({"drafter": {"model": "/m"}}, "drafter.model=/m: only allowed with hf, eagle, medusa, dflash, cascade, not with"),
    ({"drafter": {"kind": "custom", "factory": "3"}}, "drafter.factory=3: allowed: MODULE:FUNCTION, FILE.py:FUNC"),
    ({"drafter": {"num_layers": 3}}, "drafter.num_layers=3: only allowed with drafter=self, not with drafter=embedded"),
    ({"drafter": {"kind": "self"}, "hardware": SYNTHETIC}, "drafter.kind=self: with hardware.synthetic allowed: "),
    ({"transport": {"kind": "shared_memory", "address": "ipc:///x"}}, "transport.address=ipc:///x: not with"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[message[:48] for _, message in MISTAKES])
def test_a_mistake_is_one_line_that_names_key_and_value(values: dict[str, Any], message: str) -> None:
    line = refusal(lambda: from_mapping(RunConfig, values))
    assert line.startswith(message)
    assert len(line) < 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["auto", "hf", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
FIELDS: list[tuple[type[Settings], str]] = [
    (type(group), field.name)
    for group in (RunConfig(), *(value for value in vars(RunConfig()).values() if isinstance(value, Settings)))
    for field in dataclasses.fields(group)
]


@given(where=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_makes_a_configuration_to_write_or_an_error(where: tuple[type[Settings], str], value: Any) -> None:
    cls, name = where
    try:
        config = from_mapping(cls, {name: value})
    except ConfigError as error:
        message = str(error)
    else:
        message, again = "", from_mapping(cls, to_mapping(config))
        assert repr(again) == repr(config)  # not ==, since NaN may be an option of an own drafter
    assert "\n" not in message


def test_the_defaults_are_plain_values_for_hydra() -> None:
    plain = to_mapping(RunConfig())
    assert OmegaConf.to_container(OmegaConf.create(plain)) == plain
    assert from_mapping(RunConfig, plain) == RunConfig()


def test_a_path_need_not_be_text_and_a_prompt_must() -> None:
    path = os.fsdecode(b"/models/\xff")
    values = {"target": {"kind": "hf", "model": path}, "run_dir": path, "out": path, "workload": {"path": path}}
    config = from_mapping(RunConfig, values)
    assert from_mapping(RunConfig, json.loads(json.dumps(to_mapping(config)))) == config
    with pytest.raises(ConfigError, match="prompt=a\udcff: not UTF-8 text"):
        RunConfig(prompt="a\udcff")


def test_what_python_and_the_command_line_have_other_forms_for_is_converted() -> None:
    made = SamplingParams(
        temperature=1,
        seed=np.int64(3),  # type: ignore[arg-type]
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        stop="end",  # type: ignore[arg-type]
        logit_bias={3: 1, 4: -2.5},  # type: ignore[arg-type]
    )
    assert made == SamplingParams(temperature=1.0, seed=3, top_p=0.5, stop=("end",), logit_bias=((3, 1.0), (4, -2.5)))
    assert (type(made.temperature), type(made.seed)) == (float, int)
    assert DecodingConfig(mode="synchronous").mode == "synchronous"  # type: ignore[arg-type]
    assert EngineConfig(hardware={"num_threads": 2}).hardware == HardwareConfig(num_threads=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "synthetic", "expected"),
    [
        (TargetConfig(), None, "embedded"),
        (TargetConfig(kind="hf", model="/m"), None, "ngram"),
        (TargetConfig(), "llama-8b", "synthetic"),
    ],
)
def test_where_no_drafter_is_named_one_fits_the_target(target: TargetConfig, synthetic: Any, expected: str) -> None:
    config = RunConfig(target=target, hardware=HardwareConfig(synthetic=synthetic), drafter=DrafterConfig(kind="auto"))
    assert config.drafter.kind == expected


def test_plain_decoding_has_no_draft_but_where_a_request_may_ask_for_one() -> None:
    plain = RunConfig(mode="autoregressive")
    assert [len(plain.engine_for(command).drafters) for command in ("generate", "compare", "serve")] == [0, 0, 1]


def test_accept_reaches_the_synthetic_drafter_alone_and_wins_over_its_own() -> None:
    def accepted(**values: Any) -> list[float]:
        return [drafter.accept for drafter in from_mapping(RunConfig, values).engine().drafters]

    synthetic = {"kind": "synthetic", "accept": 0.6}
    assert accepted(drafter=synthetic) == [0.6]
    assert accepted(drafter=synthetic, accept=0) == [0]
    assert accepted(compare={"drafters": ["ngram", "synthetic"]}, accept=0.7) == [0.8, 0.7]


def test_drafters_to_compare_may_name_their_models_or_be_the_one_that_fits() -> None:
    compared = CompareConfig(drafters=("auto", "ngram", "eagle:/a:b"))
    drafters = RunConfig(drafter=DrafterConfig(min_lookup=0), compare=compared).engine().drafters
    assert [one.kind for one in drafters] == ["embedded", "ngram", "eagle"]
    assert (drafters[0].min_lookup, drafters[1].min_lookup, drafters[2].model) == (0, None, "/a:b")


# What each kind of drafter can do: one table, and what follows from it


BESIDE = Capabilities(runs_ahead=False, needs_features=True, has_model=False)
REFUSAL = "drafter=ngram: cannot run ahead of the target, whose hidden states of the committed text it needs"
REFUSAL += ": use mode=synchronous"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    table = MappingProxyType({**CAPABILITIES, "ngram": BESIDE, "oracle": BESIDE})
    monkeypatch.setattr(capabilities, "CAPABILITIES", table)
    monkeypatch.setattr("amusd.config.engine.CAPABILITIES", table)


def test_a_document_shows_the_table() -> None:
    words = {True: "yes", False: "no"}
    names = [field.name for field in dataclasses.fields(Capabilities) if field.type == "bool"]
    tables = {kind: [words[getattr(can, name)] for name in names] for kind, can in CAPABILITIES.items()}
    rows = [f"| {kind} | {' | '.join(said)} |" for kind, said in tables.items()]
    lines = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").splitlines()
    header = "| drafter | tree | runs ahead | needs features | has a model | checkpoint | any target |"
    start = lines.index(header)
    assert lines[start + 2 : start + 2 + len(rows) + 1] == [*rows, ""]
    listed = {line.split("`")[1] for line in lines if line.startswith("| `") and "drafter=" not in line}
    assert listed == set(CAPABILITIES)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_command_that_would_run_ahead_is_refused_with_the_alternative(command: str) -> None:
    values = {"drafter": {"kind": "ngram"}}
    assert refusal(lambda: from_mapping(RunConfig, values).engine_for(command)) == REFUSAL
    engine = from_mapping(RunConfig, {**values, "mode": "synchronous"}).engine_for(command)
    assert [drafter.kind for drafter in engine.drafters] == ["ngram"]


@pytest.mark.usefixtures("beside")
def test_a_request_to_run_ahead_is_refused_and_the_default_is_to_take_turns() -> None:
    with pair({"oracle": oracle(12, always_right())}) as (engine, _):
        answer = engine.generate(PROMPT, params(12))
        assert (answer.mode, answer.drafter) == ("synchronous", "oracle")
        assert (*PROMPT, *answer.token_ids) == reference(12)
        line = refusal(lambda: engine.generate(PROMPT, params(12), decoding=RunConfig().decoding()))
        assert line == REFUSAL.replace("ngram", "oracle")
    assert max(answer.token_ids) < VOCAB_SIZE
