"""The draft's process: its start, its replacement from a loaded copy, and the one line about its loss."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from lines import logged
from memory_link import of_another_version
from runtime.pair import PROMPT, VOCAB_SIZE, paced_model, params, reference
from table_model import TableTokenizer

from amusd.child import Ended
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, TransportConfig
from amusd.engine import Engine
from amusd.errors import PeerLostError
from amusd.protocol.messages import DraftHello, TargetHello
from amusd.protocol.wire import encode
from amusd.runtime import draft_process, draft_server, patience
from amusd.runtime.draft_process import DraftProcess, DraftSource
from amusd.runtime.draft_server import DraftServer
from amusd.runtime.patience import MAX_RESTARTS
from amusd.tracing.recorder import Recorder
from amusd.tracing.timeline import read_events
from amusd.transport import factory
from amusd.transport.factory import link_address
from tests.warm import Popen

SECONDS = 60.0
CONFIG = EngineConfig(
    drafters=(DrafterConfig(kind="ngram"),),
    transport=TransportConfig(kind="shared_memory"),
    startup_timeout_seconds=3600.0,
)
WAITS = DecodingConfig(mode="synchronous", max_silence_seconds=SECONDS)


READS = "from multiprocessing.connection import Connection; pipe = Connection(0); pipe.recv_bytes(); pipe.recv_bytes()"


@pytest.fixture(autouse=True)
def _table_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "amusd.runtime.startup.load_first_rank", lambda *_: (paced_model(0.0), TableTokenizer(VOCAB_SIZE))
    )


@pytest.mark.parametrize(
    ("child", "end", "num_started"),
    [
        (f"{READS}; raise SystemExit(3)", "ended with exit code 3; ", 1),
        (f"{READS}; import os; os.kill(os.getpid(), 9)", "was killed by signal 9; ", MAX_RESTARTS + 1),
    ],
    ids=["exits", "killed"],
)
def test_a_target_whose_draft_ends_before_its_hello_starts_alone_and_says_so(
    links_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    child: str,
    end: str,
    num_started: int,
) -> None:
    """A draft that ended by itself is reported at once; a killed one is started again, but not for ever."""
    monkeypatch.setattr(draft_process, "command_of", lambda _: [sys.executable, "-c", child])
    started = Mock(side_effect=subprocess.Popen)
    monkeypatch.setattr("amusd.child.subprocess.Popen", started)
    monkeypatch.setattr(patience, "BACK_OFF_SECONDS", 0.01)
    before, others = psutil.Process().num_fds(), psutil.Process().children()
    with Engine.start(CONFIG) as engine:
        *killed, line = caplog.messages
        assert all("was killed by signal 9" in each for each in killed)
        assert line.startswith("the target starts without a draft: ")
        assert end in line
        assert "\n" not in line
        assert psutil.Process().children() == others, "one was not waited for"
        assert list(links_folder.iterdir()) == []
        assert engine.draft.presence == "failed"
        assert engine.generate(PROMPT, params(8), decoding=WAITS).token_ids == reference(8)[len(PROMPT) :]
    assert started.call_count == num_started
    assert psutil.Process().num_fds() <= before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone")
def test_a_killed_draft_is_said_in_one_line_and_the_next_is_forked_from_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amusd.child.subprocess.Popen", Popen)
    met: list[int | None] = []
    events = f"{tmp_path}/events"
    with logged() as lines, Engine.connect(CONFIG, DraftSource(CONFIG), Recorder("target", events)) as engine:
        first = engine.draft.pid
        assert first is not None
        engine.draft.on_met = lambda: met.append(engine.draft.pid)
        server = psutil.Process(first).ppid()
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while engine.draft.num_restarts == 0 and time.monotonic() < deadline:
            assert engine.generate(PROMPT, params(8), decoding=WAITS).token_ids == reference(8)[len(PROMPT) :]
        second = engine.draft.pid
        assert second is not None
        assert psutil.Process(second).ppid() == server != os.getpid()
        answer = engine.generate(PROMPT, params(30), decoding=WAITS)
        handles = [os.pidfd_open(pid) for pid in (second, server)]
    for handle in handles:
        assert select.select([handle], [], [], 0.0)[0], "it is left over"
        os.close(handle)
    assert met == [second]
    assert [line.partition(";")[0] for line in lines] == [f"the draft's process (pid {first}) was killed by signal 9"]
    for role, name in (("target", "target_pass"), ("draft", "draft_step")):
        ids = {event.sequence_id for event in read_events(tmp_path, role) if event.name == name}
        assert answer.sequence_id in ids, role


def test_a_process_that_cannot_be_forked_serves_target_after_target_whatever_one_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listens = iter([factory.listen] * 3)

    def listen(*given: Any, **named: Any) -> Any:
        return next(listens)(*given, **named)

    monkeypatch.setattr(draft_server, "listen", listen)
    with link_address(CONFIG.transport) as address, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(DraftServer(CONFIG, address, is_own=False).run)
        for number in (1, 2, 3):
            while (target := factory.connect(CONFIG.transport, address, number)) is None:
                assert not serving.done()
            with closing(target):
                hello = TargetHello(number, "any", None)
                target.send_frame(of_another_version(hello) if number == 2 else encode(hello, number))
                with pytest.raises(PeerLostError) if number == 2 else nullcontext():
                    assert target.receive(SECONDS) == DraftHello(number, "", ("ngram",), (), os.getpid())
        with pytest.raises(StopIteration):
            serving.result(SECONDS)
    assert len([line for line in caplog.messages if "the peer speaks protocol version 11" in line]) == 1


@pytest.mark.parametrize("address", ["shm://{}/gone/link", "ipc://{}/gone/link"])
def test_a_draft_whose_folder_went_with_its_target_ends_without_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    assert DraftServer(CONFIG, address.format(tmp_path), is_own=True).run() == draft_process.TOLD
    assert [line for line in caplog.messages if not line.startswith("draft: ngram")] == []


@pytest.mark.parametrize(("ends", "code", "num_started"), [((-9, 4), 0, 2), ((3, 2), 2, 1), ((1,), 1, 0)])
def test_a_draft_is_kept_until_that_is_over_or_it_cannot_begin(
    ends: tuple[int, ...], code: int, num_started: int
) -> None:
    process: Any = Mock(spec=DraftProcess)
    process.ended.side_effect = [None, *(Ended(7, code) for code in ends)]
    assert DraftProcess.keep_running(process, lambda: process.ended.call_count > len(ends)) == code
    assert process.start_next.call_count == num_started
    process.stop.assert_called_once_with()


SCRIPT = f"""
import multiprocessing, os, sys, time
sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]!r}
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig
import amusd.engine
from runtime.pair import PROMPT, VOCAB_SIZE, paced_model, params
from table_model import TableTokenizer

amusd.runtime.startup.load_first_rank = lambda *_: (paced_model(0.0), TableTokenizer(VOCAB_SIZE))


def answer():
    engine = amusd.engine.Engine.start(EngineConfig(drafters=(DrafterConfig(kind="ngram"),)))
    decoding = DecodingConfig(mode="synchronous")
    print(*engine.generate(PROMPT, params(8), decoding=decoding).token_ids, flush=True)
    print(os.getpid(), engine.draft.pid, flush=True)
    return engine


def in_daemon():
    engine = answer()
    time.sleep({SECONDS})


engine = answer()
multiprocessing.get_context("fork").Process(target=in_daemon, daemon=True).start()
time.sleep({SECONDS})
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process is forked")
def test_a_script_without_a_guard_and_a_daemon_of_it_have_drafts_which_end_with_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    expected = " ".join(map(str, reference(8)[len(PROMPT) :]))
    pipe, pids = subprocess.PIPE, list[list[int]]()
    with Popen([sys.executable, str(script)], stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        for _ in range(2):
            assert parent.stdout.readline().strip() == expected
            pids.append([int(pid) for pid in parent.stdout.readline().split()])
        for user, draft in pids:
            handles = [os.pidfd_open(pid) for pid in (draft, psutil.Process(draft).ppid())]
            os.kill(user, signal.SIGKILL)
            for handle in handles:
                assert select.select([handle], [], [], SECONDS)[0], "a draft outlives its parent"
                os.close(handle)


OWN = """
from amusd.drafters.base import Drafter


class Raising(Drafter):
    def propose(self, path, room):
        if self.length + len(path) > 8:
            raise ValueError(f"no more than\\n{self.length + len(path)} tokens")
        return (0,)


def make(context):
    return lambda number: [Raising() for _ in range(number)]
"""


def test_a_drafter_that_always_raises_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("amusd.child.subprocess.Popen", Popen)
    monkeypatch.setattr(patience, "BACK_OFF_SECONDS", 0.01)
    (tmp_path / "own.py").write_text(OWN)
    config = replace(CONFIG, drafters=(DrafterConfig(kind="custom", factory=f"{tmp_path}/own.py:make"),))
    schedule = DecodingConfig(mode="asynchronous", policy="chain")
    with Engine.connect(config, DraftSource(config), Recorder("target", f"{tmp_path}/events")) as engine:
        deadline = time.monotonic() + SECONDS
        while engine.draft.failure is None and time.monotonic() < deadline:
            assert engine.generate(PROMPT, params(20), decoding=schedule).token_ids == reference(20)[len(PROMPT) :]
        failure = f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: ValueError: no more than"
        assert engine.draft.failure == failure
    assert capfd.readouterr().err.count("Traceback") == 1  # all incarnations end with the same error
    assert "ValueError: no more than" in (tmp_path / "draft_error.txt").read_text()
