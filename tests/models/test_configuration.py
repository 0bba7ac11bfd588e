"""Configurations and tokenizers that are read without transformers are what transformers makes of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny
from models.published import CONFIGS, write_config
from models.published_tokenizers import qwen_tokenizer, sentencepiece_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from amusd.models.compatibility import position_limit
from amusd.models.configuration import ModelConfig, load_config
from amusd.models.decoder import weight_shapes
from amusd.models.tokenizer import HuggingFaceTokenizer, load_tokenizer, read_plainly, user_turn

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_QWEN = {**CONFIGS["Qwen2.5 with yarn"], "use_sliding_window": True}
ODD: Mapping[str, Mapping[str, Any]] = {
    "no more than it must": {"model_type": "llama", **_SMALL},
    "windows from the second layer on": {**_QWEN, "max_window_layers": 1},
    "the layers of the windows": {**_QWEN, "layer_types": ["sliding_attention", "full_attention"]},
}
FIELDS = (
    "hidden_act", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "sliding_window", "tie_word_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("settings", [*CONFIGS.values(), *ODD.values()])
def test_a_configuration_is_what_transformers_takes_it_for(settings: Mapping[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, settings)
    own, stock = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert isinstance(own, ModelConfig)
    for name in FIELDS:
        assert getattr(own, name, None) == getattr(stock, name, None), name
    stated = {name: value for name, value in stock.rope_parameters.items() if name != "type"}
    assert {name: value for name, value in own.rope_parameters.items() if name != "type"} == stated
    assert position_limit(own) == position_limit(stock)
    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(stock).named_parameters(remove_duplicate=False))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if not name.endswith(".bias")}
    assert weight_shapes(own) == shapes


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n<u> {{ m['content'] | trim }}\n  {% else %}"
    "<{{ m.role }}>{{ m.content | tojson }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
NAMESPACE = (
    "{% set n = namespace(last='') %}{% for m in messages %}{% set n.last = m.content %}{% endfor %}{{ n.last }}"
)
TEXTS = (
    "", " ", "a b", " a  b ", "\n\n\ttab", "naïve cafe\u0301", "中文字符。", "👩‍👩‍👧 x",
    "<|im_end|><s></s>", "<tool> <unk>", "the true\u00a0sky 2024", "\u200b\ufeff", "</s", "<think>why</think>", "é" * 9,
    "\x00\x7f",
)  # fmt: skip


def check_same(folder: Path) -> None:
    assert read_plainly(folder, load_config(folder).model_type) is not None
    own, stock = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert own.fingerprint == HuggingFaceTokenizer(stock, frozenset()).fingerprint
    for text in TEXTS:
        ids = stock.encode(text)
        assert own.encode(text) == ids, repr(text)
        turns = [{"role": "system", "content": text}, *user_turn(text)]
        chat = stock.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert own.encode_chat(turns) == chat, repr(text)
        for given in (ids, chat):
            assert own.decode(given) == stock.decode(given, skip_special_tokens=True), repr(text)


@pytest.mark.parametrize(
    ("tokenizer", "model_type"),
    [
        (tiny.byte_tokenizer(chat_template=TEMPLATE), "LlamaConfig"),
        (qwen_tokenizer(NAMESPACE), "Qwen3Config"),
        (sentencepiece_tokenizer(TEMPLATE), "LlamaConfig"),
    ],
    ids=["byte level", "as Qwen's", "as SentencePiece's"],
)
def test_a_plain_tokenizer_has_the_ids_of_transformers(tokenizer: Any, model_type: str, tmp_path: Path) -> None:
    tiny.tiny_config(model_type, vocab_size=512, eos_token_id=5).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    check_same(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_ids == {5, tokenizer.eos_token_id}


@pytest.mark.embedded
def test_the_embedded_tokenizer_has_the_ids_of_transformers(embedded_folder: Path) -> None:
    check_same(embedded_folder)


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"add_prefix_space": True},
        {"eos_token": "<new>"},
        {"eos_token": {"__type": "AddedToken", "content": "<new>"}},
        {"extra_special_tokens": ["<new>"]},
        {"tokenizer_class": "LlamaTokenizer"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_change_ids_are_left_to_transformers(change: Mapping[str, Any], tmp_path: Path) -> None:
    tiny.tiny_config(vocab_size=300).save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert read_plainly(tmp_path, "llama") is None
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("a <new> b") == stock.encode("a <new> b")


def test_a_model_that_the_decoder_covers_is_loaded_without_transformers(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=300), tiny.byte_tokenizer(chat_template=TEMPLATE))
    code = (
        "import sys; from amusd import Engine\n"
        f"with Engine.launch(target={str(tmp_path)!r}, drafter='ngram') as engine: engine.generate('hi')\n"
        "assert not [name for name in sys.modules if name.startswith('transformers')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
