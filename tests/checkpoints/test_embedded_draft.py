from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from full_disk import files_of_at_most
from models import tiny
from models.blocks import random_ids
from passes import forward, prefilled

from amusd.checkpoints.building import load_model
from amusd.checkpoints.embedded_draft import DRAFT_FILE, export_draft, load_embedded_draft, read_draft
from amusd.checkpoints.loading import load_draft_model
from amusd.checkpoints.tokenizer import load_tokenizer, user_turn
from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner, extend
from experiments.embedded_draft.package import write_draft

SIZES = {"vocab_size": 300, "num_hidden_layers": 5}
OUTPUT_IDS = torch.tensor([42, 7, 256, 299, 0, 8, 9, 10])


def save_pair(folder: Path, name: str = "LlamaConfig", **changes: Any) -> tuple[Any, Path]:
    """A target in `folder`, and a draft file for it; returns a stock model with the draft's weights."""
    tokenizer = tiny.byte_tokenizer(("<eos>",))
    stock = tiny.save_checkpoint(folder, tiny.tiny_config(name, **SIZES, **changes), tokenizer)
    drafted = tiny.tiny_causal_lm(tiny.tiny_config(name, **{**SIZES, "num_hidden_layers": 2}, **changes), seed=7)
    shared = ("model.embed_tokens.weight", "lm_head.weight")
    trained = {key: tensor for key, tensor in drafted.state_dict().items() if key not in shared}
    draft_file = folder.parent / "draft.safetensors"
    write_draft(draft_file, trained, OUTPUT_IDS, {})
    drafted.load_state_dict(read_draft(draft_file).tensors, strict=False)  # as stored, in eight bits
    drafted.model.embed_tokens.load_state_dict(stock.model.embed_tokens.state_dict())
    drafted.lm_head.load_state_dict(stock.lm_head.state_dict())
    return drafted.eval(), draft_file


def load(folder: Path, draft_file: Path) -> ModelRunner:
    options = LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=128, dtype="float32")
    return load_embedded_draft(folder, options, vocab_size=8, draft_file=draft_file)


@pytest.mark.parametrize(("name", "tied"), [("LlamaConfig", True), ("Qwen3Config", False)])
def test_the_embedded_draft_is_its_stored_layers_between_the_targets_embedding_and_head(
    name: str, tied: bool, tmp_path: Path
) -> None:
    stock, draft_file = save_pair(tmp_path / "target", name, tie_word_embeddings=tied)
    draft = load(tmp_path / "target", draft_file)
    with torch.inference_mode():
        full = stock(torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits[0]
    logits = forward(draft, [5, 6, 7, 8], draft.new_cache(20)).logits
    torch.testing.assert_close(logits, full[:, draft.output_ids], atol=1e-4, rtol=1e-4)


def test_an_exported_draft_is_an_ordinary_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, draft_file = save_pair(tmp_path / "target")
    monkeypatch.setattr("amusd.checkpoints.embedded_draft.DRAFT_FILE", draft_file)
    export_draft(tmp_path / "target", tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = stock.to(torch.bfloat16)(torch.tensor([[5, 6, 7, 8]])).logits
        logits = exported(torch.tensor([[5, 6, 7, 8]])).logits
    assert logits.shape[-1] == SIZES["vocab_size"]
    torch.testing.assert_close(logits, expected, atol=0.1, rtol=0.05)
    assert load_tokenizer(tmp_path / "out").fingerprint == load_tokenizer(tmp_path / "target").fingerprint


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, draft_file = save_pair(tmp_path / "target")
    monkeypatch.setattr("amusd.checkpoints.embedded_draft.DRAFT_FILE", draft_file)
    with files_of_at_most(10_000), pytest.raises(ConfigError, match=rf"^{tmp_path / 'out'}: .+$"):
        export_draft(tmp_path / "target", tmp_path / "out")


def test_what_ships_is_small_and_can_end_an_answer() -> None:
    draft = read_draft(DRAFT_FILE)
    assert DRAFT_FILE.stat().st_size <= 16 << 20
    assert len(set(draft.output_ids.tolist())) == len(draft.output_ids)
    assert 2 in draft.output_ids[:8]  # <|im_end|>


@pytest.mark.embedded
def test_the_embedded_draft_agrees_with_its_target_on_the_targets_own_text(embedded_folder: Path) -> None:
    """The floor is far below the measured value; it catches a damaged file, swapped rows or a wrong embedding."""
    options = LoadOptions(numerics=Numerics(width=128, fixed=False), max_model_len=128)
    target = load_model(embedded_folder, options)
    draft = load_embedded_draft(embedded_folder, options, vocab_size=8192)
    question = user_turn("Name three things to see in a forest, and say why.")
    prompt = load_tokenizer(embedded_folder).encode_chat(question)
    answer = extend(target, prompt[-1:], prefilled(target, prompt[:-1], 128), 32)
    logits = forward(draft, [*prompt, *answer], draft.new_cache(128)).logits
    chosen = draft.output_ids[logits.argmax(dim=-1)].tolist()[len(prompt) - 1 :]
    assert sum(a == b for a, b in zip(chosen, answer, strict=False)) >= 8


@pytest.mark.parametrize("name", ["LlamaConfig", "Gemma3TextConfig"])
def test_the_first_layers_of_a_target_draft_as_the_target_cut_after_them(name: str, tmp_path: Path) -> None:
    config = tiny.tiny_config(name, num_hidden_layers=4, layer_types=None, vocab_size=SIZES["vocab_size"])
    stock = tiny.save_checkpoint(tmp_path, config, tiny.byte_tokenizer())
    stock.model.layers = stock.model.layers[:3]
    token_ids = random_ids(12, 5)
    with torch.no_grad():
        expected = stock(torch.tensor([token_ids])).logits[0]
    drafter = DrafterConfig(kind="self", num_layers=3, dtype="float32")
    target = TargetConfig(kind="hf", model=str(tmp_path))
    ours, _ = load_draft_model(drafter, EngineConfig(target=target, drafters=(drafter,), max_model_len=64), "cpu")
    torch.testing.assert_close(forward(ours, token_ids, ours.new_cache(12)).logits, expected, atol=2e-4, rtol=2e-4)
