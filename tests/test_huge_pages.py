"""Memory is moved into huge pages as it is, and a program that starts again for them keeps its arguments."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from amusd.huge_pages import environment_with_huge_pages, restart_with_huge_pages, use_huge_pages

HUGE = 1 << 21
COLLAPSE = 25
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is told to use huge pages")


def private_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(os.urandom(HUGE) * 8)
    return memory


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


@linux
def test_memory_moves_into_huge_pages_as_it_is() -> None:
    with private_memory() as probe:
        try:
            probe.madvise(COLLAPSE)
        except OSError as error:
            pytest.skip(f"this system moves no memory: {error}")
    with private_memory() as memory:
        content, before = memory[:], huge_bytes()
        use_huge_pages()
        assert memory[:] == content
        assert huge_bytes() >= before + 6 * HUGE


def test_who_has_chosen_the_pages_of_malloc_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "glibc.malloc.hugetlb=0:glibc.malloc.check=0"
    monkeypatch.setenv("GLIBC_TUNABLES", own)
    monkeypatch.setattr(os, "execve", Mock(side_effect=AssertionError))
    monkeypatch.setattr(sys, "argv", sys.orig_argv)
    restart_with_huge_pages()
    assert environment_with_huge_pages()["GLIBC_TUNABLES"] == own


@linux
def test_a_program_that_starts_again_does_so_once_with_its_arguments() -> None:
    program = """\
import os, sys
from amusd.huge_pages import restart_with_huge_pages
print("started", flush=True)
restart_with_huge_pages()
print(os.environ["GLIBC_TUNABLES"], *sys.argv[1:])
"""
    own = "glibc.malloc.check=0"
    command = [sys.executable, "-c", program, "a b", "c=1"]
    environment = {**os.environ, "GLIBC_TUNABLES": own}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["started", "started", f"{own}:glibc.malloc.hugetlb=1 a b c=1"]
