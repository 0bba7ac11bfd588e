"""amusd: asynchronous speculative decoding on two or more devices.

A draft model runs ahead on one device while the target model verifies on another; candidates and verdicts cross between
them, and a rollback brings the draft back in line when the target disagrees. The text is the target's own.

    from amusd import Engine, SamplingParams

    with Engine.launch(target="embedded", drafter="ngram") as engine:
        for token in engine.stream("Why is the sky blue?", SamplingParams(max_new_tokens=64)):
            print(token.text, end="")

`import amusd` loads no torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amusd.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from amusd.answer import Generation
    from amusd.async_engine import AsyncEngine
    from amusd.engine import Engine

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "EngineConfig", "Generation", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from amusd.engine import Engine

        return Engine
    if name == "AsyncEngine":
        from amusd.async_engine import AsyncEngine

        return AsyncEngine
    if name == "Generation":
        from amusd.answer import Generation

        return Generation
    raise AttributeError(f"module 'amusd' has no attribute {name!r}")
