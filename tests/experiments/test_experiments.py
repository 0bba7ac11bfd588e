"""The experiments that run `amusd`: their command lines, their files of results, their figures, their arithmetic."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amusd.errors import ConfigError
from experiments import common, plotting, request
from experiments.async_vs_sync import run as async_vs_sync
from experiments.equal_devices import run as equal_devices
from experiments.peers import run as peers
from experiments.simulator_fidelity import run as simulator_fidelity
from launch.compose import compose_config

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/plot.py"))
MACHINE = {"cpu": {"model": "a processor", "allowed_cores": 2}, "packages": {}}


def plain_and(speeds: dict[str, float], category: str | None, number: int) -> dict[str, Any]:
    """A prompt on which plain decoding took 40 ms a token."""
    own = {name: 40 / (speed + number / 100) for name, speed in speeds.items()}
    return {"number": number, "category": category, "ms_per_token": {"autoregressive": 40.0} | own}


def row(mode: str, policy: str | None, length: int | None, speed: float) -> dict[str, Any]:
    plain = mode == "autoregressive"
    named = {"autoregressive": mode, "synchronous": "synchronous, 2 tokens, ngram"}.get(
        mode, f"{mode}, {policy}, ngram"
    )
    return {
        "contestant": named,
        "mode": mode,
        "policy": policy,
        "drafter": None if plain else "ngram",
        "num_speculative_tokens": length,
        "tokens_per_second": 25 * speed,
        "speedup_vs_autoregressive": speed,
        "num_devices": 1 if plain else 2,
        "mean_acceptance_length": 2.0,
        "identical_to_autoregressive": {"num_prompts": 4, "num_identical": 4},
    }


def job(**settings: str) -> dict[str, Any]:
    rows = [
        row("autoregressive", None, None, 1.0),
        row("synchronous", None, 2, 1.5),
        row("asynchronous", "chain", None, 1.6),
        row("asynchronous", "branching", None, 1.7),
    ]
    speeds = {one["contestant"]: one["speedup_vs_autoregressive"] for one in rows[1:]}
    prompts = [plain_and(speeds, category, number) for number, category in enumerate(("a", "b", None, "a"), start=1)]
    return {"command": "amusd compare", "settings": settings, "rows": rows, "per_prompt": prompts}


def asked(tmp_path: Path, *arguments: str, experiment: str = "link_delay") -> request.Request:
    parser = request.parser_of(experiment, None, num_prompts=4, num_tokens=8)
    return request.request_of(parser.parse_args([*arguments, "--runs", str(tmp_path / "runs")]))


@pytest.mark.parametrize("name", NAMES)
def test_help_is_there_at_once_from_any_folder(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / name / "run.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"python experiments/{name}/run.py" in done.stdout
    assert {"--prompts", "--num-prompts", "--tokens", "--quick", "--out"} <= set(done.stdout.replace("]", " ").split())


def test_a_script_of_an_experiment_loads_neither_torch_nor_matplotlib() -> None:
    modules = [f"experiments.{name}.{script}" for name in NAMES for script in ("run", "plot")]
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_question_and_commands(name: str) -> None:
    text = (ROOT / "experiments" / name / "README.md").read_text()
    assert "**Question.**" in text
    assert f"python experiments/{name}/run.py" in text
    assert f"python experiments/{name}/plot.py" in text


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


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")  # of matplotlib, whose version is the user's
def test_results_are_drawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed: pip install matplotlib")
    plot = importlib.import_module(f"experiments.{name}.plot")
    results = max((ROOT / "experiments" / name / "results").glob("*.json"))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(results), "--out", str(tmp_path)])
    plotting.plotter(name, plot.draw)
    assert (tmp_path / f"{results.stem}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / f"{results.stem}.svg").read_text()
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        plotting.plotter(name, plot.draw)
    assert capsys.readouterr().err == "figures need matplotlib: pip install matplotlib\n"


def test_results_say_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--prompts=/home/me/mt_bench.jsonl"])
    asking = asked(tmp_path, "--out", str(tmp_path / "results.json"))
    common.write_results(asking, {**MACHINE, "commit": "0" * 40}, {"rows": [1]})
    results = common.read_results(asking.out)
    assert results["command"] == "python experiments/link_delay/run.py --prompts=mt_bench.jsonl"
    assert (results["commit"], results["machine"], results["rows"]) == ("0" * 40, MACHINE, [1])


def test_a_command_is_run_and_its_document_comes_back(tmp_path: Path) -> None:
    overrides = ["accept=0.8", "verify_ms=40", "draft_ms=4", "simulate.num_answers=2", "simulate.num_tokens=32"]
    result = common.run_amusd("simulate", overrides, tmp_path / "run")
    assert result == common.read_json(tmp_path / "run" / "result.json")
    assert result["rows"][0]["speedup"] == 1


def test_a_command_that_fails_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^amusd simulate: exit code 2"):
        common.run_amusd("simulate", ["accept=0.8"], tmp_path / "run")


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(10)))
    asking = asked(tmp_path, "--prompts", str(file), "--num-prompts", "5")
    assert [json.loads(line)["prompt"] for line in asking.lines()] == ["0", "2", "4", "6", "8"]
    overrides = asking.workload()
    assert (asking.runs / "prompts.jsonl").read_text().splitlines() == asking.lines()
    assert overrides[1:] == ["workload.num_prompts=5", "sampling.max_new_tokens=8"]
    everything = asked(tmp_path, "--prompts", str(file), "--num-prompts", "99")
    assert len(everything.lines()) == everything.described()["num_prompts"] == 10


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokens=0: must be at least 1"):
        asked(tmp_path, "--tokens", "0")
    with pytest.raises(ConfigError, match="--prompts="):
        asked(tmp_path, "--prompts", str(tmp_path / "none")).lines()
    (tmp_path / "other.json").write_text('{"experiment": "link_delay"}')
    with pytest.raises(ConfigError, match="no date, commit"):
        common.read_results(tmp_path / "other.json")


def test_quick_results_do_not_replace_the_measured_ones(tmp_path: Path) -> None:
    assert asked(tmp_path).out == ROOT / "experiments" / "link_delay" / "results" / "link_delay.json"
    assert asked(tmp_path, "--quick").out == tmp_path / "runs" / "quick.json"


def test_each_job_of_a_sweep_has_its_rows_in_the_table() -> None:
    lines = common.rows_text([job(**{"transport.delay_ms": value}) for value in ("0", "0.7")]).splitlines()
    assert len(lines) == 2 + 2 * 4
    assert lines[0].split()[:2] == ["transport.delay_ms", "mode"]
    assert lines[2].split()[:2] == ["0", "autoregressive"]
    assert lines[-1].split()[:2] == ["0.7", "asynchronous"]


def test_categories_are_medians_of_their_own_prompts() -> None:
    found = async_vs_sync.categories_of(job(**{"sampling.temperature": "0"}))
    of_chain = {one["category"]: one for one in found if one["policy"] == "chain"}
    assert set(of_chain) == {"a", "b", "other"}
    assert of_chain["a"]["num_prompts"] == 2
    assert of_chain["a"]["speedup_vs_autoregressive"] == pytest.approx((1.61 + 1.64) / 2)
    assert of_chain["b"]["speedups"] == pytest.approx([1.62])


def test_the_accounting_counts_every_core_that_is_occupied() -> None:
    slower, faster = job(**{"sampling.temperature": "0"}), job(**{"sampling.temperature": "0"})
    for shared, factor in ((slower, 0.5), (faster, 1.2)):
        shared["rows"] = [one | {"tokens_per_second": factor * one["tokens_per_second"]} for one in shared["rows"][:2]]
    found = async_vs_sync.accounting([job(**{"sampling.temperature": "0"})], [slower, faster])
    by_kind = {one["kind"]: one for one in found}
    assert by_kind["autoregressive"]["num_cores"] == 1
    plain = by_kind["autoregressive, both cores for each pass"]
    assert (plain["num_cores"], plain["tokens_per_second"]) == (2, pytest.approx(30.0))
    assert plain["tokens_per_second_per_core"] == pytest.approx(15.0)
    chain = by_kind["asynchronous (chain), ngram"]
    assert chain["tokens_per_second_per_core"] == pytest.approx(20.0)
    assert chain["of_plain_on_one_core"] == pytest.approx(1.6)


def test_the_error_of_a_prediction_is_relative_and_its_sign_does_not_cancel() -> None:
    rows = [
        {"error": error, "calibrated": calibrated, "calibration": "other prompts", "drafter": drafter}
        for error, calibrated, drafter in ((0.1, True, "ngram"), (-0.3, False, "ngram"), (0.2, False, "embedded"))
    ]
    summary = simulator_fidelity.summary_of(rows)
    assert summary["other prompts"] == {"num_settings": 2, "median": 0.25, "worst": 0.3}
    assert summary["other prompts, ngram"] == {"num_settings": 1, "median": 0.3, "worst": 0.3}


def test_two_engines_are_as_fast_as_both_together_and_every_use_is_compared_with_plain_decoding() -> None:
    def answer(line: str, mode: str, ms: float, *token_ids: int) -> tuple[str, dict[str, Any]]:
        length = 2 if mode == "synchronous" else None
        return line, {"mode": mode, "length": length, "tokens": 10, "ms": ms, "token_ids": list(token_ids)}

    plain = [answer("a", "autoregressive", 100, 1), answer("b", "autoregressive", 300, 2)]
    answers = {
        "pair": [(line, 0, record) for line, record in (*plain, answer("a", "synchronous", 50, 1))],
        "all devices": [(line, 0, record) for line, record in plain],
        "two engines": [(line, engine, record) for engine, (line, record) in enumerate(plain)]
        + [("b", 1, answer("b", "synchronous", 100, 3)[1])],
    }
    rows = equal_devices.rows_of(answers)
    assert [(row["use"], row["num_speculative_tokens"]) for row in rows] == [
        ("pair", None), ("pair", 2), ("all devices", None), ("two engines", None), ("two engines", 2)
    ]  # fmt: skip
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([50, 200, 50, 100 + 100 / 3, 100])
    assert [row["tokens_per_second_per_device"] for row in rows] == pytest.approx([50, 100, 25, 50 + 50 / 3, 50])
    assert [(row["num_identical"], row["num_answers"]) for row in rows] == [(2, 2), (1, 1), (2, 2), (2, 2), (0, 1)]


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda:0", "cuda:1")])
def test_every_use_of_equal_devices_is_a_command(devices: tuple[str, str]) -> None:
    for use in equal_devices.USES:
        for engine in range(2):
            config = compose_config(equal_devices.settings_of(use, engine, devices, [2, 3]))
            own = config.hardware.devices
            assert set(own) == ({devices[engine]} if use == "two engines" else set(devices))
            assert config.hardware.num_threads == (2 if (use, devices[0]) == ("all devices", "cpu") else 1)


def test_a_peer_is_compared_with_plain_decoding_on_its_own_cores() -> None:
    names = ["transformers, 1 core: plain", "transformers, 2 cores: plain", "transformers, 2 cores: assisted"]
    prompt = {"ms_per_token": dict(zip(names, (60.0, 40.0, 20.0), strict=True)), "as_plain": dict.fromkeys(names, True)}
    assisted = peers.rows_of([prompt])[2]
    assert assisted["speedup_vs_own_plain"] == 2
    assert assisted["speedup_vs_transformers"] == 3
