"""Where the store of a pair listens, who may write into it, and what is refused before anything listens."""

from __future__ import annotations

import dataclasses
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch.job import Group, Job, Options, store_secret

from amusd.config import RunConfig
from amusd.errors import AmusdError, ConfigError, PeerFailedError
from launch.draft import own_transport
from launch.drafts import OVER
from launch.main import main
from launch.nodes import await_members, left, tell_no_group, told_group
from launch.ranks import run_further_ranks
from launch.store import Place, Store
from tests.launch.processes import ROOT, SECONDS, environment

NODE = "127.0.0.2"


def free_port() -> int:
    with socket.create_server((NODE, 0)) as probe:
        return int(probe.getsockname()[1])


def place(address: str, **changes: Any) -> Place:
    """The target, which serves the store."""
    known = {"rank": 0, "apart": True, "address": address, "port": 29500, "is_by_itself": True, "namespace": "t"}
    return Place(**{**known, **changes})


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "[::]", "example.org", ""])
def test_a_store_beyond_this_machine_needs_keys_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"not on this machine, and neither transport\.keys=FOLDER"):
        place(host).check_address(["transport.insecure=false"])
    for allowed in ("transport.insecure=true", "transport.keys=keys"):
        place(host).check_address([allowed])


def test_torchrun_over_machines_needs_them_too_and_on_one_machine_nothing() -> None:
    with pytest.raises(ConfigError, match=r"not on this machine, and neither transport\.keys=FOLDER"):
        place("192.0.2.1", is_by_itself=False).check_address([])
    place("192.0.2.1", is_by_itself=False, apart=False).check_address([])


def test_the_script_refuses_in_one_line_before_anything_listens(tmp_path: Path) -> None:
    host = "0.0.0.0"
    script = ["sh", str(ROOT / "launch" / "two_nodes.sh"), "prompt=hi"]
    variables = {**environment(), "TARGET_HOST": host, "NODE_RANK": "0", "PYTHON": sys.executable}
    done = subprocess.run(script, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith(f"amusd: {host}:29500: not on this machine, and neither transport.keys=FOLDER")
    assert done.stderr.count("\n") == 1


def test_a_machine_says_at_once_whom_it_awaits_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    target = place(NODE, port=free_port())
    with pytest.raises(ConfigError, match=f"^{target.endpoint}: nobody else came within 0.1 seconds"):
        await_members(target, Store(target), 0.1)
    expected = f"amusd: waiting for the draft's machine (NODE_RANK=1) at {target.endpoint}: 0 s at most\n"
    assert capsys.readouterr().err == expected


def test_a_store_that_cannot_be_served_or_found_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.store.CONNECT_SECONDS", 0.1)
    with socket.create_server((NODE, 0)) as taken:
        target = place(NODE, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"^{target.endpoint}: cannot listen there"):
            Store(target)
    draft = place(NODE, port=free_port(), rank=1)
    with pytest.raises(ConfigError, match=f"^{draft.endpoint}: no target found there"):
        Store(draft)


def test_a_store_listens_at_its_own_address_alone() -> None:
    target = place(NODE, port=free_port())
    store = Store(target)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", target.port), timeout=SECONDS)
    store.put("finished", value=True)


@pytest.fixture
def host() -> Place:
    """Whoever has it serves a store."""
    return place(NODE, port=free_port())


def test_a_value_that_was_not_sealed_with_the_same_secret_is_refused(host: Place) -> None:
    target = Store(host, b"ours")
    guest = dataclasses.replace(host, rank=1)
    target.put("group", {"command": "generate"})
    assert Store(guest, b"ours").get("group", 5.0) == {"command": "generate"}
    for secret in (b"theirs", b""):
        Store(guest, secret).put("group", {"command": "compare"})
        with pytest.raises(ConfigError, match="the value 'group' in the store was not written with this side's secret"):
            target.get("group", 5.0)


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff" * 80, pickle.dumps("x" * 80)])
def test_anything_else_in_the_store_is_refused_the_same_way(host: Place, text: bytes) -> None:
    store = Store(host, b"ours")
    store._store.set("t/group", text)
    with pytest.raises(ConfigError, match="was not written with this side's secret"):
        store.get("group", 5.0)


def test_a_value_is_sealed_under_its_own_name_and_run(host: Place) -> None:
    store = Store(host, b"ours")
    store.put("finished", value=True)
    store._store.set("t/rendezvous", store._store.get("t/finished"))
    with pytest.raises(ConfigError, match="the value 'rendezvous'"):
        store.get("rendezvous", 5.0)
    Store(dataclasses.replace(host, rank=1, namespace="t/0"), b"ours").put("group", {"command": "generate"})
    store._store.set("t/group", store._store.get("t/0/group"))
    with pytest.raises(ConfigError, match="the value 'group'"):
        store.get("group", 5.0)


def test_a_worker_takes_the_link_from_its_own_arguments(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    by_hand = Options(overrides=(f"transport.keys={tmp_path / 'keys'}", "transport.address=tcp://10.0.0.1:1"))
    assert own_transport(by_hand).address == "tcp://10.0.0.1:1"
    assert len(store_secret(by_hand)) == 40
    assert store_secret(Options(overrides=("prompt=hi",))) == b""


def test_what_the_store_holds_is_no_prompt() -> None:
    group = Group(command="generate", jobs=(Job(config=RunConfig(prompt="a secret"), run_directory=Path("/runs")),))
    assert "a secret" in group.to_text()
    assert "a secret" not in group.without_prompts().to_text()


@pytest.mark.parametrize("error", [ConfigError("no such model"), PeerFailedError("rank 1 was killed")])
def test_what_ends_a_further_rank_is_told_the_target(
    host: Place, monkeypatch: pytest.MonkeyPatch, error: AmusdError
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("launch.ranks._follow", fail)
    target = Store(host)
    job = Job(config=RunConfig(), run_directory=Path("/runs"))
    target.put("group", Group(command="generate", jobs=(job,)).to_text())
    further = dataclasses.replace(host, rank=1, size=3, apart=False)
    assert run_further_ranks(Options(), further) == 0
    assert target.get("failure", 5.0) == {"users_mistake": isinstance(error, ConfigError), "line": str(error)}
    assert target.has(left(1))


@pytest.mark.parametrize(("apart", "exit_code"), [(True, 2), (False, 0)])
def test_with_nothing_to_do_other_machines_end_as_the_target_does(host: Place, apart: bool, exit_code: int) -> None:
    target = Store(host)
    tell_no_group(target, "no such model", 2)
    other = dataclasses.replace(host, rank=1, apart=apart)
    store = Store(other)
    assert told_group(other, store) == exit_code
    assert store.await_any(OVER, 5.0) == "finished"
