"""amusd: asynchronous speculative decoding on two or more devices.

A draft model runs ahead on one device while the target model verifies on another. The text is the target's own.

    from amusd import Engine, SamplingParams

    with Engine.launch(target="embedded", drafter="ngram") as engine:
        for token in engine.stream("Why is the sky blue?", SamplingParams(max_new_tokens=64)):
            print(token.text, end="")

`import amusd` does not import torch; the names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from amusd.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from amusd.answer import Generation
    from amusd.async_engine import AsyncEngine
    from amusd.engine import Engine

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "EngineConfig", "Generation", "SamplingParams", "__version__"]


_HOMES = {"AsyncEngine": "amusd.async_engine", "Engine": "amusd.engine", "Generation": "amusd.answer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'amusd' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
