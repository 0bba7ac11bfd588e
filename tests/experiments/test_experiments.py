"""The experiments that run `amusd`: their command lines, their files of results, their figures, their arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import common, request
from experiments.equal_devices import run as equal_devices
from launch.compose import compose_config
from tests.warm import Popen

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/figures"))


@pytest.mark.parametrize("name", NAMES)
def test_results_say_where_they_come_from(name: str) -> None:
    for path in (ROOT / "experiments" / name / "results").glob("*.json"):
        results = common.read_results(path)
        assert results["experiment"] == name
        assert results["quick"] is False
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", results["date"])
        assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", results["commit"])
        assert results["machine"]["cpu"]["model"]
        assert results["workload"]["num_prompts"] > 0
        assert len(results.get("jobs") or results["rows"]) > 0


def test_a_command_is_run_and_its_document_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.common.subprocess.Popen", Popen)
    overrides = ["accept=0.8", "verify_ms=40", "draft_ms=4", "simulate.num_tokens=16"]
    overrides += ["simulate.synchronous_lengths=[2]", "simulate.min_candidates=[0]"]
    result = common.run_amusd("simulate", overrides, tmp_path / "run")
    assert result == common.read_json(tmp_path / "run" / "result.json")
    assert result["rows"][0]["speedup"] == 1


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(10)))
    typed = ["--prompts", str(file), "--num-prompts", "5", "--runs", str(tmp_path / "runs")]
    parser = request.parser_of("link_delay", None, num_prompts=4, num_tokens=8)
    asking = request.request_of(parser.parse_args(typed))
    assert [json.loads(line)["prompt"] for line in asking.lines()] == ["0", "2", "4", "6", "8"]
    overrides = asking.workload()
    assert (asking.runs / "prompts.jsonl").read_text().splitlines() == asking.lines()
    assert overrides[1:] == ["workload.num_prompts=5", "sampling.max_new_tokens=8"]


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda:0", "cuda:1")])
def test_every_use_of_equal_devices_is_a_command(devices: tuple[str, str]) -> None:
    for use in equal_devices.USES:
        for engine in range(2):
            config = compose_config(equal_devices.settings_of(use, engine, devices, [2, 3]))
            own = config.hardware.devices
            assert set(own) == ({devices[engine]} if use == "two engines" else set(devices))
            assert config.hardware.num_threads == (2 if (use, devices[0]) == ("all devices", "cpu") else 1)
