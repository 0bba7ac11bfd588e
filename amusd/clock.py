"""The clock of workers and of message times: the machine's, unless a test or simulation passes another."""

from __future__ import annotations

import time


class Clock:
    """Monotonic time, the same in all processes of a machine. A subclass overrides `now_ns` and `sleep`."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary moment."""
        return time.monotonic_ns()

    def now(self) -> float:
        """`now_ns` in seconds."""
        return self.now_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)


MONOTONIC = Clock()
