"""A child that ends before its Hello ends the start with its exit code and leaves nothing; it finds the package."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from descriptors import num_descriptors
from memory_link import memory_pair
from runtime.pair import PROMPT, VOCAB_SIZE, paced_model, params, reference
from table_model import TableTokenizer

import amusd
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, TransportConfig
from amusd.engine import Engine
from amusd.errors import PeerFailedError, PeerLostError
from amusd.protocol.messages import PROTOCOL_VERSION, Failed, Hello
from amusd.runtime import draft_restart, supervisor
from amusd.runtime.draft_restart import MAX_RESTARTS
from amusd.runtime.handshake import await_hello
from amusd.runtime.startup import make_recorder
from amusd.tracing.timeline import read_events
from amusd.types import Mode, Role

PACKAGE = Path(amusd.__file__).parent
SECONDS = 60.0
CONNECTS = f"""
import json, os, sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
from amusd.config import TransportConfig
from amusd.transport.base import Rendezvous
from amusd.transport.factory import connect
settings, orders = (json.loads(sys.stdin.readline()) for _ in range(2))
link = connect(TransportConfig(kind=settings["config"]["transport"]["kind"]), Rendezvous(**orders["rendezvous"]))
os._exit(5)
"""


CONFIG = EngineConfig(
    drafters=(DrafterConfig(kind="ngram"),),
    transport=TransportConfig(kind="shared_memory"),
    startup_timeout_seconds=3600.0,
)
"""A drafter that needs no model, and far more time than a test has."""


@pytest.fixture(autouse=True)
def _table_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.engine.load_with_followers", lambda *_: (paced_model(0.0), TableTokenizer(VOCAB_SIZE)))


@pytest.fixture
def links_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where links put their socket files."""
    with tempfile.TemporaryDirectory(prefix="amusd-") as folder:  # a short path: sockets need one
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("child", "end", "num_started"),
    [
        ("raise SystemExit(3)", "ended with exit code 3; ", 1),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9; ", MAX_RESTARTS + 1),
        (CONNECTS, "ended with exit code 5; ", 1),
    ],
    ids=["exits", "killed", "exits when connected"],
)
def test_a_child_that_ends_before_its_hello_ends_the_start(
    tmp_path: Path,
    links_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    child: str,
    end: str,
    num_started: int,
) -> None:
    """At once where it ended by itself; one that was killed is started again, but not for ever."""
    entry = tmp_path / "child.py"
    entry.write_text(child)
    monkeypatch.setattr(supervisor, "command_of", lambda _: [sys.executable, str(entry)])
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr("amusd.child.subprocess.Popen", Noted)
    monkeypatch.setattr(draft_restart, "BACK_OFF_SECONDS", 0.01)
    before = num_descriptors()
    with pytest.raises(PeerLostError, match=r"the draft's process \(pid \d+\) ") as caught:
        Engine.start(CONFIG)
    assert end in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(started) == num_started
    assert None not in [process.returncode for process in started], "one was not waited for"
    assert num_descriptors() <= before
    assert list(links_folder.iterdir()) == []


@pytest.mark.long
def test_the_child_needs_no_path_of_its_own_and_looks_at_nothing_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("amusd", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Engine.start(CONFIG) as engine:
        answer = engine.generate(PROMPT, params(8), decoding=DecodingConfig(mode=Mode.SYNCHRONOUS))
        assert answer.token_ids == reference(8)[len(PROMPT) :]
        assert engine.draft_losses == ()


def parent_of(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("PPid:")[2].split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone")
def test_a_killed_draft_is_followed_by_one_forked_from_the_same_process() -> None:
    decoding = DecodingConfig(mode=Mode.SYNCHRONOUS)
    with Engine.start(CONFIG) as engine:
        first, server = engine.draft_pid, parent_of(engine.draft_pid)
        assert first is not None
        assert server != os.getpid()
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while engine.num_draft_restarts == 0 and time.monotonic() < deadline:
            assert engine.generate(PROMPT, params(8), decoding=decoding).token_ids == reference(8)[len(PROMPT) :]
        assert engine.draft_pid not in (None, first)
        assert parent_of(engine.draft_pid) == server
        life = os.pidfd_open(engine.draft_pid or 0)
        server_end = os.pidfd_open(server)
    for handle in (life, server_end):
        assert select.select([handle], [], [], 0.0)[0], "it is left over"
        os.close(handle)


RAISES = """
from amusd.drafters.base import ChainDrafter, one_by_one
from amusd.drafters.custom import OwnDrafters


class Raising(ChainDrafter):
    def propose(self, max_tokens):
        if self.length > 8:
            raise ValueError(f"no more than\\n{self.length} tokens")
        self.commit((0,))
        return (0,)


def make(context):
    return OwnDrafters(chains=one_by_one(Raising))
"""


def test_a_drafter_that_always_raises_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(RAISES)
    monkeypatch.setattr(draft_restart, "BACK_OFF_SECONDS", 0.01)
    drafter = DrafterConfig(kind="custom", factory=f"{tmp_path}/own.py:make")
    schedule = DecodingConfig(mode=Mode.ASYNCHRONOUS, policy="chain")
    with Engine.start(replace(CONFIG, drafters=(drafter,))) as engine:
        deadline = time.monotonic() + SECONDS
        while engine.draft_failure is None and time.monotonic() < deadline:
            assert engine.generate(PROMPT, params(20), decoding=schedule).token_ids == reference(20)[len(PROMPT) :]
        failure = f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: ValueError: no more than"
        assert engine.draft_failure == failure
    assert capfd.readouterr().err.count("Traceback") == 1  # all lives end with the same error


def test_what_a_process_said_before_it_ended_is_heard() -> None:
    own = Hello(PROTOCOL_VERSION, Role.TARGET, 0, VOCAB_SIZE, "", ())
    here, there = memory_pair()
    there.send(Failed(Role.DRAFT, "MemoryError", "out of memory"))
    with pytest.raises(PeerFailedError, match="out of memory"):
        await_hello(here, own, 60.0, lambda _timeout: "it is gone")


@pytest.mark.long
def test_both_workers_keep_their_events_where_they_are_told(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    process = supervisor.DraftProcess(CONFIG, [tmp_path])
    with Engine.connect(CONFIG, process, make_recorder(Role.TARGET, [tmp_path]), process=process) as engine:
        waits = DecodingConfig(mode=Mode.SYNCHRONOUS, max_silence_seconds=SECONDS)
        answer = engine.generate(PROMPT, params(30), decoding=waits)
    for role, name in (("target", "target_pass"), ("draft", "draft_step")):
        events = read_events(tmp_path, role)
        assert {event.sequence_id for event in events if event.name == name} == {answer.sequence_id}, role
