"""The draft's process: started wherever its parent runs, replaced from what has loaded, told of in one line if lost."""

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

import psutil
import pytest
from descriptors import num_descriptors
from runtime.pair import PROMPT, VOCAB_SIZE, paced_model, params, reference
from table_model import TableTokenizer

import amusd
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, TransportConfig
from amusd.engine import Engine
from amusd.errors import ConfigError, PeerLostError
from amusd.runtime import draft_process, draft_restart
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.draft_restart import MAX_RESTARTS
from amusd.runtime.startup import make_recorder
from amusd.tracing.timeline import read_events
from amusd.types import Mode, Role
from tests.warm import Popen

SECONDS = 60.0
CONNECTS = f"""
import json, os, sys
sys.path.insert(0, {str(Path(amusd.__file__).parents[1])!r})
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
WAITS = DecodingConfig(mode=Mode.SYNCHRONOUS, max_silence_seconds=SECONDS)


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
    links_folder: Path, monkeypatch: pytest.MonkeyPatch, child: str, end: str, num_started: int
) -> None:
    """At once where it ended by itself; one that was killed is started again, but not for ever."""
    monkeypatch.setattr(draft_process, "command_of", lambda _: [sys.executable, "-c", child])
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone")
def test_a_killed_draft_is_said_in_one_line_and_the_next_is_forked_from_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers keep their events where they are told."""
    monkeypatch.setattr("amusd.child.subprocess.Popen", Popen)
    lines: list[str] = []
    met: list[int | None] = []
    events = f"{tmp_path}/events"
    process = DraftProcess(CONFIG, events=events, tell_loss=lines.append, on_met=lambda: met.append(process.pid))
    with Engine.connect(CONFIG, process, make_recorder(Role.TARGET, events), process=process) as engine:
        first = engine.draft_pid
        assert first is not None
        server = psutil.Process(first).ppid()
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while engine.num_draft_restarts == 0 and time.monotonic() < deadline:
            assert engine.generate(PROMPT, params(8), decoding=WAITS).token_ids == reference(8)[len(PROMPT) :]
        second = engine.draft_pid
        assert second is not None
        assert psutil.Process(second).ppid() == server != os.getpid()
        answer = engine.generate(PROMPT, params(30), decoding=WAITS)
        handles = [os.pidfd_open(pid) for pid in (second, server)]
    for handle in handles:
        assert select.select([handle], [], [], 0.0)[0], "it is left over"
        os.close(handle)
    assert met == [first, second]
    assert [line.partition(";")[0] for line in lines] == [f"the draft's process (pid {first}) was killed by signal 9"]
    for role, name in (("target", "target_pass"), ("draft", "draft_step")):
        ids = {event.sequence_id for event in read_events(tmp_path, role) if event.name == name}
        assert answer.sequence_id in ids, role


OWN = """
from amusd.drafters.base import ChainDrafter, one_by_one
from amusd.drafters.custom import OwnDrafters
from amusd.errors import ConfigError


class Raising(ChainDrafter):
    def propose(self, max_tokens):
        if self.length > 8:
            raise ValueError(f"no more than\\n{self.length} tokens")
        self.commit((0,))
        return (0,)


def make(context):
    return OwnDrafters(chains=one_by_one(Raising))


def refuse(context):
    raise ConfigError("not on a Monday")
"""


def own_drafter(folder: Path, name: str) -> EngineConfig:
    (folder / "own.py").write_text(OWN)
    return replace(CONFIG, drafters=(DrafterConfig(kind="custom", factory=f"{folder}/own.py:{name}"),))


def test_a_drafter_that_always_raises_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("amusd.child.subprocess.Popen", Popen)
    monkeypatch.setattr(draft_restart, "BACK_OFF_SECONDS", 0.01)
    config, events = own_drafter(tmp_path, "make"), f"{tmp_path}/events"
    process = DraftProcess(config, events=events)
    schedule = DecodingConfig(mode=Mode.ASYNCHRONOUS, policy="chain")
    with Engine.connect(config, process, make_recorder(Role.TARGET), process=process) as engine:
        deadline = time.monotonic() + SECONDS
        while engine.draft_failure is None and time.monotonic() < deadline:
            assert engine.generate(PROMPT, params(20), decoding=schedule).token_ids == reference(20)[len(PROMPT) :]
        failure = f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: ValueError: no more than"
        assert engine.draft_failure == failure
    assert capfd.readouterr().err.count("Traceback") == 1  # all lives end with the same error
    assert "ValueError: no more than" in (tmp_path / "draft_error.txt").read_text()


def test_a_drafter_that_is_refused_is_its_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.child.subprocess.Popen", Popen)
    config = own_drafter(tmp_path, "refuse")
    process = DraftProcess(config)
    with pytest.raises((ConfigError, PeerLostError), match="not on a Monday"):
        Engine.connect(config, process, make_recorder(Role.TARGET))
    assert "not on a Monday" in (process.ending(SECONDS) or "")
    failure = process.start_failure()
    process.stop()
    assert isinstance(failure, ConfigError)
    assert str(failure).endswith("not on a Monday")


SCRIPT = f"""
import multiprocessing, os, sys
sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]!r}
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig
import amusd.engine
from runtime.pair import PROMPT, VOCAB_SIZE, paced_model, params
from table_model import TableTokenizer

amusd.engine.load_with_followers = lambda *_: (paced_model(0.0), TableTokenizer(VOCAB_SIZE))


def answer():
    engine = amusd.engine.Engine.start(EngineConfig(drafters=(DrafterConfig(kind="ngram"),)))
    decoding = DecodingConfig(mode="synchronous")
    print(*engine.generate(PROMPT, params(8), decoding=decoding).token_ids, flush=True)
    return engine


def in_daemon():
    answer().close()


daemon = multiprocessing.get_context("fork").Process(target=in_daemon, daemon=True)
daemon.start()
daemon.join()
engine = answer()
print(engine.draft_pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process is forked")
def test_a_script_without_a_guard_and_a_daemon_of_it_have_drafts_which_end_when_it_is_killed(tmp_path: Path) -> None:
    """In a folder whose modules have the names of those that the draft imports."""
    for name in ("amusd", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory')")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text(SCRIPT)
    expected = " ".join(map(str, reference(8)[len(PROMPT) :]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        in_daemon, in_script, pid = (parent.stdout.readline().strip() for _ in range(3))
        assert (in_daemon, in_script) == (expected, expected)
        handles = [os.pidfd_open(int(pid)), os.pidfd_open(psutil.Process(int(pid)).ppid())]
        parent.kill()
    for handle in handles:
        assert select.select([handle], [], [], SECONDS)[0], "a draft outlives its parent"
        os.close(handle)
