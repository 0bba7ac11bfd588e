"""The scripts that train drafters on the embedded target: what they unroll, and every method on a tiny target."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FOLDERS = (EXPERIMENTS / "drafters", EXPERIMENTS / "embedded_draft")
OURS = ("layouts", "networks", "objective", "train_drafter")
MODULES = ("dataset", "losses", "student", "teacher", "train", *OURS)
HIDDEN, LAYERS, VOCABULARY, KNOWN = 32, 8, 96, 24


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    before = list(sys.path)
    sys.path[:0] = map(str, FOLDERS)
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(requires_grad=False)


@pytest.fixture
def text(
    scripts: dict[str, ModuleType], target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A text file for the scripts, whose target is the tiny one."""
    random = np.random.default_rng(0)
    length = random.integers(24, 40, 20)
    token_ids = random.integers(17, VOCABULARY, (20, 40))
    answer = np.broadcast_to(np.arange(40) >= 10, (20, 40)) & (np.arange(40) < length[:, None])
    found = scripts["dataset"].Text(token_ids, length, answer, np.ones(20, np.float32), 4)
    scripts["dataset"].write_text(tmp_path / "text.npz", found)
    monkeypatch.setattr(scripts["train_drafter"], "load_teacher", lambda device: target)
    monkeypatch.setattr(scripts["train_drafter"], "HELD_OUT_ROWS", 4)
    return tmp_path / "text.npz"


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *positional: str, **options: object) -> None:
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    monkeypatch.setattr(sys, "argv", [script.__name__, *positional, *arguments])
    script.main()


def batch_of(scripts: dict[str, ModuleType], rows: int, width: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    counted = torch.zeros(rows, width, dtype=torch.bool)
    counted[:, 6:-1] = True
    return scripts["networks"].Batch(
        torch.randint(VOCABULARY, (rows, width), generator=generator),
        torch.randn(rows, width, HIDDEN, generator=generator),
        torch.randn(rows, width, 4, HIDDEN, generator=generator).to(torch.bfloat16),
        counted,
    )


def make_network(scripts: dict[str, ModuleType], name: str, target: LlamaForCausalLM) -> Any:
    arguments = scripts["train_drafter"].argparse.Namespace(method=name, layers=2, mask_token=16)
    network = scripts["train_drafter"].NETWORKS[name](scripts["layouts"].drafter_config(arguments, target.config))
    network.start_from(target, torch.ones(4))
    return network


@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_unrolled_steps_are_what_drafting_token_by_token_gives(
    scripts: dict[str, ModuleType], target: LlamaForCausalLM, name: str
) -> None:
    """Row r of step k: features of the target up to row r - k, then the network's own states, in one causal pass."""
    networks, batch = scripts["networks"], batch_of(scripts, 2, 14)
    network = make_network(scripts, name, target).requires_grad_(requires_grad=False)
    batch = networks.Batch(batch.token_ids, batch.embedded, batch.features.float(), batch.counted)
    unrolled = network.unroll(batch, 4)
    (layer,) = network._layer
    attention, embedded, fused = layer.self_attn, batch.embedded[:, 1:], network.fuse(batch.features[:, :-1])
    rotary = networks.rotary_table(target.config, torch.arange(13))

    def plain(hidden: torch.Tensor) -> torch.Tensor:
        width = hidden.shape[1]
        table = (rotary[0][:width], rotary[1][:width])
        residual, inputs = network.inputs(embedded[:, :width], hidden)
        query, key = attention.query(inputs, table), attention.key(inputs, table)
        mixed = F.scaled_dot_product_attention(query, key, attention.value(inputs), is_causal=True, scale=1.0)
        residual = residual + attention.output(mixed)
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    for row in (5, 9, 12):
        hidden = fused[:, : row - 2]  # rows up to row - 3 have the target's features
        for step in range(4):
            states = plain(hidden)
            torch.testing.assert_close(unrolled[step][:, row - 3 + step], states[:, -1], rtol=1e-4, atol=1e-4)
            hidden = torch.cat((hidden, states[:, -1:]), dim=1)


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa", "dflash"])
def test_each_method_learns_goes_on_and_is_written_as_published(
    scripts: dict[str, ModuleType],
    text: Path,
    target: LlamaForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    out = tmp_path / name
    options = {"out": out, "rows": 4, "vocab_size": KNOWN, "lr": 0.01, "text": text}
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))  # a step takes a second
    monkeypatch.setattr(scripts["train_drafter"], "time", clock)
    call(scripts["train_drafter"], monkeypatch, name, minutes=0.05, **options)
    first = json.loads((out / "training.json").read_text())
    call(scripts["train_drafter"], monkeypatch, name, minutes=0.1, **options)
    report = json.loads((out / "training.json").read_text())
    assert report["rows"] == 16
    assert report["curve"][: len(first["curve"])] == first["curve"]
    assert [first["curve"][-1]["step"], report["curve"][-1]["step"]] == [3, 6]
    assert all(len(point["greedy"]) == scripts["train_drafter"].MEASURED_STEPS[name] for point in report["curve"])

    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    head = target.lm_head.weight
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if name == "medusa":
        assert shapes["3.0.linear.weight"] == (HIDDEN, HIDDEN)
        assert shapes["3.0.linear.bias"] == (HIDDEN,)
        assert torch.equal(tensors["3.1.weight"], head)
        return
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (HIDDEN, 4, 4)
    if name == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] == KNOWN
        assert shapes["midlayer.self_attn.q_proj.weight"] == (HIDDEN, 2 * HIDDEN)
        assert shapes["fc.weight"] == (HIDDEN, 3 * HIDDEN)
        output_ids = torch.arange(KNOWN) + tensors["d2t"]
        assert tensors["d2t"].dtype == torch.int64
        assert torch.equal(tensors["t2d"].nonzero().squeeze(1), output_ids)
        assert torch.equal(tensors["lm_head.weight"], head[output_ids])
    if name == "eagle1":
        assert shapes["fc.weight"] == (HIDDEN, 2 * HIDDEN)
        assert not {"layers.0.input_layernorm.weight", "norm.weight", "fc.bias"} & set(shapes)
    if name == "dflash":
        assert config["dflash_config"] == {"mask_token_id": 16, "target_layer_ids": [1, 3, 4]}
        assert shapes["layers.1.self_attn.k_norm.weight"] == (HIDDEN // 4,)
        assert shapes["hidden_norm.weight"] == (HIDDEN,)
