"""The measurements of `amusd bench` on tiny models: its counts, not its speeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from models import tiny
from models.recurrent_models import our_model

from amusd.checkpoints.building import load_model
from amusd.commands.bench import (
    NUM_TOKENS,
    _by_width,
    _passes_and_steps,
    context_of,
    load_transformers,
    measure_links,
    measure_models,
    read_bandwidth,
)
from amusd.commands.other_worker import neighbour
from amusd.config import HardwareConfig, TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner, extend

PROMPT = [5 + number for number in range(20)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(folder, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> ModelRunner:
    return load_model(
        checkpoint, LoadOptions(numerics=Numerics(width=8, fixed=True), max_model_len=128, dtype="float32")
    )


def test_every_figure_stands_in_the_document_and_in_the_text(
    model: ModelRunner, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {"zeromq": TransportConfig(kind="zeromq"), "shared_memory": TransportConfig(address="tcp://127.0.0.1")}
    monkeypatch.setattr("amusd.commands.bench.NUM_ROUNDS", 2)
    generate = load_transformers(str(checkpoint), "float32", "cpu")
    draft = ModelRunner(model.network, replace(model.options, numerics=Numerics(width=16, fixed=False)), 128)
    with neighbour("cpu", set()) as busy:
        document, report = measure_models(model, {"hf": draft}, generate, PROMPT, busy)
    taken = dict(measure_links(links, HardwareConfig(), 50))
    assert 0 < taken["zeromq"]["one_way_us_p50"] <= taken["zeromq"]["one_way_us_p99"]
    assert "port" in taken["shared_memory"]["unavailable"]
    target, steps = document["target"], document["draft"]["hf"]
    for of_rows in (target["forward_ms"], target["beside_ms"], steps["tree_ms"], steps["tree_beside_ms"]):
        assert list(of_rows) == ["1", "4", "8", "16"]
        assert min(*of_rows.values(), target["forward_ms_fixed"], steps["step_ms"], steps["step_beside_ms"]) > 0
    assert target["floor_ms"] == pytest.approx(model.weight_bytes / target["bandwidth_gb_s"] / 1e6)
    assert document["peer"]["hf_generate_ms_per_token"] > 0
    text = "\n".join(report)
    names = "draft step, hf", "draft step, hf, tree, 16 rows", "transformers.generate"
    for name in ("target, 4 rows", "target, fixed width", *names, "while the other worker computes"):
        assert name in text


def test_a_context_leaves_room_in_every_model(model: ModelRunner) -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda _text: [5, 6, 7])
    assert len(context_of(tokenizer, [model])) == model.max_length - NUM_TOKENS
    small: Any = SimpleNamespace(max_length=39)
    with pytest.raises(ConfigError, match=r"^max_model_len: `amusd bench` needs room for 40 tokens$"):
        context_of(tokenizer, [model, small])


def test_a_draft_with_recurrent_layers_has_no_figures_of_trees(model: ModelRunner) -> None:
    work = dict(_passes_and_steps(model, {"hf": our_model("qwen3_5")}, PROMPT))
    assert [name for name in work if name.startswith("draft")] == ["draft step, hf"]
    assert _by_width({}, "draft step, hf, tree") == {}


def test_the_bandwidth_is_measured_in_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.commands.bench.free_bytes", lambda _device: 1 << 16, raising=False)
    monkeypatch.setattr(torch, "ones", ones := Mock(wraps=torch.ones))
    assert read_bandwidth("cpu") > 0
    assert ones.call_args.args == (1 << 13,)


def test_a_neighbour_that_has_ended_is_an_error_of_one_line() -> None:
    before = {*psutil.Process().children()}
    with neighbour("cpu", set()) as busy:
        with busy():
            pass
        [process] = {*psutil.Process().children()} - before
        process.kill()
        process.wait()
        with pytest.raises(PeerLostError, match="does not compute"), busy():
            pass


def test_transformers_decodes_the_same_tokens(model: ModelRunner, checkpoint: Path) -> None:
    generate, cache = load_transformers(str(checkpoint), "float32", "cpu"), model.new_cache(64)
    model.prefill(PROMPT[:-1], cache)
    assert generate is not None
    assert generate(PROMPT, 30) == extend(model, PROMPT[-1:], cache, 30)[-1]


def test_transformers_is_left_out_where_its_copy_of_the_target_does_not_fit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "to", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    assert load_transformers(str(checkpoint), "float32", "cpu") is None
