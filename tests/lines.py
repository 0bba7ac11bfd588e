"""The lines for people that some code logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
