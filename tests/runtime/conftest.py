"""Fixtures that the tests of the two workers share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def links_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="amusd-") as folder:  # a short path: sockets need one
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        monkeypatch.undo()
