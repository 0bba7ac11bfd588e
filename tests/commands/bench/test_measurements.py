"""The measurements on tiny models: what is counted, not how fast it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from models import tiny

from amusd.commands.bench.forward import (
    RULES,
    context_lengths,
    measure_contexts,
    measure_decoding,
    measure_passes,
    measure_sampling,
)
from amusd.commands.bench.pair import english, measure_pair, resident_bytes
from amusd.commands.bench.peer import GeneratePeer, PeerContext
from amusd.commands.bench.report import bench_text
from amusd.commands.bench.timing import read_bandwidth
from amusd.config import BenchConfig, DrafterConfig, EngineConfig, HardwareConfig, TargetConfig
from amusd.models.cached_model import CachedModel
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from tests.warm import Popen

BENCH = BenchConfig(
    widths=(1, 4),
    context_length=20,
    num_rounds=2,
    num_decoding_rounds=2,
    num_tokens=3,
    contexts=(40, 12, 5000),
    num_context_rounds=2,
    num_pair_prompts=1,
    num_pair_tokens=6,
)
PROMPT = [5 + number for number in range(BENCH.context_length)]
LONG_PROMPT = [5 + number % 90 for number in range(60)]


def ignore(_done: int, _of: int) -> None:
    pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(folder, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> CachedModel:
    return load_model(
        checkpoint, LoadOptions(numerics=Numerics(width=8, fixed=True), max_model_len=128, dtype="float32")
    )


def test_passes_and_draft_steps_stand_beside_their_floor(model: CachedModel) -> None:
    target, draft = measure_passes(model, {"hf": model}, PROMPT, BENCH, 10.0, ignore)
    assert list(target["forward_ms"]) == ["1", "4"]
    assert target["weight_bytes"] == model.weight_bytes
    assert target["floor_ms"] == pytest.approx(model.weight_bytes / 10e9 * 1e3)
    assert target["ratio_to_floor"] == pytest.approx(target["forward_ms"]["1"] / target["floor_ms"])
    assert target["ratio_to_narrowest"]["1"] == 1.0
    assert draft["hf"]["step_ms"] > 0


def test_choosing_tokens_is_timed_for_every_rule(model: CachedModel) -> None:
    result = measure_sampling(model, PROMPT, BENCH, 10.0, ignore)
    assert set(result["ms"]) == {"argmax", *RULES}
    assert set(result["share_of_pass"]) == set(RULES)
    assert result["rows"] == 4
    assert result["share_of_pass"]["matching"] == pytest.approx(
        (result["ms"]["matching"] - result["ms"]["argmax"]) / 10.0
    )


def test_decoding_is_compared_with_generate_on_the_same_prompt(model: CachedModel, checkpoint: Path) -> None:
    peer = GeneratePeer(str(checkpoint), dtype="float32", device="cpu")
    result = measure_decoding(model, peer, PROMPT, BENCH, ignore)
    assert set(result["ms_per_token"]) == {"fixed", "bucketed", "peer"}
    assert set(result["speedup_vs_peer"]) == {"fixed", "bucketed"}
    assert all(milliseconds > 0 for milliseconds in result["time_to_first_token_ms"].values())


def test_generate_writes_the_same_text_and_never_stops_early(model: CachedModel, checkpoint: Path) -> None:
    peer = GeneratePeer(str(checkpoint), dtype="float32", device="cpu")
    cache = model.new_cache(64)
    model.prefill(PROMPT[:-1], cache)
    assert peer.generate(PROMPT, 30) == model.extend(PROMPT[-1:], cache, 30)


def test_generate_goes_on_after_the_end_and_drafts_change_nothing(checkpoint: Path, tmp_path: Path) -> None:
    free = GeneratePeer(str(checkpoint), dtype="float32", device="cpu").generate(PROMPT, 30)
    ending = shutil.copytree(checkpoint, tmp_path / "ending")
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": free[2]}))
    peer = GeneratePeer(str(ending), dtype="float32", device="cpu")
    assistant = GeneratePeer(str(ending), dtype="float32", device="cpu")
    assert peer.generate(PROMPT, 30) == free
    assert peer.generate(PROMPT, 30, prompt_lookup=4) == free
    for num_tokens in (None, 3):
        assistant.draft(num_tokens)
        assert peer.generate(PROMPT, 30, assistant=assistant) == free


def test_without_a_peer_there_is_no_ratio_to_one(model: CachedModel) -> None:
    result = measure_decoding(model, None, PROMPT, BENCH, ignore)
    assert "speedup_vs_peer" not in result
    assert set(result["ms_per_token"]) == {"fixed", "bucketed"}


def test_contexts_that_fit_are_timed_beside_transformers(model: CachedModel, checkpoint: Path) -> None:
    assert context_lengths(model, BENCH) == [12, 40]
    peer = GeneratePeer(str(checkpoint), dtype="float32", device="cpu")
    result = measure_contexts(model, peer, LONG_PROMPT, BENCH, ignore)
    for name in ("prefill_ms", "pass_ms", "peer_prefill_ms", "peer_step_ms", "prefill_ratio_to_peer"):
        assert list(result[name]) == ["12", "40"]
        assert min(result[name].values()) > 0
    assert result["pass_ratio_to_shortest"]["12"] == 1.0
    assert result["rows"] == model.width
    alone = measure_contexts(model, None, LONG_PROMPT, BENCH, ignore)
    assert set(alone) == {"rows", "prefill_ms", "pass_ms", "pass_ratio_to_shortest"}


def test_the_peer_forgets_each_step_behind_its_context(checkpoint: Path) -> None:
    context = PeerContext(GeneratePeer(str(checkpoint), dtype="float32", device="cpu"), LONG_PROMPT, 40)
    for _ in range(2):
        context.prefill()
        for _ in range(3):
            context.step()
        assert context._cache.get_seq_length() == 40


def test_memory_is_read_at_some_speed() -> None:
    assert 0.1 < read_bandwidth("cpu") < 10_000


def test_the_prompt_has_the_length_that_was_asked_for() -> None:
    assert len(english(lambda text: list(text.encode()), 1000)) == 1000


def test_a_process_knows_its_own_memory() -> None:
    resident = resident_bytes()
    assert resident is None or resident > 10 << 20


def test_the_pair_reports_idle_time_and_memory_and_everything_is_printed(
    model: CachedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", Popen)
    config = EngineConfig(
        target=TargetConfig(kind="hf", model=str(checkpoint), dtype="float32"),
        drafters=(DrafterConfig(kind="hf", model=str(checkpoint), dtype="float32"),),
        hardware=HardwareConfig(devices=("cpu", "cpu")),
        max_model_len=128,
    )
    pair = measure_pair(config, BENCH)
    assert set(pair["idle"]) == {"autoregressive", "synchronous", "asynchronous"}
    assert pair["idle"]["autoregressive"]["draft_between_steps"] is None
    assert pair["idle"]["asynchronous"]["draft_between_steps"] > 0
    assert all(times["target_between_passes"] > 0 for times in pair["idle"].values())
    pair["memory"] |= {"weight_bytes": {"target": 1000, "hf": 1000}, "cache_bytes": {"target": 10, "hf": 10}}
    target, draft = measure_passes(model, {"hf": model}, PROMPT, BENCH, 10.0, ignore)
    document = {
        "target": target,
        "draft": draft,
        "sampling": measure_sampling(model, PROMPT, BENCH, 10.0, ignore),
        "decoding": measure_decoding(model, None, PROMPT, BENCH, ignore),
        "context": measure_contexts(model, None, LONG_PROMPT, BENCH, ignore),
        "transport": {
            "zeromq": {"one_way_us_p50": 1.0, "one_way_us_p99": 2.0, "poll_us": 0.5, "num_messages": 2},
            "shared_memory": {"unavailable": "not here"},
        },
        "transport_choice": {"text": "transport=auto takes zeromq here"},
        "pair": pair,
    }
    text = bench_text(document)
    for line in (
        "target, 4 rows",
        "draft step, hf",
        "verify_width=bucketed",
        "pass of 8 rows",
        "shared_memory",
        "auto takes zeromq",
        "asynchronous",
    ):
        assert line in text
