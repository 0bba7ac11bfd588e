"""Shared by the model tests: no network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from tests.models.triton_process import TritonProcess


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX, f"a model test tried to connect to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="package")
def interpreter() -> Iterator[TritonProcess]:
    with TritonProcess() as process:
        yield process


@pytest.fixture(scope="package")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an intact tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("plain"), tiny.byte_tokenizer()
    tiny.save_checkpoint(folder, tiny.tiny_config(vocab_size=len(tokenizer), tie_word_embeddings=False), tokenizer)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.save_checkpoint(folder, tiny.tiny_config(num_hidden_layers=6, tie_word_embeddings=False))
    return folder
