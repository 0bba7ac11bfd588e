"""A target and a draft process over a gloo link: the plain answer in every mode, and without the draft."""

from __future__ import annotations

from functools import partial
from typing import get_args

import psutil
from runtime.pair import TIMEOUT_SECONDS, decoding, params

from amusd.config import HardwareConfig, TransportConfig
from amusd.engine import Engine
from amusd.types import Mode


def test_the_answer_is_the_plain_one_in_every_mode_and_when_the_draft_is_killed() -> None:
    hardware = HardwareConfig(synthetic="smollm2-135m-slice", devices=("cpu", "cpu"))
    transport = TransportConfig(kind="gloo")
    # the target waits for candidates, however slow the machine is
    schedules = [
        decoding(mode, 4, policy="branching", min_candidates=2, max_wait_passes=10_000.0, max_silence_seconds=60.0)
        for mode in get_args(Mode)
    ]
    with Engine.launch(drafter="synthetic", hardware=hardware, transport=transport, max_model_len=64) as engine:
        plain = engine.generate("hello", params(16), decoding=schedules[0])
        asked = partial(engine.stream, "hello", params(16), reference=plain.token_ids)
        others = [asked(decoding=schedule).result() for schedule in schedules[1:]]
        assert plain.metrics.num_verified == 0
        assert all(answer.metrics.num_accepted > 0 for answer in others)
        assert [answer.token_ids for answer in others] == [plain.token_ids] * 2
        assert engine.draft.failure is None
        stream = asked(decoding=decoding("asynchronous", 4))
        next(stream)
        assert engine.draft.pid is not None
        process = psutil.Process(engine.draft.pid)
        process.kill()
        process.wait(TIMEOUT_SECONDS)
        for _ in stream:
            pass
        assert stream.generation.token_ids == plain.token_ids
        asked(decoding=decoding("asynchronous", 4)).result()
        assert engine.draft.failure is not None
