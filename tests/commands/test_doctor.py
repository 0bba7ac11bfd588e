"""`amusd doctor`: what it says about the pair of models, before anybody waits for an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import tiny
from models.other_tokenizer import save_reindexed, word_tokenizer
from runtime.gpu_doubles import pretend_gpus

from amusd.commands.doctor import Finding, _devices, _links, _pair, _taken, run_doctor
from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, RunConfig, TargetConfig, TransportConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.models.linear import fastest_dtype
from amusd.runtime.cores import allowed_cores, speed_beside
from amusd.transport.factory import Choice
from amusd.transport.latency import OneWayTime

pytestmark = pytest.mark.embedded


def looked_at(config: EngineConfig) -> dict[str, Finding]:
    return {finding.name: finding for finding in _pair(config)}


def test_it_says_who_computes_target_and_drafters_and_that_widths_do_not_show() -> None:
    drafters = (DrafterConfig(kind="embedded", model_impl="transformers"), DrafterConfig(kind="ngram"))
    found = looked_at(EngineConfig(drafters=drafters))
    dtype = fastest_dtype(torch.device("cpu"))
    assert found["target"].ok
    assert found["target"].text.startswith(f"embedded SmolLM2-135M-Instruct: {dtype}, amusd's forward pass")
    assert found["drafter"].ok
    assert found["drafter"].text == f"embedded: {dtype}; ngram"
    assert found["exactness"].ok
    text = "96 of 96 rows equal bit for bit in blocks of 1 to 8 rows, beside other sequences and other paths"
    assert text in found["exactness"].text
    assert found["answers"].text.startswith("up to 8 answers at a time, with a cache of 2048 tokens each: ")


def test_a_model_that_the_decoder_does_not_cover_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.models.load_options.why_not_covered", lambda _config: "a reason")
    config = EngineConfig(target=TargetConfig(model_impl="amusd"), drafters=(DrafterConfig(kind="ngram"),))
    found = looked_at(config)
    assert found["target"] == Finding("target", False, "model_impl=amusd: model type 'llama': a reason")
    assert found["drafter"].ok
    assert "exactness" not in found


def test_it_says_how_much_of_the_vocabulary_a_draft_with_another_tokenizer_can_propose(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tiny.save_checkpoint(tmp_path / "target", tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    for name, num_kept in (("near", 320), ("far", 100)):
        save_reindexed(tmp_path / "target", tmp_path / name, keep=lambda token_id: token_id < num_kept)  # noqa: B023
    target = TargetConfig(kind="hf", model=str(tmp_path / "target"))
    near, far = (
        looked_at(EngineConfig(target=target, drafters=(DrafterConfig(kind="hf", model=str(tmp_path / name)),)))
        for name in ("near", "far")
    )
    assert near["drafter"].ok
    assert "its tokenizer differs from the target's: it can propose 320 of 340 token ids" in near["drafter"].text
    assert far["drafter"].ok is False
    assert "it can propose 100 of 340 token ids" in far["drafter"].text


def test_at_changing_widths_it_only_tells_what_it_measured(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    target = TargetConfig(kind="hf", model=str(tmp_path), dtype="float32")
    drafters = (DrafterConfig(kind="ngram"),)
    found = looked_at(EngineConfig(target=target, verify_width="bucketed", drafters=drafters, max_model_len=256))
    assert found["exactness"].ok is None
    assert found["exactness"].text.startswith("verify_width=bucketed: ")
    assert found["answers"].ok is None


@pytest.mark.parametrize("wanted", ["auto", "gloo", "nccl"])
def test_a_link_that_does_not_work_is_only_wrong_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    def measure(link: TransportConfig, **_orders: object) -> OneWayTime:
        if link.kind in ("gloo", "nccl"):
            raise ConfigError("a reason")
        return OneWayTime(p50_us=12.3, p99_us=45.6)

    monkeypatch.setattr("amusd.commands.doctor.measure_one_way", measure)
    monkeypatch.setattr(
        "amusd.commands.doctor.choose_here", lambda config, _ends: Choice("zeromq", f"for {config.kind}")
    )
    found = {
        finding.name: finding
        for finding in _links(EngineConfig(transport=TransportConfig(kind=wanted)))  # type: ignore[arg-type]
    }
    assert {name: finding.ok for name, finding in found.items()} == {
        "link shm": True,
        "link ipc": True,
        "link tcp": True,
        "link gloo": False if wanted == "gloo" else None,
        "link nccl": False if wanted == "nccl" else None,
        "transport": True,
    }
    assert found["transport"].text == f"zeromq: for {wanted}"
    assert found["link nccl"].text == "a reason"
    assert found["link ipc"].text.startswith("zeromq: 12 us one way")


def test_a_link_that_needs_two_gpus_is_judged_by_where_the_two_ends_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    on_one = HardwareConfig(devices=("cuda:0", "cuda:0"))
    with pytest.raises(ConfigError, match="the target is on cuda:0, the draft on cuda:0"):
        _taken(EngineConfig(transport=TransportConfig(kind="nccl"), hardware=on_one))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _device: "H100")


def placed(config: EngineConfig) -> dict[str, Finding]:
    return {finding.name: finding for finding in _devices(config)}


@pytest.mark.usefixtures("gpus")
def test_it_says_where_both_are_and_on_what() -> None:
    found = placed(EngineConfig(hardware=HardwareConfig(devices=("cuda:0", "cuda:1"))))
    assert found["devices"].text.startswith("3 GPUs; ")
    assert found["placement"] == Finding("placement", True, "target on cuda:0 (H100), draft on cuda:1 (H100)")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((2, 1), ["rank 0 (target)", "rank 1 (target)", "rank 2 (draft)"]),
        ((1, 2), ["rank 0 (target)", "rank 1 (rank 1 of the draft)", "rank 2 (rank 0 of the draft)"]),
    ],
)
def test_it_says_which_rank_is_where(sizes: tuple[int, int], names: list[str]) -> None:
    config = EngineConfig(
        target_tensor_parallel_size=sizes[0],
        draft_tensor_parallel_size=sizes[1],
        hardware=HardwareConfig(devices=("cuda:0", "cuda:1", "cuda:2")),
    )
    placement = placed(config)["placement"]
    assert placement.ok
    assert placement.text == ", ".join(f"{name} on cuda:{gpu} (H100)" for gpu, name in enumerate(names))


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_both_share_is_neither_good_nor_bad() -> None:
    found = placed(EngineConfig(hardware=HardwareConfig(devices=("cuda:0", "cuda:0"))))
    assert found["placement"].ok is None
    assert "docs/one_gpu.md" in found["placement"].text


def test_ranks_that_share_cores_are_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.commands.doctor.allowed_cores", lambda: [0, 1])
    config = EngineConfig(target_tensor_parallel_size=2, hardware=HardwareConfig(devices=("cpu", "cpu")))
    placement = placed(config)["placement"]
    assert placement.ok is None
    assert "too few cores for all, so they" in placement.text


@pytest.mark.parametrize(("kept", "ok"), [(0.97, True), (0.55, None)])
def test_it_says_whether_two_cores_are_two(monkeypatch: pytest.MonkeyPatch, kept: float, ok: bool | None) -> None:
    monkeypatch.setattr("amusd.commands.doctor.allowed_cores", lambda: [4, 5])
    measured: list[tuple[int, int]] = []

    def speed_beside(*cores: int) -> float:
        measured.append(cores)
        return kept

    monkeypatch.setattr("amusd.commands.doctor.speed_beside", speed_beside)
    found = placed(EngineConfig(hardware=HardwareConfig(devices=("cpu", "cpu"))))["cores"]
    assert (found.ok, measured) == (ok, [(4, 5)])
    assert found.text.startswith(f"while both compute, each has {100 * kept:.0f} % of the speed that it has alone")


def test_measuring_two_cores_leaves_this_thread_as_it_was() -> None:
    cores, threads = allowed_cores(), torch.get_num_threads()
    assert speed_beside(cores[0], cores[-1]) > 0
    assert (allowed_cores(), torch.get_num_threads()) == (cores, threads)


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    config = RunConfig(hardware=HardwareConfig(devices=("cuda:0", "cuda:1")))
    with pytest.raises(ConfigError, match=r"^hardware\.devices=\['cuda:0', 'cuda:1'\]: there is no cuda:1"):
        run_doctor(config, Console())


def test_a_model_that_its_ranks_cannot_share_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amusd.models.loading.load_model", lambda *_arguments: pytest.fail("weights are read"))
    target = looked_at(EngineConfig(target_tensor_parallel_size=4, drafters=(DrafterConfig(kind="ngram"),)))["target"]
    assert target.text.startswith("target_tensor_parallel_size=4: each rank needs a key head, and this model has 3;")
    monkeypatch.setattr("amusd.models.loading.load_embedded_draft", lambda *_, **__: pytest.fail("weights are read"))
    monkeypatch.setattr("amusd.commands.doctor.load_target", lambda *_: fail())
    draft = looked_at(EngineConfig(draft_tensor_parallel_size=4))["drafter"]
    assert draft.text.startswith("draft_tensor_parallel_size=4: each rank needs a key head, and this model has 3;")


def fail() -> None:
    raise ConfigError("the target is not looked at here")
