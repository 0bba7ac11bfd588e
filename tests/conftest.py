"""Shared by the whole suite: one thread, quick garbage collections, and one unpacked copy of the embedded target."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amusd.logs import logger, warn_once

# Test helpers (`protocol.harness`, `strategies` ...) are imported from the tests folder itself.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "start every process as a shell does, and none as a fork (tests/warm.py)"
    parser.addoption("--new-interpreters", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
        signal.signal(signal.SIGHUP, lambda *_: None)  # below nohup; what tests start has the default again
    if config.getoption("--new-interpreters"):
        from tests.warm import Popen

        Popen.is_forked = False
    if importlib.util.find_spec("hypothesis") is not None:  # a bare GPU machine has none
        from hypothesis import HealthCheck, settings

        settings.register_profile("amusd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("amusd")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keep what has been imported out of garbage collections, which captures of graphs begin with."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_lines() -> Iterator[None]:
    """A test that runs a command leaves the logger as a library has it."""
    yield
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    warn_once.cache_clear()


@pytest.fixture
def threads_switch_only_when_one_waits() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    from amusd.checkpoints.embedded_target import embedded_target_path

    return embedded_target_path()


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random `target`, and a smaller `draft`."""
    from tests.launch.small_pair import save_pair

    folder: Path = tmp_path_factory.mktemp("small_models")
    save_pair(folder)
    return folder


@pytest.fixture(scope="session")
def small_pair(small_models: Path) -> list[str]:
    """The arguments that name them."""
    from tests.launch.small_pair import arguments_of

    return arguments_of(small_models)
