"""The load generator, against a server over table models: schedules and figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import always_right
from runtime.pair import oracle, pair, plain_engine
from serving.running import MODEL, serving

from experiments import common
from experiments.serving import run as sweep
from experiments.serving.client import Body, Endpoint, Sample


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Body]:
    """The bodies of the requests, as they are sent."""
    found, measure = list[Body](), sweep.measure

    async def recorded(endpoint: Endpoint, users: int, bodies: list[Body]) -> Any:
        found.extend(bodies)
        return await measure(endpoint, users, bodies)

    monkeypatch.setattr(sweep, "measure", recorded)
    return found


def sample(**changed: Any) -> Sample:
    values: dict[str, Any] = {
        "index": 0, "sent": 10.0, "chunks": (11.0, 11.7, 12.4, 13.1), "end": 13.2, "num_tokens": 8,
        "has_usage": True, "digest": "0",
    }  # fmt: skip
    return Sample(**{**values, **changed})


def test_goodput_counts_answers_within_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "TPOT_LIMIT", 0.5)
    samples = [
        sample(),
        sample(sent=7.0),  # its first token took 4 s
        sample(num_tokens=4),  # 0.7 s a token
        sample(error="500: "),
        sample(num_tokens=1, chunks=(11.0,)),  # has no time per token
    ]
    row = sweep.row_of("x", 2, samples, 10.0)
    assert row["goodput"] == pytest.approx(2 / 10)
    assert (row["num_requests"], row["num_complete"], row["errors"]) == (5, 4, {"500: ": 1})
    assert row["num_tokens"] == 8 + 8 + 4 + 1
    assert row["tokens_per_second"] == pytest.approx(2.1)
    assert row["requests_per_second"] == pytest.approx(0.4)
    assert row["tokens_per_chunk"] == pytest.approx(21 / 13)
    assert row["ttft_ms"]["p50"] == pytest.approx(1000)
    assert row["itl_ms"]["p99"] == pytest.approx(700)


def test_the_same_load_goes_to_any_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sent: list[Body]
) -> None:
    with serving(plain_engine(), mode="autoregressive") as server:
        typed = ["--url", server.url, "--users", "1", "2", "--tokens", "8"]
        out = ["--out", str(tmp_path / "a.json"), "--runs", str(tmp_path / "runs")]
        monkeypatch.setattr(sys, "argv", ["experiments/serving/run.py", *typed, *out])
        sweep.main()
    rows = common.read_results(tmp_path / "a.json")["rows"]
    assert [(row["name"], row["users"], row["num_complete"]) for row in rows] == [(MODEL, 1, 2), (MODEL, 2, 4)]
    assert (sent[-1]["stream"], sent[-1]["stream_options"]) == (True, {"include_usage": True})
    assert sent[-1]["messages"][0]["role"] == "user"
    assert "mode" not in sent[-1]
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == [MODEL, "2", "4/4"]


def test_modes_take_turns_and_each_answer_is_beside_plain_decodings(sent: list[Body]) -> None:
    blocks: sweep.Blocks = {}
    with pair({"oracle": oracle(60, always_right())}, max_num_seqs=2) as (engine, _), serving(engine) as server:
        fields = {"max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
        bodies = [server.chat(seed=seed, **fields) for seed in range(3)]
        endpoint = Endpoint(url=server.url, model=MODEL)
        for number in range(2):
            for users in (1, 2):
                sweep.send_block(blocks, endpoint, users, number, bodies, sweep.MODES)
    modes = list(sweep.MODES)
    first, second = ([body["mode"] for body in sent[start : start + 6]] for start in (0, 18))
    assert first == [mode for mode in modes for _ in range(2)]
    assert second == [mode for mode in (*modes[1:], modes[0]) for _ in range(2)]
    rows = sweep.rows_of(blocks)
    assert [(row["name"], row["users"], row["num_complete"]) for row in rows] == [
        (mode, users, 2 * 2 * users) for users in (1, 2) for mode in modes
    ]
    assert rows[0]["speedup"] == 1
    assert sweep.identical_text(rows) == "24 of 24 answers are those of plain decoding under the same load"
