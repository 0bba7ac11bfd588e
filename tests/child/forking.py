"""What `test_lives.py` starts: a server that prepares as its first argument says, and lives that do as told."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

from amusd.child.fork_server import Channel, Orders, serve

PATIENCE_SECONDS = 60.0


def prepare(orders: Orders) -> list[int] | None:
    """Prepared is the process id of whoever has prepared."""
    if sys.argv[1] == "on a GPU":  # as torch would tell
        sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))  # type: ignore[assignment]
    if sys.argv[1] == "slow":
        time.sleep(PATIENCE_SECONDS)
    return None if sys.argv[1] == "nothing" else [os.getpid()]


def live(channel: Channel, _settings: Orders, orders: Orders, prepared: list[int] | None) -> int:
    if orders.get("leaves"):
        channel.on_hang_up(lambda: os._exit(0))
    channel.say(f"prepared by {prepared}")
    match orders["what"]:
        case "raise":
            raise ValueError("as told")
        case "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            time.sleep(PATIENCE_SECONDS)
    return int(orders["code"])


def main() -> None:
    sys.exit(serve(prepare, live))
