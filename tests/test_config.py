"""The configuration: one home of defaults, and one line for every mistake."""

from __future__ import annotations

from typing import Any

import pytest

from amusd.config import CompareConfig, DrafterConfig, EngineConfig, HardwareConfig, RunConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.settings import from_mapping, nearest, to_mapping
from amusd.types import Mode

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"promt": "x"}, "promt: no such key; did you mean 'prompt'?"),
    ({"sampling": {"max_new_token": 1}}, "sampling.max_new_token: no such key; did you mean 'max_new_tokens'?"),
    ({"mode": "sync"}, "mode=sync: allowed: autoregressive, synchronous, asynchronous; did you mean 'synchronous'?"),
    ({"bench": {"widths": [1, 0]}}, "bench.widths=[1, 0]: name at least one, from 1"),
    (
        {"drafter": {"kind": "ngrams"}},
        (
            "drafter.kind=ngrams: allowed: auto, embedded, hf, eagle, medusa, dflash, cascade, ngram, self, synthetic, "
            "custom; did you mean 'ngram'?"
        ),
    ),
    (
        {"hardware": {"synthetic": "llama-8b"}, "drafter": {"kind": "embedded"}},
        "drafter=embedded: does not fit hardware.synthetic=llama-8b; allowed: ",
    ),
    (
        {"hardware": {"synthetic": "llama-8b"}, "target": {"kind": "hf", "model": "/m"}},
        "hardware.synthetic=llama-8b: not with target=hf",
    ),
    ({"drafter": {"kind": "synthetic", "accept": 1.01}}, "drafter.accept=1.01: must be between 0 and 1"),
    ({"accept": 0.5}, "accept=0.5: only allowed with drafter=synthetic"),
    (
        {"drafter": {"kind": "synthetic"}, "target": {"kind": "hf", "model": "/m"}},
        "drafter.shape: required with target=hf; allowed: smollm2-135m, ",
    ),
    ({"max_lookahead": "many"}, "max_lookahead=many: expected a whole number"),
    ({"sampling": 3}, "sampling=3: has keys of its own: temperature, top_k, top_p, "),
    ({"sampling": {"temperature": -0.5}}, "sampling.temperature=-0.5: must be at least 0"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature=nan: must be finite"),
    ({"sampling": {"logit_bias": [[-1, 2]]}}, "sampling.logit_bias=[-1, 2.0]: must be a token id"),
    (
        {"sampling": {"temperature": 1, "acceptance": "greedy"}},
        "sampling.acceptance=greedy: at sampling.temperature=1 allowed: auto, matching",
    ),
    ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens=0: must be at least 1"),
    ({"sampling": {"stop": ["a", ""]}}, "sampling.stop=['a', '']: a stop string must not be empty"),
    ({"min_candidates": 17}, "min_candidates=17: must be at most max_lookahead (16)"),
    ({"fan_out": 4097}, "fan_out=4097: must be at most 4096"),
    ({"max_lookahead": 1 << 70}, "max_lookahead=1180591620717411303424: must be below 2^31"),
    ({"policy": "branchin"}, "policy=branchin: allowed: auto, chain, windowed, branching; did you mean 'branching'?"),
    ({"compare": {"policies": ["chain", "tree"]}}, "compare.policies=tree: allowed: auto, chain, windowed, branching"),
    ({"draft_timeout_seconds": 0}, "draft_timeout_seconds=0.0: must be above 0"),
    ({"max_silence_seconds": 0}, "max_silence_seconds=0.0: must be above 0"),
    ({"target": {"kind": "hf"}}, "target.model: required with target=hf"),
    (
        {"drafter": {"model": "/m"}},
        (
            "drafter.model=/m: only allowed with drafter=hf or drafter=eagle or drafter=medusa or drafter=dflash "
            "or drafter=cascade, not with drafter=embedded"
        ),
    ),
    ({"drafter": {"num_layers": 3}}, "drafter.num_layers=3: only allowed with drafter=self, not with drafter=embedded"),
    ({"drafter": {"min_lookup": 13}}, "drafter.min_lookup=13: must be between 0 and 12"),
    (
        {"drafter": {"kind": "cascade"}, "target": {"kind": "hf", "model": "/m"}},
        "drafter.model: required with drafter=cascade and target=hf",
    ),
    (
        {"drafter": {"kind": "cascade", "model": "/m", "inner": "synthetic"}},
        "drafter.inner=synthetic: allowed: ngram, embedded, or a folder or hub name of a transformers checkpoint",
    ),
    ({"hardware": {"devices": ["cpu"]}}, "hardware.devices=['cpu']: name two"),
    (
        {"hardware": {"devices": ["cuda:0", "cuda:1"]}, "target_tensor_parallel_size": 2},
        "hardware.devices=['cuda:0', 'cuda:1']: name 3: the target's 2, the draft's",
    ),
    ({"compare": {"drafters": ["hf:/a", "hf:/b"]}}, "compare.drafters=['hf:/a', 'hf:/b']: names hf twice"),
    ({"compare": {"drafters": ["eagel:/a"]}}, "compare.drafters=eagel:/a: allowed: embedded, hf, eagle, "),
    ({"compare": {"synchronous_lengths": [2, 0]}}, "compare.synchronous_lengths=[2, 0]: name at least one length"),
    ({"max_verify_width": 4, "mode": "synchronous"}, "max_verify_width=4: must be at least 5: 4 candidates"),
    ({"max_num_seqs": 4097}, "max_num_seqs=4097: must be between 1 and 4096"),
    ({"startup_timeout_seconds": 0}, "startup_timeout_seconds=0.0: must be above 0"),
    ({"transport": {"kind": "shared_memory", "address": "ipc:///x"}}, "transport.address=ipc:///x: not with"),
    (
        {"transport": {"kind": "gloo", "address": "tcp://10.0.0.1:1", "keys": "/k"}},
        "transport.keys=/k: protects ZeroMQ's links, not those of transport=gloo",
    ),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[message[:48] for _, message in MISTAKES])
def test_a_mistake_is_one_line_that_names_key_and_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(RunConfig, values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_plain_values_and_back_give_the_same_configuration() -> None:
    config = from_mapping(
        RunConfig,
        {
            "prompt": "a\nb",
            "mode": "synchronous",
            "target": {"kind": "hf", "model": "/m"},
            "sampling": {"stop": ["x", "y"], "max_new_tokens": 3},
            "hardware": {"devices": ["cpu", "cpu"]},
            "compare": {"synchronous_lengths": [1, 2]},
            "max_verify_width": 16,
        },
    )
    assert config != RunConfig()
    assert from_mapping(RunConfig, to_mapping(config)) == config
    assert from_mapping(RunConfig, to_mapping(RunConfig())) == RunConfig()


@pytest.mark.parametrize(
    ("named", "target", "synthetic", "expected"),
    [
        ("auto", TargetConfig(), None, "embedded"),
        ("auto", TargetConfig(kind="hf", model="/m"), None, "ngram"),
        ("auto", TargetConfig(), "llama-8b", "synthetic"),
        ("embedded", TargetConfig(kind="hf", model="/m"), None, "embedded"),
    ],
)
def test_where_no_drafter_is_named_it_is_one_that_fits_the_target(
    named: Any, target: TargetConfig, synthetic: Any, expected: str
) -> None:
    hardware, drafter = HardwareConfig(synthetic=synthetic), DrafterConfig(kind=named)
    assert RunConfig(target=target, hardware=hardware, drafter=drafter).drafter.kind == expected
    assert [one.kind for one in EngineConfig(target=target, hardware=hardware, drafters=(drafter,)).drafters] == [
        expected
    ]


def test_a_cascade_without_a_model_has_the_embedded_draft_in_the_middle_and_a_lookup_inside() -> None:
    assert [stage.kind for stage in DrafterConfig(kind="cascade").stages] == ["embedded", "ngram"]


def test_numbers_become_what_the_key_holds() -> None:
    config = from_mapping(RunConfig, {"max_wait_passes": 2, "prompt": 7, "sampling": {"stop": "one"}})
    assert (config.max_wait_passes, config.prompt, config.sampling.stop) == (2.0, "7", ("one",))
    assert isinstance(config.max_wait_passes, float)


@pytest.mark.parametrize("name", ["min_tokens", "top_k", "max_length", "presence_penalty"])
def test_a_name_with_another_meaning_is_not_suggested(name: str) -> None:
    assert nearest(name, ["max_tokens", "top_p", "max_completion_tokens", "frequency_penalty"]) == ""


def test_accept_reaches_the_synthetic_drafter_alone_and_wins_over_its_own() -> None:
    def accepted(**values: Any) -> list[float]:
        return [drafter.accept for drafter in from_mapping(RunConfig, values).engine().drafters]

    synthetic = {"kind": "synthetic", "accept": 0.6}
    assert accepted(drafter=synthetic) == [0.6]
    assert accepted(drafter=synthetic, accept=0.7) == [0.7]
    assert accepted(drafter=synthetic, accept=0) == [0]
    assert accepted(compare={"drafters": ["ngram", "synthetic"]}, accept=0.7) == [0.8, 0.7]


def test_drafters_to_compare_may_name_their_models_or_be_the_one_that_fits() -> None:
    assert [one.kind for one in RunConfig(compare=CompareConfig(drafters=("auto", "ngram"))).engine().drafters] == [
        "embedded",
        "ngram",
    ]
    config = RunConfig(drafter=DrafterConfig(min_lookup=0), compare=CompareConfig(drafters=("embedded", "eagle:/a:b")))
    embedded, eagle = config.engine().drafters
    assert (embedded.kind, embedded.min_lookup) == ("embedded", 0)
    assert (eagle.kind, eagle.model) == ("eagle", "/a:b")


def test_the_verify_width_follows_the_longest_block_in_whole_eights() -> None:
    def width(**keys: Any) -> int:
        return RunConfig(**keys).engine().max_verify_width

    assert width(mode=Mode.SYNCHRONOUS, num_speculative_tokens=7) == 8
    assert width(mode=Mode.SYNCHRONOUS, num_speculative_tokens=8) == 16
    assert width(mode=Mode.ASYNCHRONOUS, num_speculative_tokens=8) == 8
    assert RunConfig().engine(longest_block=16).max_verify_width == 24


@pytest.mark.parametrize(
    ("inner", "kind", "model"), [(None, "ngram", None), ("embedded", "embedded", None), ("/s", "hf", "/s")]
)
def test_a_cascade_is_two_drafters(inner: str | None, kind: str, model: str | None) -> None:
    drafter = DrafterConfig(kind="cascade", model="/m", inner=inner, min_ngram=3)
    middle, small = drafter.stages
    assert (middle.kind, middle.model, middle.tokens_per_replay) == ("hf", "/m", 1)
    assert (small.kind, small.model, small.min_ngram) == (kind, model, 3)
    assert not drafter.can.tree
    assert middle.stages == (middle,)
