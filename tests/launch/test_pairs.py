"""The published pairs of `conf/pair`."""

from __future__ import annotations

from dataclasses import replace

from amusd.config import DrafterConfig, RunConfig, TargetConfig
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
