"""Links between two processes: who is stopped is slow, who is killed is lost, at either end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from transport.links import DEADLINE, PROCESS_LINKS, VERDICT, Pair, expect

from amusd.errors import PeerLostError
from tests.warm import Popen

ROOT = Path(__file__).parents[2]
ECHO = f"""
import sys
sys.path.insert(0, "tests")
from amusd.protocol.messages import Verdict
from transport.links import PROCESS_LINKS
link = PROCESS_LINKS[sys.argv[1]]()
if sys.argv[2:]:
    end = link.connect(sys.argv[2])
    end.send({VERDICT!r})
else:
    end = link.listen()
    sys.stdout.write(end.address + "\\n")
    sys.stdout.flush()
while (message := end.receive({3 * DEADLINE})) is not None:
    end.send(message)
"""


@pytest.fixture(params=PROCESS_LINKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def link(name: str) -> Iterator[Pair]:
    link = PROCESS_LINKS[name]()
    yield link
    link.close()


def echo(*arguments: str) -> subprocess.Popen[Any]:
    return Popen([sys.executable, "-c", ECHO, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_stopped_process_is_slow_and_a_killed_one_is_lost(link: Pair, name: str) -> None:
    end = link.listen()
    with echo(name, end.address) as process, ThreadPoolExecutor(1) as threads:
        try:
            assert end.receive(3 * DEADLINE) == VERDICT
            os.kill(process.pid, signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            end.send(VERDICT)
            assert end.receive(0.2) is None
            os.kill(process.pid, signal.SIGCONT)
            assert expect(end) == VERDICT
            receiving = threads.submit(end.receive, DEADLINE)
            time.sleep(0.05)  # so that it sleeps; sooner is right as well
            process.kill()
            with pytest.raises(PeerLostError, match="the peer closed"):
                receiving.result(DEADLINE)
        finally:
            process.kill()


def test_the_death_of_the_listening_process_is_noticed_too(link: Pair, name: str) -> None:
    with echo(name) as process:
        end = link.connect(process.stdout.readline().strip())
        end.send(VERDICT)
        assert end.receive(3 * DEADLINE) == VERDICT
        process.kill()
        with pytest.raises(PeerLostError):
            end.receive(DEADLINE)
