from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny

from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.embedded_draft import frequent_ids, kept_layers, load_embedded_draft
from amusd.models.numerics import Numerics

TEMPLATE = "{% for message in messages %}<turn>{{ message.content }}{% endfor %}<answer>"


def save_target(folder: Path, name: str = "LlamaConfig", **changes: Any) -> Any:
    tokenizer = tiny.byte_tokenizer(("<eos>", "<turn>", "<answer>", "<unused>"), TEMPLATE)
    ids = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": 300}
    return tiny.save_checkpoint(folder, tiny.tiny_config(name, num_hidden_layers=5, **ids, **changes), tokenizer)


def load(folder: Path, num_layers: int = 3, vocab_size: int = 50) -> CachedModel:
    return load_embedded_draft(
        folder,
        num_layers=num_layers,
        vocab_size=vocab_size,
        numerics=Numerics(width=16, fixed=False),
        max_model_len=128,
        dtype="float32",
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config"])
def test_it_is_the_target_with_fewer_layers_and_columns(name: str, tied: bool, tmp_path: Path) -> None:
    stock = save_target(tmp_path, name, tie_word_embeddings=tied)
    draft = load(tmp_path, num_layers=3)
    assert draft.output_ids is not None
    stock.model.layers = torch.nn.ModuleList([stock.model.layers[index] for index in (0, 1, 2)])
    stock.model.config.num_hidden_layers = 3
    with torch.inference_mode():
        full = stock(torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits[0]
    logits = draft.forward([5, 6, 7, 8], draft.new_cache(20)).logits
    torch.testing.assert_close(logits, full[:, draft.output_ids], atol=1e-4, rtol=1e-4)


def test_its_cache_rolls_back(tmp_path: Path) -> None:
    save_target(tmp_path)
    draft = load(tmp_path)
    cache, fresh = draft.new_cache(20), draft.new_cache(20)
    draft.forward([5, 6, 9, 9], cache)
    cache.truncate(2)
    draft.forward([5, 6], fresh)
    expected = draft.forward([7], fresh).logits
    torch.testing.assert_close(draft.forward([7], cache).logits, expected, atol=1e-5, rtol=1e-5)


def test_it_can_propose_the_end_and_what_the_chat_template_writes(tmp_path: Path) -> None:
    save_target(tmp_path)
    tokenizer = tiny.byte_tokenizer(("<eos>", "<turn>", "<answer>", "<unused>"))
    draft = load(tmp_path, vocab_size=50)
    assert draft.output_ids is not None
    wanted = {tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<turn>", "<answer>")}
    proposable = set(draft.output_ids.tolist())
    assert wanted <= proposable
    assert tokenizer.convert_tokens_to_ids("<unused>") not in proposable
    assert draft.vocab_size == len(draft.output_ids) == 50


@pytest.mark.parametrize("num_layers", [1, 2, 30])
def test_the_first_layers_are_kept(num_layers: int) -> None:
    assert kept_layers(num_layers, 30) == tuple(range(num_layers))


def test_more_layers_than_the_target_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_layers=31: the target has 30 layers"):
        kept_layers(31, 30)


def test_special_ids_come_first_and_the_lowest_ids_fill_the_rest() -> None:
    assert frequent_ids(4, 100, special={90, 1}) == [0, 1, 2, 90]
    assert frequent_ids(1000, 5, special={2}) == [0, 1, 2, 3, 4]


@pytest.mark.embedded
def test_the_embedded_pair_shares_ids(embedded_folder: Path) -> None:
    draft = load_embedded_draft(
        embedded_folder, num_layers=2, vocab_size=8192, numerics=Numerics(width=16, fixed=False), max_model_len=256
    )
    logits = draft.forward([1, 2, 3], draft.new_cache(16)).logits
    assert logits.shape == (3, 8192)
    assert torch.isfinite(logits).all()
