"""A target and a draft process over a gloo link: the plain answer in every mode, and without the draft."""

from __future__ import annotations

import os
import signal

from runtime.pair import decoding, params

from amusd.config import HardwareConfig, TransportConfig
from amusd.engine import Engine
from amusd.types import Mode


def test_the_answer_is_the_plain_one_in_every_mode_and_when_the_draft_is_killed() -> None:
    hardware = HardwareConfig(synthetic="smollm2-135m-slice", devices=("cpu", "cpu"))
    transport = TransportConfig(kind="gloo")
    with Engine.launch(drafter="ngram", hardware=hardware, transport=transport, max_model_len=64) as engine:
        plain, *others = [engine.generate("hello", params(24), decoding=decoding(mode, 4)) for mode in Mode]
        assert plain.metrics.num_verified == 0
        assert [answer.token_ids for answer in others] == [plain.token_ids] * 2
        assert engine.draft_failure is None
        stream = engine.stream("hello", params(24), decoding=decoding(Mode.ASYNCHRONOUS, 4))
        next(stream)
        assert engine.draft_pid is not None
        os.kill(engine.draft_pid, signal.SIGKILL)
        for _ in stream:
            pass
        assert stream.generation.token_ids == plain.token_ids
        engine.generate("hello", params(24), decoding=decoding(Mode.ASYNCHRONOUS, 4))
        assert engine.draft_failure is not None
