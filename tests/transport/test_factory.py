"""The rule that `transport=auto` follows, and that the link which is made is the one that it names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import get_args
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.links import NONCE

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.transport import factory
from amusd.transport.factory import ON_ONE_MACHINE, Link, choose_here, listen

AUTO = TransportConfig()
IN_ORDER: tuple[Link, ...] = ("shared_memory", "zeromq", "zeromq_tcp")
SCHEMES = {"shared_memory": "shm", "zeromq": "ipc", "zeromq_tcp": "tcp", "gloo": "gloo"}
FAR = "tcp://10.0.0.1:29500"


def choose(config: TransportConfig, failed: Mapping[Link, str]) -> Link:
    """The choice on a machine where some links fail, for the reasons given."""

    def bind(link: Link, *_: object) -> Mock:
        if link in failed:
            raise ConfigError(failed[link])
        return Mock()

    with patch.object(factory, "_bind", bind):
        return choose_here(config)


@given(st.sets(st.sampled_from(get_args(Link))))
def test_auto_takes_the_first_that_has_not_failed(failed: set[Link]) -> None:
    reasons = {link: f"no {link}" for link in failed}
    left = [link for link in IN_ORDER if link not in failed]
    if not left:
        with pytest.raises(ConfigError, match=r"^no shared_memory; no zeromq; no zeromq_tcp$"):
            choose(AUTO, reasons)
        return
    assert choose(AUTO, reasons) == left[0]


@pytest.mark.parametrize("kind", ["shared_memory", "zeromq", "gloo", "nccl"])
def test_what_is_asked_for_is_taken_or_nothing(kind: Link) -> None:
    config = TransportConfig(kind=kind)  # type: ignore[arg-type]  # parametrised text
    assert choose(config, {}) == kind
    with pytest.raises(ConfigError, match=r"^broken$"):
        choose(config, {kind: "broken"})


@pytest.mark.parametrize(
    ("address", "link"),
    [("tcp://127.0.0.1:5555", "zeromq_tcp"), ("ipc:///tmp/link", "zeromq"), (FAR, "zeromq_tcp")],
)
def test_an_address_means_zeromq(address: str, link: Link) -> None:
    assert choose(TransportConfig(address=address), {}) == link


@pytest.mark.parametrize("link", SCHEMES)
def test_the_link_that_is_chosen_is_the_one_that_is_made(link: Link) -> None:
    if link == "shared_memory" and not hasattr(os, "memfd_create"):
        pytest.skip("shared memory is for Linux")
    listener = listen(ON_ONE_MACHINE[link], NONCE)
    try:
        assert listener.address.startswith(f"{SCHEMES[link]}://")
    finally:
        listener.close()
    assert choose_here(ON_ONE_MACHINE[link]) == link


def test_without_zeromq_the_other_links_work_and_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("amusd.transport.zeromq", "amusd.transport.curve"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert (choose_here(AUTO), choose_here(TransportConfig(kind="gloo"))) == ("shared_memory", "gloo")
    with pytest.raises(ConfigError, match=r"^transport=zeromq: needs ZeroMQ: pip install pyzmq \("):
        choose_here(TransportConfig(kind="zeromq"))
