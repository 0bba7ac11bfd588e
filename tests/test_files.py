"""A file is written whole or not at all, whatever error the disk gives."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from full_disk import files_of_at_most

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.files import MAX_SOCKET_FOLDER, keep_traceback, make_socket_folder, write_whole
from amusd.transport.factory import connect, link_address, listen


def test_what_does_not_fit_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")
    with files_of_at_most(100), pytest.raises(ConfigError) as caught:
        write_whole(path, "x" * 1000)
    assert str(caught.value) == f"{path}: cannot be written (File too large)"
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("result.json", "old")]


def test_a_traceback_that_is_not_utf_8_is_kept(tmp_path: Path) -> None:
    keep_traceback(tmp_path, "target", RuntimeError("/models/\udcff"))
    assert (tmp_path / "target_error.txt").read_text() == "RuntimeError: /models/\\udcff\n"


@pytest.mark.parametrize("kind", ["auto", "shared_memory", "zeromq"])
def test_links_meet_in_a_shorter_folder_if_that_of_temporary_files_is_too_long_for_sockets(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * MAX_SOCKET_FOLDER)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    config = TransportConfig(kind=kind)
    with link_address(config) as address, closing(listen(config, address)), closing(connect(config, address, 1)):
        pass
    assert list(long.iterdir()) == []


def test_without_a_folder_for_temporary_files_the_line_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ConfigError, match="TMPDIR: no folder for sockets can be made: "):
        make_socket_folder()
