"""What each kind of drafter can do: one table, and what follows from it."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
from lines import refusal
from oracle import always_right
from runtime.pair import PROMPT, VOCAB_SIZE, oracle, pair, params, reference

from amusd.config import CAPABILITIES, Capabilities, RunConfig, capabilities
from amusd.settings import from_mapping
from tests.launch.processes import ROOT

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
