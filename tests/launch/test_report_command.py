"""The command that a page shows asks for the configuration that it describes."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest

from amusd.config import RunConfig
from amusd.reporting.facts import command_of
from amusd.settings import from_mapping
from launch.compose import compose_config

CONFIGS: list[dict[str, Any]] = [
    {},
    {"mode": "synchronous", "num_speculative_tokens": 6, "verify_width": "bucketed"},
    {"drafter": {"kind": "ngram", "max_ngram": 5}, "hardware": {"devices": ["cuda:0", "cuda:1"], "pin_cores": False}},
    {"target": {"kind": "hf", "model": "/a b/'c'"}, "drafter": {"kind": "hf", "model": "'quoted'"}},
    {"workload": {"path": "null"}, "transport": {"kind": "zeromq", "address": "tcp://127.0.0.1:5"}},
    {"sampling": {"temperature": 1e-5, "stop": ['a"b', "c, d", "ü"], "logit_bias": [[3, -1.5]]}},
    {"compare": {"synchronous_lengths": [2], "drafters": ["embedded", "ngram"]}, "max_verify_width": 24},
    {"drafter": {"kind": "synthetic", "shape": "llama-1b"}, "accept": 0.5, "prompt": "kept out", "run_dir": "x"},
]


@pytest.mark.parametrize("values", CONFIGS, ids=[", ".join(values) or "defaults" for values in CONFIGS])
def test_the_command_of_a_page_composes_to_the_same_configuration(values: dict[str, Any]) -> None:
    config = from_mapping(RunConfig, values)
    program, command, *overrides = shlex.split(command_of("compare", config))
    assert (program, command) == ("amusd", "compare")
    assert compose_config(overrides) == dataclasses.replace(config, prompt=None, run_dir=None, output="text")
