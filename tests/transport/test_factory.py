"""The rule that `transport=auto` follows, and what it says where ZeroMQ is missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import get_args
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.transport import factory
from amusd.transport.factory import Link, choose_here

AUTO = TransportConfig()
IN_ORDER: tuple[Link, ...] = ("shared_memory", "zeromq", "zeromq_tcp")


def choose(config: TransportConfig, failed: Mapping[Link, str]) -> Link:
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


def test_without_zeromq_the_other_links_work_and_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("amusd.transport.zeromq", "amusd.transport.curve"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert (choose_here(AUTO), choose_here(TransportConfig(kind="gloo"))) == ("shared_memory", "gloo")
    with pytest.raises(ConfigError, match=r"^transport=zeromq: needs ZeroMQ: pip install pyzmq \("):
        choose_here(TransportConfig(kind="zeromq"))
