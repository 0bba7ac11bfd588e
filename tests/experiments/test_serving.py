"""The load generator, against a server that breaks the protocol as told: schedules, figures, errors, resumption."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="httpx is not installed: pip install httpx")


from experiments import common
from experiments.serving import load as load_script
from experiments.serving import run as sweep
from experiments.serving.client import Endpoint, Load, Sample, measure
from experiments.serving.load import Limits, row_of
from tests.experiments.openai_double import OpenAIDouble, answer, chat_chunk, events

WAIT_SECONDS = 60.0


def sample(**changed: Any) -> Sample:
    """Eight tokens in four chunks: the first after 1 s, then one every 0.7 s."""
    values: dict[str, Any] = {
        "index": 0, "due": 10.0, "sent": 10.0, "chunks": (11.0, 11.7, 12.4, 13.1), "end": 13.2, "num_tokens": 8,
        "usage": {"completion_tokens": 8}, "digest": "0",
    }  # fmt: skip
    return Sample(**{**values, **changed})


def ask(reply: Callable[[Any], Any], load: Load, number: int = 1) -> tuple[list[Sample], OpenAIDouble]:
    bodies = [{"seed": seed, "stream": True} for seed in range(number)]
    with OpenAIDouble(reply) as server:
        endpoint = Endpoint(url=server.url, model="a model", timeout_seconds=WAIT_SECONDS)
        samples, _ = asyncio.run(measure(endpoint, load, bodies))
    assert sorted(body["seed"] for body in server.bodies) == list(range(number))
    return samples, server


# When requests are sent


def test_a_user_asks_again_only_when_answered() -> None:
    turnstile = threading.Barrier(3)

    def together(body: Any) -> bytes:
        turnstile.wait(WAIT_SECONDS)  # passes only three at a time: fewer users would never be answered
        return answer(body)

    samples, server = ask(together, Load(users=3), number=12)
    assert server.most_at_a_time == 3
    assert [one.index for one in samples] == list(range(12))
    assert {one.error for one in samples} == {None}


# What an answer says


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((429, "the queue is full"), "429: the queue is full"),
        ((500, "x" * 1000), "500: " + "x" * 200),
        (events(chat_chunk("a")), "the stream ended without [DONE]"),
        (b"", "the stream ended without [DONE]"),
        (events({"error": {"message": "gone"}}, "[DONE]"), 'in the stream: {"message": "gone"}'),
        (events("{oops", "[DONE]"), "JSONDecodeError: "),
        (events("[1]", "[DONE]"), "AttributeError: "),
        (events({"choices": [], "usage": {"tokens": 1}}, "[DONE]"), "KeyError: "),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_the_error_of_its_sample(reply: Any, error: str) -> None:
    (found,), _ = ask(lambda _body: reply, Load(users=1))
    assert found.error is not None
    assert found.error.startswith(error)


# Figures


def test_times_are_those_of_their_definitions() -> None:
    found = sample()
    assert found.ttft == pytest.approx(1.0)
    assert found.latency == pytest.approx(3.1)
    assert found.tpot == pytest.approx(2.1 / 7)
    assert found.gaps == pytest.approx([0.7] * 3)
    late = sample(sent=10.5)
    assert (late.ttft, late.latency) == (found.ttft, found.latency)
    empty = sample(chunks=(), num_tokens=1)
    assert (empty.ttft, empty.tpot, empty.gaps) == (None, None, [])
    assert empty.latency == pytest.approx(3.2)


def test_goodput_counts_answers_within_both_limits() -> None:
    samples = [
        sample(),
        sample(due=7.0),  # its first token took 4 s
        sample(num_tokens=4),  # 0.7 s a token
        sample(error="500: "),
        sample(num_tokens=1, chunks=(11.0,)),  # has no time per token
    ]
    row = row_of("x", Load(users=2), samples, 10.0, Limits(ttft=2.0, tpot=0.5))
    assert row["goodput"] == pytest.approx(2 / 10)
    assert (row["num_requests"], row["num_complete"], row["errors"]) == (5, 4, {"500: ": 1})
    assert row["num_tokens"] == 8 + 8 + 4 + 1
    assert row["tokens_per_second"] == pytest.approx(2.1)
    assert row["requests_per_second"] == pytest.approx(0.4)
    assert row["tokens_per_chunk"] == pytest.approx(21 / 13)
    assert row["ttft_ms"]["p50"] == pytest.approx(1000)
    assert row["itl_ms"]["p99"] == pytest.approx(700)


# The scripts


def loaded(monkeypatch: pytest.MonkeyPatch, url: str, out: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["experiments/serving/load.py", "--url", url, "--out", str(out), *arguments])
    load_script.main()
    return common.read_results(out)


def test_a_load_is_a_table_and_a_file_beside_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_script, "ROOT", tmp_path)
    with OpenAIDouble() as server:
        first = loaded(
            monkeypatch, f"{server.url}/v1/", tmp_path / "a.json", "--users", "1", "2", "--num-requests", "3"
        )
        assert first["command"].startswith("python experiments/serving/load.py --url")
        extra = ["--extra", '{"mode": "synchronous"}', "--temperature", "0.5", "--name", "b"]
        second = loaded(
            monkeypatch, server.url, tmp_path / "b.json", "--rates", "50", "--beside", str(tmp_path / "a.json"), *extra
        )
    assert [(row["name"], row["users"], row["num_complete"]) for row in second["rows"]] == [
        ("a model", 1, 3), ("a model", 2, 3), ("b", None, 16),
    ]  # fmt: skip
    assert len(second["runs"][0]["samples"]) == 16
    asked = server.bodies[-1]
    assert (asked["mode"], asked["temperature"], asked["model"]) == ("synchronous", 0.5, "a model")
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
    assert asked["messages"][0]["role"] == "user"
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["b", "50", "requests/s", "16/16"]


def test_modes_take_turns_and_each_answer_is_beside_plain_decodings() -> None:
    loads = [Load(users=1), Load(users=2)]
    bodies = [{"seed": seed} for seed in range(3)]
    blocks: sweep.Blocks = {}
    with OpenAIDouble() as server:
        endpoint = Endpoint(url=server.url, model="a model")
        for number in range(2):
            for load in loads:
                sweep.send_block(blocks, endpoint, load, number, bodies)
    modes = list(sweep.MODES)
    first, second = ([body["mode"] for body in server.bodies[start : start + 6]] for start in (0, 18))
    assert first == [mode for mode in modes for _ in range(2)]
    assert second == [mode for mode in (*modes[1:], modes[0]) for _ in range(2)]
    rows = sweep.rows_of(blocks, loads, Limits())
    assert [(row["name"], row["users"], row["num_complete"]) for row in rows] == [
        (mode, users, 2 * 2 * users) for users in (1, 2) for mode in modes
    ]
    assert rows[0]["speedup"] == 1
    assert sweep.identical_text(rows) == "24 of 24 answers are those of plain decoding under the same load"
