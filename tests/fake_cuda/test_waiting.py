"""While a worker waits for its GPU, its other threads run; and it does not wait for ever."""

from __future__ import annotations

import threading
import time

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.workers import Target

from amusd.errors import DeviceError

PROMPT = [5, 17, 4, 90]
PATIENCE_SECONDS = 60.0


@pytest.mark.usefixtures("threads_switch_only_when_one_waits")
def test_other_threads_run_while_the_host_waits_for_the_device() -> None:
    """A query of an event does not let them. Here the device is done once another thread has run."""
    gate, has_run, gave_up = threading.Lock(), threading.Lock(), []
    gate.acquire()
    has_run.acquire()

    def other_thread() -> None:
        gate.acquire()
        has_run.release()

    def is_finished() -> bool:
        if gate.locked() and not gave_up:
            gave_up.append(time.monotonic() + PATIENCE_SECONDS)
            gate.release()
        if time.monotonic() > gave_up[0]:
            gave_up.append(0.0)
            return True
        return not has_run.locked()

    with fake_cuda() as gpus:
        target = Target(builders.target("cuda:0", max_model_len=256))
        target.open(PROMPT)
        other = threading.Thread(target=other_thread)
        other.start()
        gpus.is_finished = is_finished
        target.verify(())
    other.join()
    assert len(gave_up) == 1


def test_a_device_that_never_finishes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, skipped = time.monotonic, [0.0]

    def never() -> bool:
        skipped[0] += 10.0  # seconds, as the host sees them
        assert skipped[0] < 3600, "no deadline"
        return False

    with fake_cuda() as gpus:
        target = Target(builders.target("cuda:0", max_model_len=256))
        target.open(PROMPT)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + skipped[0])
        gpus.is_finished = never
        with pytest.raises(DeviceError, match="did not finish"):
            target.verify(())
