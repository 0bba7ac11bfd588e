"""A file is there whole or not at all, whatever the disk says."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from amusd.errors import ConfigError
from amusd.files import write_whole


def test_what_does_not_fit_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")
    with files_of_at_most(100), pytest.raises(ConfigError) as caught:
        write_whole(path, "x" * 1000)
    assert str(caught.value) == f"{path}: cannot be written (File too large)"
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("result.json", "old")]
