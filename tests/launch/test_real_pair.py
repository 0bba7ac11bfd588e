"""The commands as a user runs them: two processes, the embedded pair, and faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from amusd.tracing.events import DRAFT_WORK, TARGET_WORK
from amusd.tracing.timeline import Timeline, read_timeline
from tests.launch.processes import PATIENT, SECONDS, amusd_command, assert_gone, begun, descendants, run

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

PROMPT = "prompt=Why is the sky blue? Answer in three sentences."
NUM_TOKENS = 48


def generate(folder: Path, *overrides: str) -> dict[str, Any]:
    done = run(
        amusd_command("generate", PROMPT, "output=json", f"sampling.max_new_tokens={NUM_TOKENS}", *overrides), folder
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def answering(folder: Path, *overrides: str) -> AbstractContextManager[subprocess.Popen[Any]]:
    arguments = (PROMPT, "run_dir=out", f"sampling.max_new_tokens={NUM_TOKENS}", PATIENT, *overrides)
    return begun(amusd_command("generate", *arguments), folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return generate(tmp_path_factory.mktemp("plain"), "mode=autoregressive")


def overlap(part: Timeline) -> float:
    work = [(event.start_ns, event.end_ns) for event in part.target if event.name in TARGET_WORK]
    steps = [(event.start_ns, event.end_ns) for event in part.draft if event.name in DRAFT_WORK]
    inside = sum(max(0, min(end, last) - max(start, first)) for start, end in steps for first, last in work)
    return inside / sum(end - start for start, end in steps)


def test_two_processes_give_the_plain_answer_and_really_overlap(tmp_path: Path) -> None:
    arguments = ["compare.synchronous_lengths=[3]", "workload.num_prompts=1", "policy=chain", "min_candidates=0"]
    done = run(amusd_command("compare", "output=json", "sampling.max_new_tokens=16", *arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    document = json.loads(done.stdout)
    rows, parts = document["rows"], read_timeline(Path(document["run_dir"])).by_sequence()
    assert [(row["mode"], row["drafter"]) for row in rows] == [
        ("autoregressive", None),
        ("synchronous", "embedded"),
        ("asynchronous", "embedded"),
    ]
    for row in rows:
        assert row["identical_to_autoregressive"]["num_identical"] == 1
    # The draft's steps lie inside the target's passes; taking turns, only its prefill does.
    synchronous, asynchronous = (overlap(parts[row["sequence_ids"][0]]) for row in rows[1:])
    assert asynchronous > max(0.5, synchronous)
    assert 0 <= rows[2]["target_idle_fraction"] < 1
    assert 0 <= rows[2]["draft_idle_fraction"] < 1


def test_a_killed_draft_costs_no_token_and_is_named(tmp_path: Path, plain: dict[str, Any]) -> None:
    with answering(tmp_path) as process:
        os.kill(json.loads((tmp_path / "out" / "workers.json").read_text())["draft"][0], signal.SIGKILL)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out.decode()) == (0, plain["text"] + "\n"), err
    assert len([line for line in err.decode().splitlines() if line.startswith("amusd: the draft was lost once (")]) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_every_process_and_keeps_what_was_written(tmp_path: Path, signum: signal.Signals) -> None:
    folder = tmp_path / "out"
    with answering(tmp_path, "sampling.max_new_tokens=400", "sampling.ignore_eos=true") as process:
        others = descendants(process.pid)
        assert len(others) >= 2  # what a draft is forked from, and the draft
        if signum == signal.SIGINT:  # as a terminal sends it
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        out, err = (said.decode() for said in process.communicate(timeout=SECONDS))
    assert "Traceback" not in err
    assert_gone(others)
    if signum == signal.SIGKILL:
        text = (folder / "partial.txt").read_text()
        assert process.returncode == -signum
        assert text.startswith(out)
        assert text
        return
    assert process.returncode == 128 + signum
    assert err.endswith(f"amusd: interrupted; what was measured is in {folder}\n")
    result = json.loads((folder / "result.json").read_text())
    assert result["complete"] is False
    assert result["text"].startswith(out.rstrip("\n"))
    assert len(result["token_ids"]) > 0
