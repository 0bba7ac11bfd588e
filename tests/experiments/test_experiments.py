"""The experiments: command lines, files of results, figures, tables, arithmetic, and the runtimes beside ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from tracing.runs import made
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from amusd.checkpoints import embedded_target
from amusd.errors import ConfigError
from amusd.tracing.events import Event
from experiments import common, request
from experiments.equal_devices import run as equal_devices
from experiments.machines import run as machines
from experiments.peers.native import gguf_file
from experiments.peers.process import installed
from experiments.peers.stock import Transformers
from experiments.survival import run as survival
from launch.compose import compose_config
from tests.launch.processes import ROOT
from tests.warm import Popen

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


# The table of architectures: every causal type of transformers, each in the document


TABLE = json.loads((ROOT / "experiments/architectures/results/table.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(transformers.__version__ != TABLE["transformers"], reason="the table is of another version")
def test_each_causal_type_was_tried() -> None:
    assert {*TABLE["outcomes"]} == {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}


def test_each_one_is_in_one_group_of_the_document() -> None:
    document = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8").partition("| Model types |\n")[2]
    groups = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", document, re.MULTILINE)
    named = [name for group in groups for name in group.split(", ")]
    assert sorted(named) == sorted(["---", *TABLE["outcomes"]])


# The table of machines: a row is the median of three runs, and the README shows what the file holds


def result(ratio: float, **summary: Any) -> dict[str, Any]:
    figures = {"autoregressive": 10.0, "synchronous": 20.0, "asynchronous": 20 * ratio, "acceptance_length": 2.5}
    named = {"machine": "A CPU, 2 cores", "pair": "embedded, embedded", "commit": "c0ffee00" * 5}
    same = {"num_prompts": 16, "num_identical": 15}
    return {
        "summary": {**named, **figures, "ratio": ratio, **summary},
        "environment": {"date": "2026-11-28"},
        "rows": [{"identical_to_autoregressive": same}, {"identical_to_autoregressive": None}],
    }


def test_a_row_is_the_median_of_the_runs_and_stands_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"Rules\n\n{machines.MARK}\n\nan older table\n")
    machines.add_row(tmp_path, [result(1.3), result(1.1), result(1.2)], ["target.model=/secret/big"])
    machines.write_table(tmp_path)
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (row["ratio"], row["asynchronous"], row["keys"][-1]) == (1.2, 24.0, "target.model=big")
    line = "| A CPU, 2 cores | embedded, embedded | 10.0 | 20.0 | 24.0 | 1.20 | 2.50 | 45/48 | 2026-11-28, c0ffee00 |"
    header, rule = machines.table_of([]).split("\n")
    assert header.count("|") == rule.count("|") == line.count("|")
    assert (tmp_path / "README.md").read_text() == f"Rules\n\n{machines.MARK}\n\n{header}\n{rule}\n{line}\n"


@pytest.mark.parametrize("odd", [{"commit": "+changes"}, None], ids=["another commit", "a mode is missing"])
def test_runs_that_are_no_row_are_refused(tmp_path: Path, odd: dict[str, str] | None) -> None:
    last = result(1.0, **odd) if odd else {**result(1.0), "summary": {}}
    with pytest.raises(ConfigError, match=r"^no row: "):
        machines.add_row(tmp_path, [result(1.0), result(1.0), last], [])
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_table_is_the_one_of_the_rows() -> None:
    rows = [json.loads(line) for line in (machines.FOLDER / "rows.jsonl").read_text().splitlines()]
    assert (machines.FOLDER / "README.md").read_text().partition(machines.MARK)[2].strip() == machines.table_of(rows)


# The runtimes that stand beside ours: which ones run, and that their weights are the target's


class Absent(Transformers):
    name = "Absent"
    package = "not-installed-anywhere"


def test_a_runtime_that_is_not_installed_is_one_line_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(installed([Absent, Transformers])) == [Transformers]
    assert capsys.readouterr().err == "Absent is left out: pip install not-installed-anywhere\n"


@pytest.mark.parametrize(("matrices", "file_type"), [("F16", 1), ("BF16", 32)])
def test_a_gguf_file_has_the_values_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matrices: Literal["F16", "BF16"], file_type: int
) -> None:
    source, random = tmp_path / "source.gguf", np.random.default_rng(0)
    matrix, norm = (random.normal(size=shape).astype(np.float32) for shape in ((8, 64), (64,)))
    q4 = GGMLQuantizationType.Q4_1
    writer = GGUFWriter(source, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_file_type(3)
    writer.add_tensor("matrix", quantize(matrix, q4), raw_dtype=q4)
    writer.add_tensor("norm", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(embedded_target, "find_source", lambda: source)
    reader = GGUFReader(gguf_file(tmp_path, matrices))
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == file_type
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"matrix": matrices, "norm": "F32"}
    for tensor, before in zip(reader.tensors, (dequantize(quantize(matrix, q4), q4), norm), strict=True):
        rounded = torch.from_numpy(before).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), rounded)


# The survival experiment's figures from the target's events, and its problems


MS = 1_000_000


def passed(start: float, end: float, *, tokens: int = 1, accepted: int = 0, sequence: int = 1) -> Event:
    return made("target_pass", int(start * MS), int(end * MS), sequence, num_tokens=tokens, num_accepted=accepted)


def at(name: str, ms: float) -> Event:
    return made(name, int(ms * MS), int(ms * MS))


STORY = [
    passed(0, 40, tokens=3, accepted=2),
    passed(41, 81, tokens=2, accepted=1),
    at("draft_lost", 90),
    passed(101, 141),
    passed(142, 181),
    passed(301, 341, sequence=2),
    passed(343, 383, sequence=2),
    at("draft_back", 390),
    passed(391, 431, sequence=2),
    passed(432, 472, tokens=3, accepted=2, sequence=2),
]


def test_a_cycle_is_read_off_the_events() -> None:
    cycle = survival.cycle_of(STORY, 60 * MS)
    assert cycle == {
        "pause_ms": 20.0,
        "notice_ms": 30.0,
        "away_ms": 300.0,
        "attach_ms": 82.0,
        "alone_ms_per_token": (40 + 42 + 48 - 8) / 3,
    }


def test_a_cycle_ends_with_the_first_accepted_candidate() -> None:
    assert all(survival.cycle_of(STORY[:number], 60 * MS) is None for number in range(len(STORY)))


def test_a_wrong_token_and_anything_left_is_a_problem() -> None:
    fine = {
        "num_answers": 3, "num_exact": 3, "held_before": {"sockets": 2}, "held_after": {"sockets": 2}, "left": {"a": 0},
    }  # fmt: skip
    assert survival.problems_of(fine) == []
    for spoilt in ({"num_exact": 2}, {"held_after": {"sockets": 3}}, {"left": {"a": 1}}):
        assert len(survival.problems_of({**fine, **spoilt})) == 1
