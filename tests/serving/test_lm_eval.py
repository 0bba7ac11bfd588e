"""lm-eval asks the server, and transformers' own model without any of amusd: the same scores, item by item.

Both in float32, whose rounding differs by the order of sums: log-likelihoods of some tokens agree to `TOLERANCE`.
Nothing is fetched: the tasks and their data are in lm_eval_tasks/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-all")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'amusd[serve]'")

from experiments.serving.run import serving

pytestmark = [pytest.mark.long, pytest.mark.embedded, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
TASKS = ("amusd_choices", "amusd_continuations")
TOLERANCE = 2e-3
"""Largest difference of the log-likelihood of a choice, a few tokens long."""


def evaluated(folder: Path, model: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Results by task, and the samples of each task in the order of the file."""
    offline = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
    }
    words = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", words]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(ROOT / "tests" / "serving" / "lm_eval_tasks")]
    command += ["--device", "cpu", "--output_path", str(folder / model), "--log_samples"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (folder / model).rglob("results_*.json")
    samples = {}
    for task in TASKS:
        (file,) = (folder / model).rglob(f"samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"], samples


def test_the_scores_are_those_of_transformers(embedded_folder: Path, tmp_path: Path) -> None:
    with serving(["target.dtype=float32", "max_num_seqs=4"], tmp_path) as endpoint:
        address = {"base_url": f"{endpoint.url}/v1/completions", "model": endpoint.model, "num_concurrent": 4}
        results, samples = evaluated(tmp_path, "local-completions", {**address, "tokenizer": embedded_folder})
    directly = {"pretrained": embedded_folder, "dtype": "float32"}
    own_results, own_samples = evaluated(tmp_path, "hf", directly)

    for ours, theirs in zip(samples["amusd_choices"], own_samples["amusd_choices"], strict=True):
        for (one, is_greedy), (other, other_is_greedy) in zip(likelihoods(ours), likelihoods(theirs), strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE)
            assert is_greedy == other_is_greedy
    for ours, theirs in zip(samples["amusd_continuations"], own_samples["amusd_continuations"], strict=True):
        assert ours["resps"] == theirs["resps"]
    for metric in ("acc,none", "acc_norm,none"):
        assert results["amusd_choices"][metric] == own_results["amusd_choices"][metric]
    assert results["amusd_choices"]["acc,none"] > 0.5  # a model that guesses has a third
    sys.stdout.write(f"accuracy {results['amusd_choices']['acc,none']}, of both\n")


def likelihoods(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Log-likelihood of each choice, and whether it is the likeliest continuation."""
    return [(float(value), str(is_greedy) == "True") for value, is_greedy in sample["filtered_resps"]]
