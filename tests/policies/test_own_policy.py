"""A policy from outside the package: it is named as a drafter is, and each mistake is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from lines import refusal
from oracle import always_right
from runtime.pair import PROMPT, decoding, oracle, pair, params, reference

from amusd.config import DecodingConfig, SamplingParams, plugins
from amusd.errors import ConfigError
from amusd.policies.factory import make_policy

CODE = """
from amusd.policies.schedules import ContinuousPolicy

def chain(decoding, *, can_branch):
    limits = {"min_candidates": 1 + can_branch, "max_wait_passes": 1e6}
    return ContinuousPolicy(max_lookahead=decoding.max_lookahead, always_waits=True, **limits)
def wide(decoding, *, can_branch):
    return ContinuousPolicy(max_lookahead=4, fan_out=3, rows_per_step=4, min_candidates=0, max_wait_passes=0.0)
def blind(decoding, *, can_branch): return ContinuousPolicy(max_lookahead=0, min_candidates=0, max_wait_passes=0.0)
def backward(decoding, *, can_branch): return ContinuousPolicy(max_steps=-1, min_candidates=0, max_wait_passes=0.0)
def nothing(decoding, *, can_branch): return None
def raises(decoding, *, can_branch): raise KeyError("x")

class Dividing(ContinuousPolicy):
    __slots__ = ()
    def decide(self, view): return 1 // view.num_candidates
def divides(decoding, *, can_branch): return Dividing(min_candidates=0, max_wait_passes=0.0)
class Silent(ContinuousPolicy):
    __slots__ = ()
    def decide(self, view): return None
def decides(decoding, *, can_branch): return Silent(min_candidates=0, max_wait_passes=0.0)
from amusd.policies.base import Verify
class Wordy(ContinuousPolicy):
    __slots__ = ()
    def decide(self, view): return Verify("many")
def says(decoding, *, can_branch): return Wordy(min_candidates=0, max_wait_passes=0.0)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "mine.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "returns None; expected amusd.policies.base.Policy"),
        ("blind", "max_lookahead=0: allowed: 1 to 2147483647"),
        ("backward", "max_steps=-1: allowed: 0 to 2147483647"),
        ("raises", "raises KeyError: 'x' ("),
        ("absent", "raises AttributeError: module 'own_mine' has no attribute 'absent'"),
    ],
)
def test_a_mistake_is_one_line(name: str, message: str, file: Path) -> None:
    line = refusal(lambda: make_policy(DecodingConfig(policy=f"{file}:{name}")))
    assert line.startswith(f"policy={file}:{name}: {message.format(file=file)}")


def test_a_file_that_two_settings_name_is_run_once(tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text("def drafter(): pass\ndef policy(): return drafter\n")
    drafter = plugins.load_function("drafter.factory", f"{path}:drafter")
    assert plugins.load_function("policy", f"{path}:policy")() is drafter


def test_a_file_whose_name_begins_as_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_PACKAGE", tmp_path / "amusd")
    path = tmp_path / "amusd_mine.py"
    path.write_text("1 / 0")
    message = refusal(lambda: plugins.load_function("policy", f"{path}:make"))
    assert message == f"policy={path}:make: raises ZeroDivisionError: division by zero ({path}, line 1)"


def test_an_engine_keeps_to_it_and_the_answer_is_exact(file: Path) -> None:
    with pair({"oracle": oracle(60, always_right())}) as (engine, _):
        answer = engine.generate(PROMPT, params(60), decoding=decoding("asynchronous", policy=f"{file}:chain"))
        assert (*PROMPT, *answer.token_ids) == reference(60)
        assert answer.policy == f"{file}:chain"
        assert answer.metrics.num_accepted > 0
        answer = engine.generate(PROMPT, params(12), decoding=DecodingConfig(policy=f"{file}:wide"))
        assert (*PROMPT, *answer.token_ids) == reference(12)
        sampled = SamplingParams(max_new_tokens=4, temperature=1.0, acceptance="rejection")
        with pytest.raises(ConfigError, match=r":wide: not with sampling.acceptance=rejection"):
            engine.generate(PROMPT, sampled, decoding=DecodingConfig(policy=f"{file}:wide"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divides", "raises ZeroDivisionError: integer division or modulo by zero ({file}, line 16)"),
        ("decides", "returns None; expected amusd.policies.base.Verify or amusd.policies.base.Wait"),
        ("says", "num_candidates=many: expected a number"),
    ],
)
def test_a_mistake_amid_an_answer_ends_that_answer_alone(name: str, message: str, file: Path) -> None:
    with pair({"oracle": oracle(60, always_right())}, max_num_seqs=2) as (engine, _):
        other = engine.submit(PROMPT, params(20))
        schedule = DecodingConfig(policy=f"{file}:{name}")
        line = refusal(lambda: engine.generate(PROMPT, params(20), decoding=schedule))
        assert line == f"policy={file}:{name}: {message.format(file=file)}"
        assert (*PROMPT, *other.result().token_ids) == reference(20)
        assert engine.worker.sequences == []
