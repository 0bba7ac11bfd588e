"""lm-eval asks the server, and transformers' own model without any of amusd: the same answers, item by item.

Nothing is fetched: the task and its data are in lm_eval_tasks/.
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
TASK = "amusd_continuations"


def answers(folder: Path, model: str, arguments: dict[str, Any]) -> list[Any]:
    """The answers to the task, in the order of its file."""
    offline = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
    }
    words = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", words]
    command += ["--tasks", TASK, "--include_path", str(ROOT / "tests" / "serving" / "lm_eval_tasks")]
    command += ["--device", "cpu", "--output_path", str(folder / model), "--log_samples"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (folder / model).rglob(f"samples_{TASK}_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def test_the_answers_are_those_of_transformers(embedded_folder: Path, tmp_path: Path) -> None:
    with serving(["target.dtype=float32", "max_num_seqs=4"], tmp_path) as endpoint:
        address = {"base_url": f"{endpoint.url}/v1/completions", "model": endpoint.model, "num_concurrent": 4}
        ours = answers(tmp_path, "local-completions", {**address, "tokenizer": embedded_folder})
    assert ours == answers(tmp_path, "hf", {"pretrained": embedded_folder, "dtype": "float32"})
