"""The lines for people: those that some code logs, and the one that a mistake is refused with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from amusd.errors import ConfigError
from amusd.logs import logger, warn_once


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that are logged until the block is left, also by other threads."""
    lines: list[str] = []
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    warn_once.cache_clear()
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def refusal(work: Callable[[], object]) -> str:
    """The one line that `work` is refused with."""
    with pytest.raises(ConfigError) as caught:
        work()
    line = str(caught.value)
    assert "\n" not in line
    return line
