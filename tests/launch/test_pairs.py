"""The published pairs of `conf/pair`: their names, and small checkpoints of the same layouts through the same keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_link import memory_pair
from models import tiny
from models.published import CONFIGS, write
from models.test_eagle import changed, save_eagle3
from runtime.pair import TIMEOUT_SECONDS, KeepingRecorder, meet_draft

from amusd.config import DrafterConfig, EngineConfig, RunConfig, TargetConfig
from amusd.drafters.factory import load_drafters
from amusd.engine import Engine
from amusd.models.loading import load_target
from amusd.runtime.startup import serve
from amusd.types import Mode
from launch.compose import compose_config, conf_folder

LLAMA_8B, LLAMA_1B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
EAGLE = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
PAIRS = {
    "llama31_8b_llama32_1b": (LLAMA_8B, LLAMA_1B),
    "llama3_70b_8b": (LLAMA_70B, LLAMA_8B),
    "llama3_70b_1b": (LLAMA_70B, LLAMA_1B),
    "qwen3_8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    "qwen3_32b": ("Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"),
    "qwen25_7b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "llama31_8b_eagle3": (LLAMA_8B, EAGLE),
}
TOKENIZER = tiny.byte_tokenizer(chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}")
_LLAMA = {"max_position_embeddings": 131072, "num_hidden_layers": 6}
_QWEN25 = {**CONFIGS["Qwen2.5 with yarn"], "rope_scaling": None, "max_position_embeddings": 32768}
_QWEN3 = {**CONFIGS["Qwen3 with yarn"], "rope_scaling": None, "max_position_embeddings": 40960}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    LLAMA_70B: {**CONFIGS["Llama 3.1"], **_LLAMA},
    LLAMA_8B: {**CONFIGS["Llama 3.1"], **_LLAMA},
    LLAMA_1B: {**CONFIGS["Llama 3.2"], **_LLAMA},
    "Qwen/Qwen3-32B": {**_QWEN3, "tie_word_embeddings": False},
    "Qwen/Qwen3-8B": {**_QWEN3, "tie_word_embeddings": False},
    "Qwen/Qwen3-0.6B": _QWEN3,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN25,
    "Qwen/Qwen2.5-0.5B-Instruct": {**_QWEN25, "tie_word_embeddings": True},
}
"""Of each published model: what its config.json says of the architecture, with few and small layers."""


def save(folder: Path, name: str) -> Path:
    """A small checkpoint in the layout of the published one."""
    if name == EAGLE:
        return save_eagle3(folder, changed(t2d=None), vocab_size=len(TOKENIZER), max_position_embeddings=2048)
    num_ids = len(TOKENIZER) + (7 if name == "Qwen/Qwen2.5-7B-Instruct" else 0)  # padded further than its draft
    write(folder, {**LAYOUTS[name], "vocab_size": num_ids, "bos_token_id": None, "eos_token_id": 256}, shard="1GB")
    TOKENIZER.save_pretrained(folder)
    return folder


def test_every_pair_names_its_two_checkpoints() -> None:
    assert {file.stem for file in (conf_folder() / "pair").glob("*.yaml")} == {*PAIRS}
    for name, (target, drafter) in PAIRS.items():
        config = compose_config([f"pair={name}"])
        kind, length = ("eagle", 2048) if drafter == EAGLE else ("hf", 4096)
        assert config == replace(
            RunConfig(max_model_len=length),
            target=TargetConfig(kind="hf", model=target, dtype="bfloat16"),
            drafter=DrafterConfig(kind=kind, model=drafter, dtype="bfloat16"),
        )


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[Engine]:
    """The target, and its draft on a thread."""
    target_end, draft_end = memory_pair()
    arguments = (draft_end, load_drafters(config, "cpu"), KeepingRecorder("draft"), 1, TIMEOUT_SECONDS)
    draft = threading.Thread(target=serve, args=arguments, daemon=True)
    draft.start()
    model, tokenizer = load_target(config, "cpu")
    worker = meet_draft(target_end, model, tokenizer, KeepingRecorder("target"), TIMEOUT_SECONDS)
    with Engine(worker, tokenizer, drafters=[drafter.kind for drafter in config.drafters]) as engine:
        yield engine
    draft.join(TIMEOUT_SECONDS)


@pytest.mark.parametrize("name", PAIRS)
def test_small_checkpoints_of_its_layouts_decode_as_without_a_draft(name: str, tmp_path: Path) -> None:
    folders = [save(tmp_path / str(place), model) for place, model in enumerate(PAIRS[name])]
    config = compose_config([f"pair={name}", f"target.model={folders[0]}", f"drafter.model={folders[1]}"])
    params = replace(config.sampling, max_new_tokens=12, ignore_eos=True)
    with engine_of(config.engine()) as engine:
        assert engine.worker.model.max_length == config.max_model_len
        plain, *others = (
            engine.generate("a sentence", params, decoding=replace(config.decoding(), mode=mode))
            for mode in (Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS)
        )
    for answer in others:
        assert (answer.token_ids, answer.drafter) == (plain.token_ids, config.drafter.kind)
        assert answer.metrics.num_tokens_alone == 0
