"""Shared by the model tests: no network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.models.triton_process import TritonProcess


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a model test tried to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="package")
def interpreter() -> Iterator[TritonProcess]:
    """Triton's interpreter."""
    with TritonProcess() as process:
        yield process
