"""The inner drafter of a cascade in a process of its own: three devices compute at once.

    draft  ──Candidate──▶  middle  ──Candidate──▶  target
           ◀───Verdict───          ◀───Verdict───

The middle is the draft's target, and commits its own proposals there. If the real target rejects some, a new sequence
begins with those left: no verdict undoes committed tokens. The draft reuses its cache. The middle never waits; without
candidates it drafts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from amusd.checkpoints.tokenizer import Tokenizer
from amusd.config import DrafterConfig, EngineConfig, TransportConfig
from amusd.drafters.base import Drafter, DrafterFactory
from amusd.logs import warn_once
from amusd.protocol.messages import Open
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.client_sequence import ClientSequence
from amusd.runtime.connection import Connection
from amusd.runtime.devices import check_devices, device_of
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_process import DraftSource
from amusd.tracing.recorder import Recorder

LOOKAHEAD = 16
"""Tokens that the draft may be ahead of the middle."""
SILENCE_SECONDS = 60.0
"""Seconds for which a silent draft still gets every verdict; the middle never waits."""


class RemoteDrafter(Drafter):
    """One sequence at a draft. Timing changes the number of proposals, not the cascade's text."""

    def __init__(self, client: DraftClient, drafter: str, vocab_size: int) -> None:
        """`drafter`: its name at the draft; `vocab_size`: token ids of the middle are `[0, vocab_size)`."""
        self._client, self._drafter, self._vocab_size = client, drafter, vocab_size
        self._sequence: ClientSequence | None = None
        self._last: ClientSequence | None = None

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`."""
        super().open(token_ids, capacity, fan_out)
        self.foresee(())

    def foresee(self, path: Sequence[int]) -> None:
        """Commit `path` at the draft; if the draft has another text, open a new sequence."""
        text, sequence = (*self.committed, *path), self._sequence
        known = () if sequence is None else sequence.session.committed
        if sequence is not None and text[: len(known)] == known:
            if new := text[len(known) :]:
                sequence.append(new)
                self._client.send_verdict(sequence)
            return
        self.close()
        connection = self._client.connection
        if connection.link is not None and len(text) < self.capacity:
            self._sequence = self._last = self._new(text)
            self._client.open(self._sequence)
        elif connection.failure is not None:
            warn_once(f"the cascade's inner draft is lost, so its model drafts alone: {connection.failure}")

    def _new(self, text: Sequence[int]) -> ClientSequence:
        number, last = self._client.next_sequence_id, self._last
        wish = Open(
            sequence_id=number,
            incarnation=0,
            token_ids=(),
            max_length=self.capacity,
            drafter=self._drafter,
            max_lookahead=LOOKAHEAD,
            tokens_per_message=1,
            sampling=self.distribution.as_message(),
        )
        sequence = ClientSequence(text, wish, self._vocab_size, SILENCE_SECONDS)
        sequence.before = last
        if last is not None:
            last.before = None
        return sequence

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        """Commit `path` at the draft; return up to `room` candidates after it."""
        self.foresee(path)
        if self._sequence is None:
            return ()
        self._client.drain()
        return self._sequence.session.candidates[:room]

    def close(self) -> None:
        """Close the sequence, also at the draft."""
        if self._sequence is not None:
            self._client.close(self._sequence)
            self._sequence = None


def start_inner(
    config: EngineConfig, running: ExitStack, drafter: DrafterConfig, middle: ModelRunner, tokenizer: Tokenizer
) -> DrafterFactory:
    """Start a process for a cascade's inner drafter, which ends with `running`; return the factory of its drafters.

    Raises `ConfigError` if the drafters do not fit, `PeerError` if the process does not answer.
    """
    assert drafter.inner_device is not None
    check_devices([drafter.inner_device])
    hardware = replace(config.hardware, devices=(device_of(config, "draft"), drafter.inner_device))
    stage = drafter.stages[1]
    config = replace(
        config, drafters=(stage,), hardware=hardware, transport=TransportConfig(), target_tensor_parallel_size=1
    )
    connection = Connection.to(DraftSource(config), config, running)
    connection.await_first(tokenizer.fingerprint)
    connection.source = None  # a lost draft is not replaced
    client = DraftClient(Recorder("target"), connection)
    return lambda number: [RemoteDrafter(client, stage.kind, middle.num_ids) for _ in range(number)]
