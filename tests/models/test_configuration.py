"""What is read of a checkpoint is what transformers makes of the same files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models.published import CONFIGS, write_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from amusd.checkpoints.configuration import ModelConfig, load_config, position_limit, why_rows_vary
from amusd.checkpoints.decoder_weights import bias_shapes, weight_shapes
from amusd.checkpoints.tokenizer import Tokenizer, load_tokenizer, user_turn

FIELDS = (
    "hidden_act", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "head_dim", "hidden_size", "eos_token_id",
)  # fmt: skip


BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("biases", [{}, BIASED], ids=["", "biased"])
@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_a_published_configuration_has_the_weights_and_the_length_of_transformers(
    settings: Mapping[str, Any], biases: Mapping[str, bool], tmp_path: Path
) -> None:
    write_config(tmp_path, {**settings, **biases})
    own, stock = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert isinstance(own, ModelConfig)
    assert position_limit(own, 1 << 30) == position_limit(stock, 1 << 30)
    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(stock).named_parameters(remove_duplicate=False))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert weight_shapes(own) | bias_shapes(own) == shapes


TEXTS = (
    "", " ", "a b", " a  b ", "\n\n\ttab", "naïve cafe\u0301", "中文字符。", "👩‍👩‍👧 x",
    "<|im_end|><s></s>", "<tool> <unk>", "the true\u00a0sky 2024", "\u200b\ufeff", "</s", "<think>why</think>", "é" * 9,
    "\x00\x7f",
)  # fmt: skip


@pytest.mark.embedded
def test_the_embedded_target_is_read_as_transformers_reads_it(embedded_folder: Path) -> None:
    config, taken = vars(load_config(embedded_folder)), AutoConfig.from_pretrained(embedded_folder)
    assert {name: config[name] for name in FIELDS if name in config} == {
        name: getattr(taken, name) for name in FIELDS if name in config
    }
    own, stock = load_tokenizer(embedded_folder), AutoTokenizer.from_pretrained(embedded_folder)
    assert own.fingerprint == Tokenizer(stock.backend_tokenizer).fingerprint
    assert stock.eos_token_id in own.eos_token_ids
    for text in TEXTS:
        ids = stock.encode(text)
        assert own.encode(text) == ids, repr(text)
        turns = [{"role": "system", "content": text}, *user_turn(text)]
        chat = stock.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert own.encode_chat(turns) == own.encode_chat(turns, {"add_generation_prompt": True}) == chat, repr(text)
        for given in (ids, chat):
            assert own.decode(given) == stock.decode(given, skip_special_tokens=True), repr(text)


def test_experts_whose_number_may_vary_by_layer_are_experts() -> None:
    """Whose attributes raise what is no `AttributeError`."""
    assert why_rows_vary(AutoConfig.for_model("dots3_note_vision_encoder")) is not None
