"""The forward pass of each model, and refusals in one line before any weight is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from lines import logged
from models import tiny
from models.blocks import check_logits, random_ids, stock_logits
from models.published import CONFIGS, change_weights, damage_weights, write, write_config
from passes import forward, prefilled
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from amusd.checkpoints.building import load_model
from amusd.checkpoints.checkpoint import open_checkpoint
from amusd.checkpoints.configuration import ModelConfig, load_config, position_limit, why_rows_vary
from amusd.checkpoints.decoder_weights import bias_shapes, weight_shapes
from amusd.checkpoints.loading import load_draft_model, load_target
from amusd.checkpoints.tokenizer import Tokenizer, load_tokenizer, user_turn
from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.drafters.factory import load_drafters
from amusd.errors import ConfigError
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

RULE = Numerics(width=8, fixed=True)
BIASED = {"attention_bias": True, "mlp_bias": True}


def load(path: Path | str, max_model_len: int = 256, dtype: str = "float32") -> ModelRunner:
    return load_model(path, LoadOptions(numerics=RULE, max_model_len=max_model_len, dtype=dtype))


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("MambaConfig", {}, "recurrent state"),
    ("ZayaConfig", {}, "recurrent state"),  # whose layers get their cache in another way
    ("T5Config", {}, "no causal language model"),
    ("RobertaConfig", {"is_decoder": True}, "an encoder"),
    ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "not plain causal attention"),
    ("DogeConfig", {}, "chooses keys by their content"),
]


@pytest.mark.parametrize(("name", "options", "reason"), UNSUPPORTED, ids=[entry[0] for entry in UNSUPPORTED])
def test_what_cannot_run_is_refused_by_name_from_its_configuration(
    name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, name)(**options)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"'{config.model_type}' is not supported: .*{reason}") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_first_layers_of_what_cannot_run_are_refused_as_a_draft(tmp_path: Path) -> None:
    transformers.BltConfig().save_pretrained(tmp_path)  # which has layers of several kinds of parts
    engine = EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path)), drafters=(DrafterConfig(kind="self"),))
    with pytest.raises(ConfigError, match="'blt' is not supported: "):
        load_draft_model(engine.drafters[0], engine, "cpu")


def test_a_model_whose_code_cannot_compute_a_first_token_here_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config("GPT2Config"))
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", lambda _self: None)
    message = r"transformers' code for it, without kernels from a hub, cannot compute a token: TypeError: .*"
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "payload.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "payload.Config", "AutoModelForCausalLM": "payload.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "payload", "auto_map": auto_map}))
    with pytest.raises(ConfigError, match="code of its own"):
        load(folder)
    assert not canary.exists()


def last_logits(model: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """[8, vocab] at the end of `token_ids`."""
    cache = prefilled(model, token_ids[:-8], len(token_ids))
    return torch.cat([forward(model, [token_id], cache).logits for token_id in token_ids[-8:]])


HEAD, EMBEDDING = "lm_head__weight", "model__embed_tokens__weight"


@pytest.mark.parametrize("change", ["no head", "the same head", "another head", "the head alone"])
def test_a_tied_head_is_what_transformers_takes_it_for(change: str, tmp_path: Path) -> None:
    stock = write(tmp_path, CONFIGS["Llama 3.2"], shard="12KB" if change == "no head" else "1GB")
    file = tmp_path / "model.safetensors"
    embedding = stock.get_input_embeddings().weight.detach().clone()
    if change == "the head alone":
        change_weights(file, **{EMBEDDING: None, HEAD: embedding})
    elif change != "no head":
        change_weights(file, **{HEAD: embedding if change == "the same head" else embedding.flip(0).contiguous()})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model, token_ids = load(tmp_path), random_ids(20)
    torch.testing.assert_close(last_logits(model, token_ids), stock_logits(expected, token_ids)[-8:])


def test_a_checkpoint_of_the_model_without_a_head_is_read_if_the_head_is_tied(tmp_path: Path) -> None:
    stock = write(tmp_path, CONFIGS["Qwen3 with yarn"])
    stock.base_model.save_pretrained(tmp_path)  # its names have no prefix, as those of Qwen3-Embedding
    write_config(tmp_path, CONFIGS["Qwen3 with yarn"])
    assert "embed_tokens.weight" in open_checkpoint(tmp_path)
    token_ids = random_ids(20)
    check_logits(last_logits(load(tmp_path), token_ids), stock_logits(stock, token_ids)[-8:])


LLAMA, LAYER = CONFIGS["Llama 3.1"], "model__layers__1__self_attn__"
STRANGERS = {
    "a bias": (LLAMA, {f"{LAYER}k_proj__bias": torch.ones(16)}, r"has model\.layers\.1\.self_attn\.k_proj\.bias"),
    "a norm": (LLAMA, {f"{LAYER}q_norm__weight": torch.ones(8)}, r"has model\.layers\.1\.self_attn\.q_norm\.weight"),
    "no bias": (
        {**LLAMA, **BIASED},
        {f"{LAYER}o_proj__bias": None},
        r"weights, model\.layers\.1\.self_attn\.o_proj\.bias",
    ),
    "what no layer reads": (
        LLAMA,
        {
            f"{LAYER}rotary_emb__inv_freq": torch.ones(4),
            "model__layers__2__mlp__up_proj__bias": torch.ones(48),
            "score__weight": torch.ones(2, 32),
        },
        None,
    ),
}


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", STRANGERS)
def test_weights_and_configuration_describe_one_model(name: str, model_impl: str, tmp_path: Path) -> None:
    config, changes, message = STRANGERS[name]
    write(tmp_path, config)
    change_weights(tmp_path / "model.safetensors", **changes)
    options = LoadOptions(numerics=RULE, max_model_len=256, dtype="float32", model_impl=model_impl)
    if message is None:
        load_model(tmp_path, options)
    else:
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path, options)


WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]
Load = Callable[[str], None]


@pytest.fixture
def folder(plain_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a whole checkpoint, to be damaged."""
    shutil.copytree(plain_checkpoint, tmp_path / "model")
    return tmp_path / "model"


def as_target(model: str) -> None:
    load_target(EngineConfig(target=TargetConfig(kind="hf", model=model)), "cpu")


def as_draft(model: str) -> None:
    target = TargetConfig(kind="hf", model=model)  # of the same tokenizer
    load_drafters(EngineConfig(target=target, drafters=(DrafterConfig(kind="hf", model=model),)), "cpu")


LOADERS = pytest.mark.parametrize("load", [as_target, as_draft])


def setting(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def rotation(kind: str, **more: Any) -> Damage:
    return setting(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **more})


def text(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def half(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def twice(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "second.safetensors")
    index = {"weight_map": {"model.norm.weight": "first.safetensors", "lm_head.weight": "second.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).rename(folder / "first.safetensors")


def indexed(*names: str, kept: bool = True) -> Damage:
    """The weights are in pickles of these names, perhaps not `kept`, and an index says so."""

    def move(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        for name in names if kept else ():
            torch.save(weights, folder / name)
        index = {"weight_map": {weight: name for name in names for weight in weights}}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        (folder / WEIGHTS).unlink()

    return move


BROKEN: Mapping[str, tuple[Damage, str]] = {
    "no config.json": (without("config.json"), r"no config\.json in it; a checkpoint is config\.json, \*\.safetensors"),
    "an unknown kind of model": (setting(model_type="perceptron"), "config.json: .*perceptron"),
    "no key heads": (setting(num_key_value_heads=0), r"config\.json: num_key_value_heads=0; allowed: 1 or more"),
    "key heads for no query heads": (setting(num_key_value_heads=3), "heads=3; allowed: what divides num_attention_he"),
    "more layers than there are": (setting(num_hidden_layers=3), r"lacks weights, model\.layers\.2\."),
    "another width than there is": (setting(intermediate_size=64), r"has shape \[48, 32\], and config.json asks"),
    "a tensor in two shards": (twice, r"lm_head\.weight is in two of its files; allowed: one"),
    "no rotation": (rotation("ntk"), r"config\.json: rope_parameters has rope_type=ntk; allowed: default, dynamic"),
    "a rotation by type of layer": (
        setting(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        r"rope_parameters has full_attention=\{.*; allowed: a number, for all layers",
    ),
    "a factor as text": (rotation("linear", factor="2.0"), r"rope_parameters has factor='2\.0'; allowed: a number,"),
    "a rotation without end": (rotation("linear", factor=float("inf")), "cannot be loaded: OverflowError: "),
    "AWQ": (setting(quantization_config={"quant_method": "awq", "bits": 4}), "ImportError: .*gptqmodel"),
    "weights that are cut short": (half(WEIGHTS), f"{WEIGHTS}: "),
    "no weights": (without(WEIGHTS), f"none of {WEIGHTS}, {WEIGHTS}.index.json in it; a checkpoint is"),
    "an index of one file that is missing": (indexed("one.safetensors", kept=False), "one.safetensors: No such file"),
    "an index of nothing": (indexed(), r"index\.json names no file; allowed: \*\.safetensors"),
    "an index of a pickle": (indexed("all.bin"), r"index\.json names all\.bin; allowed: \*\.safetensors"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "no tokenizer.json in it; use drafter=eagle"),
    "a tokenizer that is cut short": (half("tokenizer.json"), "its tokenizer cannot be loaded: "),
    "an end of answers as text": (
        text("generation_config.json", '{"eos_token_id": ["2"]}'),
        r"eos_token_id=\['2'\]; allo",
    ),
    "a damaged generation_config.json": (text("generation_config.json", '{"eos_'), "generation_config.json: "),
}


def test_tied_weights_that_are_no_numbers_are_one_tensor_too(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(tie_word_embeddings=True))
    damage_weights(tmp_path)
    assert load(tmp_path).vocab_size == tiny.VOCAB


def refusal(load: Load, model: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(model))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 700
    assert line.startswith(f"model {model}: ")
    return line


@LOADERS
@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_checkpoint_is_one_line(damage: Damage, message: str, load: Load, folder: Path) -> None:
    damage(folder)
    line = refusal(load, folder)
    assert re.search(message, line), line


@LOADERS
def test_a_path_that_is_no_folder_is_one_line(load: Load, folder: Path, tmp_path: Path) -> None:
    assert ": a file, no folder; a checkpoint is" in refusal(load, folder / WEIGHTS)
    for name in (tmp_path / "gone", "./gone", "~nobody-of-this-name/model", "m" * 256):
        refusal(load, name)


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that were tried. Nobody answers, and the hub's cache is empty."""
    tries = []

    def find(_host: str, port: int, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]

    def refuse(self: socket.socket, address: Any) -> None:
        tries.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tries


@LOADERS
def test_a_hub_that_does_not_answer_is_asked_once(load: Load, tries: list[Any]) -> None:
    line = refusal(load, "someone/something")
    assert "no such folder, and the hub does not give it (" in line
    assert "`hf download someone/something`" in line
    assert 1 <= len(tries) <= 2  # some versions of the library also ask for a list of coding agents


@LOADERS
@pytest.mark.usefixtures("tries")
def test_a_hub_that_is_silent_is_not_needed_for_what_was_fetched(load: Load, folder: Path, tmp_path: Path) -> None:
    fetched = tmp_path / f"models--someone--{load.__name__}"
    (fetched / "refs").mkdir(parents=True)
    (fetched / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, fetched / "snapshots" / ("0" * 40))
    load(f"someone/{load.__name__}")


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_dtype_of_auto_is_the_engines(model_impl: Any, folder: Path) -> None:
    setting(torch_dtype="auto", dtype="auto")(folder)
    load_target(EngineConfig(target=TargetConfig(kind="hf", model=str(folder), model_impl=model_impl)), "cpu")


@pytest.mark.parametrize("template", [None, "", " \n"])
def test_a_model_without_a_chat_template_says_so(template: str | None, folder: Path) -> None:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with logged() as lines:
        load_target(EngineConfig(target=TargetConfig(kind="hf", model=str(folder))), "cpu")
    assert lines[:-1] == [f"model {folder}: has no chat template (a base model?), so it is given prompts as they are"]


# The values read from a checkpoint are those that transformers reads

FIELDS = (
    "hidden_act", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "head_dim", "hidden_size", "eos_token_id",
)  # fmt: skip


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
    """The attributes of this configuration raise what is no `AttributeError`."""
    assert why_rows_vary(AutoConfig.for_model("dots3_note_vision_encoder")) is not None
