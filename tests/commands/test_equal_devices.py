"""`amusd compare compare.equal_devices=true`: the other uses of the same devices, beside a pair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import tiny
from runtime.pair import pair

from amusd.answer import Answer
from amusd.commands import compare as command
from amusd.commands import peers as module
from amusd.commands.compare import run_comparison
from amusd.commands.contestants import Comparison, Contestant, comparison_text, contestants_of, records_of, rows_of
from amusd.commands.peers import Answers, Load, Peer, Peers, _generation, _load, _values, answer_load, layouts_of
from amusd.config import (
    CompareConfig,
    DecodingConfig,
    DrafterConfig,
    EngineConfig,
    HardwareConfig,
    RunConfig,
    SamplingParams,
    TargetConfig,
)
from amusd.console import Console
from amusd.drafters.ngram import NgramDrafter
from amusd.engine import Engine
from amusd.errors import ConfigError, PeerFailedError
from amusd.settings import from_mapping
from amusd.tracing.events import NO_SEQUENCE
from amusd.types import Mode
from amusd.workload import user_prompt
from tests.warm import Popen

PROMPTS = [user_prompt("bad", 1), user_prompt("fade", 2), user_prompt("deafbead", 3)]
SEVERAL_RANKS = {"target_tensor_parallel_size": 2}


def run_config(*sizes: int, **changes: object) -> RunConfig:
    values: dict[str, object] = {
        "policy": "chain",
        "drafter": {"kind": "ngram"},
        "compare": {"batch_sizes": list(sizes or (1,)), "equal_devices": True, "synchronous_lengths": [2, 3]},
        "sampling": {"max_new_tokens": 9, "ignore_eos": True},
        **changes,
    }
    return from_mapping(RunConfig, values)


MS_PER_TOKEN = {
    ("pair", Mode.AUTOREGRESSIVE): 12.0,
    ("pair", Mode.SYNCHRONOUS): 8.0,
    ("pair", Mode.ASYNCHRONOUS): 5.0,
    ("ranks", Mode.AUTOREGRESSIVE): 7.0,
    ("ranks", Mode.SYNCHRONOUS): 6.0,
    ("replicas", Mode.AUTOREGRESSIVE): 12.0,
    ("replicas", Mode.SYNCHRONOUS): 9.0,
}


class Beside(Peers):
    """Other engines that are the pair's own. Every contestant takes a time that is known."""

    def answer(self, engine: Engine, load: Load) -> Answers:
        found = answer_load(engine, load).generations
        ns_per_token = 1e6 * MS_PER_TOKEN[load.contestant.layout, load.contestant.decoding.mode]
        for answer in found:
            answer.metrics.total_ns = round(ns_per_token * answer.metrics.num_tokens)
        return Answers(found, sum(answer.metrics.total_ns for answer in found) / 1e9 / load.contestant.batch_size)


def compared(config: RunConfig) -> tuple[Comparison, list[dict[str, Any]]]:
    comparison = Comparison.of(config, ("ranks", "replicas"))
    width = config.engine_for("compare").max_num_seqs
    with pair({"ngram": lambda: NgramDrafter(2)}, max_num_seqs=width, pass_seconds=0.0) as (engine, _):
        run_comparison(engine, config, PROMPTS, comparison, lambda *_: None, peers=Beside())
        return comparison, rows_of(comparison, engine)


def test_every_layout_has_its_modes_and_devices() -> None:
    found = [(one.name, one.num_devices) for one in contestants_of(run_config(), ("ranks", "replicas"))]
    assert found == [
        ("autoregressive", 1),
        ("synchronous, 2 tokens, ngram", 2),
        ("synchronous, 3 tokens, ngram", 2),
        ("asynchronous, chain, ngram", 2),
        ("autoregressive, all devices", 2),
        ("synchronous, 2 tokens, ngram, all devices", 2),
        ("synchronous, 3 tokens, ngram, all devices", 2),
        ("autoregressive, replicas", 2),
        ("synchronous, 2 tokens, ngram, replicas", 2),
        ("synchronous, 3 tokens, ngram, replicas", 2),
    ]
    assert [name for name, _ in found[:4]] == [one.name for one in contestants_of(run_config())]


@pytest.mark.parametrize(
    ("devices", "of_plain", "of_pair"),
    [((), 2, 3), (("cuda:0", "cuda:1", "cuda:2"), 2, 3), (("cuda:0", "cuda:1", "cuda:1"), 2, 2), (("cpu",) * 3, 2, 3)],
)
def test_a_rank_counts_as_a_device_unless_it_shares_a_gpu(
    devices: tuple[str, ...], of_plain: int, of_pair: int
) -> None:
    config = run_config(hardware={"devices": list(devices)}, **SEVERAL_RANKS)
    plain, *others = contestants_of(config)
    assert plain.num_devices == of_plain
    assert {one.num_devices for one in others} == {of_pair}


def test_rows_are_compared_per_device_and_with_the_best_other_use() -> None:
    comparison, rows = compared(run_config())
    assert [(row["mode"], row["layout"]) for row in rows] == [
        ("autoregressive", "pair"),
        ("synchronous", "pair"),
        ("asynchronous", "pair"),
        ("autoregressive", "ranks"),
        ("synchronous", "ranks"),
        ("autoregressive", "replicas"),
        ("synchronous", "replicas"),
    ]
    approx = pytest.approx
    per_second = [1e3 / 12, 1e3 / 8, 1e3 / 5, 1e3 / 7, 1e3 / 6, 2e3 / 12, 2e3 / 9]  # of replicas both together
    assert [row["tokens_per_second"] for row in rows] == approx(per_second)
    assert [row["num_devices"] for row in rows] == [1, *[2] * 6]
    assert [row["speedup_vs_autoregressive"] for row in rows] == approx([speed * 12e-3 for speed in per_second])
    assert [row["speedup_vs_best_synchronous"] for row in rows] == [
        None, 1, approx(8 / 5), None, approx(8 / 6), None, approx(16 / 9)
    ]  # fmt: skip
    assert [row["speedup_at_equal_devices"] for row in rows] == [None, None, approx(6 / 5), *[None] * 4]
    for row in rows:
        assert row["tokens_per_second_per_device"] == row["tokens_per_second"] / row["num_devices"]
        assert row["identical_to_autoregressive"]["num_identical"] == len(PROMPTS)
    table = comparison_text(rows)
    assert "x equal" in table
    assert "per device" in table
    assert {record["layout"] for record in records_of(comparison)} == {"pair", "ranks", "replicas"}


def test_several_at_a_time_have_all_layouts() -> None:
    comparison, rows = compared(run_config(1, 2))
    of_two = [row for row in rows if row["batch_size"] == 2]
    assert [row["layout"] for row in of_two] == ["pair", "pair", "pair", "ranks", "ranks", "replicas", "replicas"]
    replicas = of_two[-2]
    index = [contestant.name for contestant in comparison.contestants].index(replicas["contestant"])
    assert replicas["tokens_per_second"] == 2 * replicas["num_tokens"] / comparison.seconds[index]
    assert of_two[2]["speedup_at_equal_devices"] is not None


def test_without_it_nothing_else_is_measured() -> None:
    config = run_config()
    comparison = Comparison.of(config)
    with pair({"ngram": lambda: NgramDrafter(2)}, pass_seconds=0.0) as (engine, _):
        run_comparison(engine, config, PROMPTS, comparison, lambda *_: None)
        rows = rows_of(comparison, engine)
    assert {row["layout"] for row in rows} == {"pair"}
    assert "layout" not in records_of(comparison)[0]
    assert "x equal" not in comparison_text(rows)
    assert "per device" in comparison_text(rows)


def engine_config(*devices: str, num_threads: int = 1, **changes: Any) -> EngineConfig:
    return EngineConfig(hardware=HardwareConfig(devices=devices, num_threads=num_threads), **changes)


def test_on_cpus_all_cores_of_the_pair_are_threads_and_a_replica_has_those_of_one_rank() -> None:
    found = layouts_of(engine_config("cpu", "cpu", num_threads=2), [0, 1, 2, 3, 4, 5, 6, 7])
    ((ranks, cores),) = found["ranks"]
    assert cores == [0, 1, 6, 7]
    assert (ranks.hardware.num_threads, ranks.hardware.pin_cores, ranks.num_ranks) == (4, False, 2)
    assert [cores for _, cores in found["replicas"]] == [[0, 1], [6, 7]]
    for replica, _ in found["replicas"]:
        assert (replica.hardware.num_threads, replica.hardware.pin_cores) == (2, False)


def test_on_gpus_they_are_ranks_and_the_draft_stays_where_it_is() -> None:
    found = layouts_of(engine_config("cuda:0", "cuda:1"), [0, 1])
    ((ranks, cores),) = found["ranks"]
    assert (ranks.target_tensor_parallel_size, cores) == (2, [])
    assert ranks.hardware.devices == ("cuda:0", "cuda:1", "cuda:1")
    assert [replica.hardware.devices for replica, _ in found["replicas"]] == [("cuda:0",) * 2, ("cuda:1",) * 2]


def test_a_target_of_several_ranks_has_no_replica_on_the_drafts_device() -> None:
    found = layouts_of(engine_config("cuda:0", "cuda:1", "cuda:2", **SEVERAL_RANKS), [0, 1])
    assert list(found) == ["ranks"]
    assert found["ranks"][0][0].hardware.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:2")


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cuda:0", "cuda:0")])
def test_devices_that_are_not_alike_or_shared_are_one_line(devices: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^compare\.equal_devices=true: not with hardware\.devices="):
        layouts_of(engine_config(*devices), [0, 1])


def test_an_answer_crosses_as_it_is() -> None:
    config = run_config()
    with pair({"ngram": lambda: NgramDrafter(2)}, pass_seconds=0.0) as (engine, _):
        for mode in (Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS):
            answer = engine.generate("bad", config.sampling, decoding=DecodingConfig(mode=mode))
            assert _generation(_values(answer)) == replace(answer, sequence_id=NO_SEQUENCE)


def a_load(**changes: Any) -> Load:
    contestant = Contestant(DecodingConfig(mode=Mode.AUTOREGRESSIVE), None, **changes)
    return Load(contestant, [(5, 6), (7,), (8, 9, 10)], SamplingParams(max_new_tokens=4, ignore_eos=True))


def test_a_load_crosses_as_it_is() -> None:
    load, lines = a_load(batch_size=3), list[Any]()
    Peer.begin(SimpleNamespace(_say=lines.append), load)  # type: ignore[arg-type]
    assert _load(json.loads(json.dumps(lines[0]))) == load


def test_the_slowest_of_several_engines_stands_for_all() -> None:
    def engine(seconds: float) -> Any:
        return SimpleNamespace(begin=lambda _load: None, end=lambda: Answers([], seconds))

    peers = Peers()
    peers._of_layout["replicas"] = [engine(seconds) for seconds in (1.0, 3.0, 2.0)]
    assert peers.answer(None, a_load(layout="replicas")).seconds == 3.0  # type: ignore[arg-type]


def test_answers_are_in_the_order_of_their_prompts_whichever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = module.in_flight

    def backwards(*arguments: Any) -> Iterator[tuple[int, Answer]]:
        return reversed([*in_flight(*arguments)])

    load = a_load(batch_size=3)
    with pair({"ngram": lambda: NgramDrafter(2)}, max_num_seqs=3, pass_seconds=0.0) as (engine, _):
        expected = [answer_load(engine, replace(load, prompts=[prompt])).generations[0] for prompt in load.prompts]
        monkeypatch.setattr(module, "in_flight", backwards)
        found = answer_load(engine, load).generations
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len({one.token_ids for one in found}) == len(load.prompts)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(folder, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    return folder


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Popen)


def real_config(checkpoint: Path, **changes: Any) -> RunConfig:
    return RunConfig(
        target=TargetConfig(kind="hf", model=str(checkpoint), dtype="float32"),
        drafter=DrafterConfig(kind="ngram"),
        compare=CompareConfig(synchronous_lengths=(2,), equal_devices=True),
        hardware=HardwareConfig(devices=("cpu", "cpu")),
        sampling=SamplingParams(max_new_tokens=8, ignore_eos=True),
        max_model_len=128,
        startup_timeout_seconds=60.0,
        **changes,
    )


@pytest.mark.usefixtures("_forked")
def test_real_engines_give_the_same_tokens_and_leave_nothing(checkpoint: Path, tmp_path: Path) -> None:
    config = real_config(checkpoint)
    started: list[Peer] = []
    start = Peer.__init__

    def kept(self: Peer, *arguments: Any) -> None:
        start(self, *arguments)
        started.append(self)

    with pytest.MonkeyPatch.context() as patch, Engine.start(config.engine_for("compare")) as engine:
        patch.setattr(Peer, "__init__", kept)
        done = command.compare(config, engine, Console(json_only=True), PROMPTS[:2], tmp_path)
    rows = done.result["rows"]
    assert [row["layout"] for row in rows] == ["pair", "pair", "pair", "ranks", "ranks", "replicas", "replicas"]
    assert all(row["identical_to_autoregressive"]["num_identical"] == 2 for row in rows)
    assert [row["num_devices"] for row in rows] == [1, 2, 2, 2, 2, 2, 2]
    assert all(row["draft_overlap_fraction"] is None for row in rows if row["layout"] != "pair")
    assert len(started) == 3
    assert all(peer._process.poll() == 0 for peer in started)


@pytest.mark.long
@pytest.mark.usefixtures("_forked")
def test_an_engine_of_several_ranks_answers_and_one_that_is_killed_is_one_line(checkpoint: Path) -> None:
    config = replace(
        real_config(checkpoint).engine_for("compare"),
        target_tensor_parallel_size=2,
        hardware=HardwareConfig(devices=("cpu",) * 3, pin_cores=False),
    )
    plain = Contestant(DecodingConfig(mode=Mode.AUTOREGRESSIVE), None)
    load = Load(plain, [(5, 6, 7)], SamplingParams(max_new_tokens=6, ignore_eos=True))
    peer = Peer(config, [])
    try:
        peer.await_ready()
        peer.begin(load)
        (answer,) = peer.end().generations
        assert len(answer.token_ids) == 6
        os.kill(peer._process.pid, signal.SIGKILL)
        peer.begin(load)
        with pytest.raises(PeerFailedError, match=r"another engine, process .* has ended"):
            peer.end()
    finally:
        peer.close()


@pytest.mark.usefixtures("_forked")
def test_a_layout_that_cannot_be_is_left_out(checkpoint: Path) -> None:
    config = real_config(checkpoint).engine_for("compare")
    missing = replace(config, target=TargetConfig(kind="hf", model=str(checkpoint / "none")))
    notes: list[str] = []
    with Peers.start(missing, notes.append) as peers:
        assert peers.layouts == ()
    assert [note.partition(":")[0] for note in notes] == ["compare.equal_devices"] * 2
    assert all("left out" in note and "none" in note for note in notes)
