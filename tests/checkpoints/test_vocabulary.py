"""A draft with another tokenizer than its target reads and proposes the target's ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints.other_tokenizer import save_reindexed, word_tokenizer
from models import tiny
from models.tiny import wrap_model
from passes import forward
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from amusd.checkpoints.loading import load_draft_model
from amusd.checkpoints.tokenizer import Tokenizer, load_tokenizer
from amusd.checkpoints.transformers_models import adopt_into
from amusd.checkpoints.vocabulary import share_vocabulary
from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, TargetConfig
from amusd.drafters.factory import load_drafters
from amusd.errors import ConfigError
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions

VOCAB_SIZE, PADDING = 340, 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and the same model again: under other ids, without some tokens, with padding."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = word_tokenizer(VOCAB_SIZE)
    config = tiny.tiny_config(vocab_size=VOCAB_SIZE, eos_token_id=0, bos_token_id=None, pad_token_id=None)
    tiny.save_checkpoint(folder / "target", config, tokenizer)
    save_reindexed(folder / "target", folder / "cut", keep=lambda token_id: token_id < VOCAB_SIZE - 20)
    save_padded(folder / "target", folder / "likely padding", 3.0)
    save_padded(folder / "target", folder / "unlikely padding", 0.7)
    return folder


def save_padded(source: Path, folder: Path, factor: float) -> None:
    """Write the checkpoint once more, with further rows, whose logits are those of tokens times `factor`."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = torch.cat((weights[name], factor * weights[name][:PADDING]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": VOCAB_SIZE + PADDING}))


def engine_config(folder: Path, draft: str, target: str = "target") -> EngineConfig:
    return EngineConfig(
        target=TargetConfig(kind="hf", model=str(folder / target), dtype="float32"),
        drafters=(DrafterConfig(kind="hf", model=str(folder / draft), dtype="float32"),),
        hardware=HardwareConfig(devices=("cpu", "cpu")),
        max_model_len=128,
    )


# Which tokens are the same


def test_tokens_are_compared_by_their_text_and_special_ones_by_their_name() -> None:
    target = {0: "<eos>", 1: b"a", 2: b" a", 3: b"ab", 4: b"<eos>", 5: b"abab!", 6: b"\xe2", 7: b"b"}
    draft = {0: b" a", 1: b"b", 2: "<eos>", 3: b"ab", 4: b"a", 5: b"c", 6: b"<", 7: b">"}
    shared = share_vocabulary(target, draft, 9, lambda _text: [1])
    assert shared.output_ids.tolist() == [0, 1, 2, 3, 7]
    assert shared.draft_ids.tolist() == [2, 4, 0, 3, 1]
    assert shared.readings.tolist() == [2, 4, 0, 3, 6, 3, -1, 1, -1]


def test_added_words_are_texts_and_ids_beyond_the_model_are_left_out() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken("  ", special=False)])
    assert Tokenizer(tokenizer.backend_tokenizer).token_texts()[257] == b"  "
    assert 257 not in Tokenizer(tokenizer.backend_tokenizer, num_ids=257).token_texts()


# What the model computes


@pytest.mark.parametrize(("name", "tied"), [("LlamaConfig", False), ("Gemma3TextConfig", True), ("GPT2Config", True)])
def test_the_logits_of_a_draft_with_another_tokenizer_are_those_of_its_own_tokens(name: str, tied: bool) -> None:
    config = tiny.tiny_config(name, tie_word_embeddings=tied)
    stock, changed = tiny.tiny_causal_lm(config), tiny.tiny_causal_lm(config, register_attention())
    target = {token_id: b"(%d)" % ((7 * token_id + 3) % 97) for token_id in range(60)} | {60: b"(5)!"}
    draft = {token_id: b"(%d)" % token_id for token_id in range(97)}
    shared = share_vocabulary(target, draft, 64, lambda _text: [1])
    adopt_into(changed, shared)
    options = LoadOptions(numerics=Numerics(width=8, fixed=False), max_model_len=tiny.MAX_LENGTH)
    model = wrap_model(changed, options, shared.output_ids)
    assert (model.num_ids, model.vocab_size) == (64, 60)
    token_ids = [5, 6, 60, 59, 0, 17]
    own_ids = [int(target[token_id].split(b")")[0][1:]) for token_id in token_ids]
    with torch.inference_mode():
        expected = stock(torch.tensor([own_ids])).logits[0][:, shared.draft_ids]
    torch.testing.assert_close(forward(model, token_ids, model.new_cache(8)).logits, expected, atol=1e-4, rtol=1e-4)


# Loading


def test_a_draft_with_another_tokenizer_says_what_it_can_propose_and_takes_the_targets_ids(pair: Path) -> None:
    drafters = load_drafters(engine_config(pair, "cut"), "cpu")
    assert drafters.tokenizer_hash == load_tokenizer(pair / "target").fingerprint
    (model,) = drafters.models
    assert (model.vocab_size, model.num_ids) == (VOCAB_SIZE - 20, VOCAB_SIZE)
    (note,) = drafters.notes
    told = "its tokenizer differs from the target's: it can propose 320 of 340 token ids"
    assert note == f"{told}, 96% of the tokens of an English text"


@pytest.mark.parametrize(("target", "draft"), [("target", "likely padding"), ("unlikely padding", "target")])
def test_a_draft_with_more_or_fewer_rows_reads_and_scores_the_targets_ids(target: str, draft: str, pair: Path) -> None:
    config = engine_config(pair, draft, target)
    model, _ = load_draft_model(config.drafters[0], config, "cpu")
    num_ids = VOCAB_SIZE + (PADDING if draft == "target" else 0)
    assert (model.num_ids, model.vocab_size, model.output_ids) == (num_ids, VOCAB_SIZE, None)
    assert load_drafters(config, "cpu").notes == []


def test_too_few_tokens_in_common_are_refused_with_the_number(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path / "target")
    save_reindexed(pair / "target", tmp_path / "few", keep=lambda token_id: token_id % 8 == 0)
    with pytest.raises(ConfigError, match=r"it can propose \d+ of 340 token ids, \d+% of .*below 70%.*drafter=ngram"):
        load_drafters(engine_config(tmp_path, "few"), "cpu")
